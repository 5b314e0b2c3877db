#!/usr/bin/env bash
# Runs parts of the tests one after the other, even after failures, and prints the time of each part and the
# slowest tests.
set -u
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
table="" failed=0
for part in "$@"; do
  echo "== $part"
  started=$SECONDS
  make --no-print-directory "$part" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || failed=1
  table+=$(printf '%-12s %5d s  %s' "$part" $((SECONDS - started)) "$([ "$code" = 0 ] && echo passed || echo FAILED)")$'\n'
done
echo "== slowest tests"
grep -E '^[0-9.]+s (call|setup|teardown) ' "$log" | sort -rn | head -10
echo "== parts"
printf '%s' "$table"
printf '%-12s %5d s\n' all "$SECONDS"
exit $failed
