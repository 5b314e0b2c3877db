#!/usr/bin/env bash
# Installs the loaders that `make bench` compares with; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip -c constraints.txt -e '.[bench]'
# MosaicML Streaming requires versions that do not fit our pins. What reading a local MDS file imports is
# enough here, so it gets a folder of its own, without dependencies, that only the benchmarks see.
rm -rf .peers
pip --no-deps --target .peers mosaicml-streaming==0.13.0 brotli python-snappy cramjam xxhash zstd catalogue \
  transformers huggingface_hub tokenizers regex hf-xet
echo "the benchmarks' peers are installed"
