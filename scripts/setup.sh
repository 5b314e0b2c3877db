#!/usr/bin/env bash
# Creates the virtual environment with the versions in constraints.txt; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv}
"$PYTHON" - <<'CHECK' || exit 2
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 14):
    sys.exit(f"error: needs Python 3.11 to 3.13, but {sys.executable} is {sys.version.split()[0]};"
             " try: make PYTHON=python3.11 …")
CHECK
[ -x "$VENV/bin/python" ] || { echo "creating $VENV (torch and Ray: a few minutes, 8 GB) …"; "$PYTHON" -m venv "$VENV"; }
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt 'pip>=25.1'
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]' --group dev
"$VENV/bin/python" -c 'import torchvision' || {
  echo "error: torch and torchvision are incompatible; remove $VENV and run make setup again" >&2
  exit 1
}
