#!/usr/bin/env bash
# Installs the peer loaders for `make bench`; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip -c constraints.txt -e '.[bench]'
# MosaicML Streaming conflicts with our pins. Install it without dependencies, plus the imports needed to read a
# local MDS file, into a folder that only the benchmarks use.
rm -rf .peers
pip --no-deps --target .peers mosaicml-streaming==0.13.0 brotli python-snappy cramjam xxhash zstd catalogue \
  transformers huggingface_hub tokenizers regex hf-xet
echo "installed the benchmark peers"
