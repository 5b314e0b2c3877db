#!/usr/bin/env bash
# Installs what the soak tests of Databricks and SkyPilot need (1 GB, below .places); safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
if ! command -v java >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: missing Java 17 or later; install it (on Debian: apt-get install default-jre-headless)" >&2
    exit 1
  fi
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y default-jre-headless >/dev/null
fi
if ! command -v fusermount >/dev/null || ! ldconfig -p | grep -q libfuse.so.2; then
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y fuse libfuse2 >/dev/null || echo "without fuse and libfuse2" >&2
fi
# None into the environment: they are large, or ask for other versions of what is there.
[ -d .places/spark/pyspark ] || pip install --no-deps --target .places/spark pyspark==4.3.0 py4j==0.10.9.9
[ -f .places/fuse/fuse.py ] || pip install --no-deps --target .places/fuse fusepy==3.0.1
if [ ! -x .places/skypilot/bin/sky ]; then
  "$VENV/bin/python" -m venv .places/skypilot
  pip --python .places/skypilot/bin/python install skypilot==0.14.1
fi
