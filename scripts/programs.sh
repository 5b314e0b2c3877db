#!/usr/bin/env bash
# Trains programs of other projects with Stoker, at these versions, in an environment on top of .venv's packages.
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=.versions/programs
if [ ! -x "$FOLDER/bin/python" ]; then
  .venv/bin/python -m venv --without-pip "$FOLDER"
  site=$("$FOLDER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$PWD" "$PWD/source_dir" "$PWD/launcher" > "$site/beside.pth"
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >> "$site/beside.pth"
fi
"$FOLDER/bin/python" -m pip install --quiet --disable-pip-version-check nnunetv2==2.8.1 batchgenerators==0.25.5
exec "$FOLDER/bin/python" -m pytest -q tests/programs
