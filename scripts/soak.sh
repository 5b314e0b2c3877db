#!/usr/bin/env bash
# Runs the soak tests and a storm of faults before a release and writes the results to docs/soak.md.
# MINUTES: of the storm, 10 by default. SEED: repeats a storm.
set -u
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
failed=0
run() {
  local code=0
  "$VENV/bin/python" -m pytest -q --timeout 3600 --junitxml "$results/$1.xml" "${@:2}" || code=$?
  # 5: the part has no soak tests.
  [ $code = 0 ] || [ $code = 5 ] || failed=1
}
bash scripts/places.sh || failed=1
# One after the other: what fails is told by its part.
for part in unit integration rehearsal e2e; do
  run "long-$part" -m soak "tests/$part"
done
# With these, about a million frames of the block server's protocol.
export STOKER_SCHEMA_EXAMPLES=20000 STOKER_FUZZ=5000 STOKER_FRAMES=600000 STOKER_LOADER_EXAMPLES=1000
run properties tests/unit/test_schema_of_a_split.py tests/unit/test_bad_data.py \
  tests/unit/test_protocol_fuzz.py tests/unit/test_loader_order.py
STOKER_INTERRUPTIONS=5 run interruptions tests/integration/test_resume.py -k killed_and_stopped_and_damaged
"$VENV/bin/python" -m benchmarks.storm --minutes "${MINUTES:-10}" ${SEED:+--seed "$SEED"} || failed=1
"$VENV/bin/python" scripts/soak_report.py docs/soak.md "$results"/*.xml benchmarks/results/soak.json
exit $failed
