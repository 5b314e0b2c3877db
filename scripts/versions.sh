#!/usr/bin/env bash
# Runs a selection of the tests with other versions of Ray, Python and PyTorch, each in an environment of its own:
# scripts/versions.sh oldest middle newest. `old` is the oldest Ray on the packages of .venv: quick to install.
set -uo pipefail
cd "$(dirname "$0")/.."
FOLDER=.versions
SELECTION=(
  tests/e2e/test_local.py::test_the_demo_reaches_97_percent_and_leaves_a_report
  tests/rehearsal/test_digits.py
  tests/integration/test_loader.py
  tests/integration/test_ray_jobs.py
  tests/unit/test_step.py
)

# A Python of this version; else the one that runs the other tests.
python_of() {
  local each
  for each in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    "$each" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null && echo "$each" && return
  done
  echo "note: no Python $1 here; $2 uses $(.venv/bin/python -V)" >&2
  echo .venv/bin/python
}

# packages NAME PYTHON REQUIREMENT...: an environment with Stoker and these packages.
packages() {
  local name=$1 python constraints
  python=$(python_of "$2" "$name")
  shift 2
  [ -x "$FOLDER/$name/bin/python" ] || "$python" -m venv "$FOLDER/$name" || return
  constraints=()
  if [ "$name" != newest ]; then
    grep -vE '^(ray|timm|torch|torchvision|triton|sympy|nvidia[-_].*|cuda-.*)==' constraints.txt > "$FOLDER/$name.txt"
    constraints=(-c "$FOLDER/$name.txt")
  fi
  "$FOLDER/$name/bin/python" -m pip install --quiet --disable-pip-version-check "${constraints[@]}" "$@" \
    -e '.[train]' 'ray[default]' pytest pytest-timeout pytest-xdist hypothesis scikit-learn
}

# The packages of .venv, with this Ray before them.
on_top() {
  local site
  [ -x "$FOLDER/old/bin/python" ] || .venv/bin/python -m venv --without-pip "$FOLDER/old" || return
  site=$("$FOLDER/old/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/beside.pth"
  printf '%s\n' "$PWD" "$PWD/source_dir" "$PWD/launcher" >> "$site/beside.pth"
  .venv/bin/python -m pip --python "$FOLDER/old/bin/python" install --quiet --disable-pip-version-check --no-deps "$@"
}

install() {
  case $1 in
    old) on_top ray==2.52.0 ;;
    oldest) packages oldest 3.11 'ray==2.52.0' 'torch==2.6.*' 'torchvision==0.21.*' 'timm==1.0.7' ;;
    # Those of AWS's image ray:train-ml-cuda (docs/ray/rayjob-aws.yaml).
    middle) packages middle 3.13 'ray==2.58.0' 'torch==2.13.*' 'torchvision==0.28.*' ;;
    newest) packages newest 3.12 --upgrade --upgrade-strategy eager torch torchvision ;;
    *) echo "scripts/versions.sh: unknown $1; oldest, middle, newest or old" >&2; return 2 ;;
  esac
}

mkdir -p "$FOLDER"
failed=0
for name in "$@"; do
  echo "== $name"
  started=$SECONDS
  if ! install "$name"; then
    echo "$name: not installed" >&2
    failed=1
    continue
  fi
  python=$FOLDER/$name/bin/python
  "$python" -c 'import platform, ray, torch
print(f"Python {platform.python_version()}, Ray {ray.__version__}, PyTorch {torch.__version__}")'
  echo "installed in $((SECONDS - started)) s"
  chosen=("${SELECTION[@]}")
  # A small job on this machine and a lost host are enough here.
  lost="${SELECTION[1]}::test_a_lost_host_and_a_sigterm_cost_no_record"
  [ "$name" = old ] && chosen=(tests/e2e/test_small_store.py "$lost")
  "$python" -m pytest -q -n 2 --dist loadfile --durations=5 "${chosen[@]}" || failed=1
  echo "$name: $((SECONDS - started)) s"
done
exit $failed
