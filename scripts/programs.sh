#!/usr/bin/env bash
# Trains programs of other projects with Stoker, at these versions, in environments on top of .venv's packages:
# scripts/programs.sh [FOLDER of the environments]
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=$(realpath -m "${1:-.versions/programs}")
failed=0

# NAME "PACKAGES AND OPTIONS OF PIP" TESTS…
trains() {
  local python=$FOLDER/$1/bin/python site
  if [ ! -x "$python" ]; then
    .venv/bin/python -m venv --without-pip "$FOLDER/$1"
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$PWD" "$PWD/source_dir" "$PWD/launcher" > "$site/beside.pth"
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >> "$site/beside.pth"
  fi
  # shellcheck disable=SC2086
  "$python" -m pip install --quiet --disable-pip-version-check $2
  "$python" -m pytest -q "${@:3}" || failed=1
}

trains main "nnunetv2==2.8.1 batchgenerators==0.25.5 trl==1.16.0 datasets==5.2.0 lhotse==1.33.0 ultralytics==8.4.190" \
  tests/programs/test_nnunet.py tests/programs/test_programs.py
trains swift "ms-swift==4.6.0" tests/programs/test_swift.py
# lerobot pins an older torch, which the programs do not need.
trains lerobot "--no-deps lerobot==0.4.4 transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.35.3 datasets==4.8.5
  dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 fsspec==2026.2.0 draccus==0.10.0 mergedeep==1.3.4 mypy_extensions==1.2.0
  pyyaml-include==1.4.1 toml==0.10.2 typing-inspect==0.9.0 einops==0.8.2 deepdiff==8.6.2 orderly-set==5.5.0
  jsonlines==4.0.0 termcolor==3.3.0 gymnasium==1.4.0 Farama-Notifications==0.0.6 imageio==2.38.1
  imageio-ffmpeg==0.8.1 diffusers==0.35.2 pyserial==3.5 rerun-sdk==0.26.2" tests/programs/test_lerobot.py
exit $failed
