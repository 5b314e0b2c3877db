#!/usr/bin/env bash
# Installs Spark for tests/e2e/test_databricks.py: pyspark (0.5 GB) in a folder of its own, and Java; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
if ! command -v java >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: missing Java 17 or later; install it (on Debian: apt-get install default-jre-headless)" >&2
    exit 1
  fi
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y default-jre-headless >/dev/null
fi
[ -d .spark/pyspark ] && exit 0
# Not into the environment: it is larger than everything else together, and only this test uses it.
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target .spark \
  pyspark==4.3.0 py4j==0.10.9.9
