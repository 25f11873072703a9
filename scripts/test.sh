#!/usr/bin/env bash
# Sets everything up (see setup_env.sh), then runs the tests:
#
#   ./scripts/test.sh [arguments of pytest]      e.g. tests/unit -k dispatch, -m slow, -x
#
# Without arguments: everything that is not marked slow or long, first what can run side by side, then what needs the machine
# for itself (tests/shares.py). Runs in the clone's folder, to which relative paths refer.
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

cd "$ROOT"

run_tests() {
  printf '[test] python -m pytest %s\n' "$*"
  "$VENV/bin/python" -m pytest "$@"
}

if [ $# -gt 0 ]; then
  run_tests "$@"
  exit
fi

processes=$(nproc)
[ "$processes" -le 8 ] || processes=8
beside=(-n "$processes" --dist loadgroup)
"$VENV/bin/python" -c 'import xdist' 2>/dev/null || beside=()
status=0
run_tests --durations=10 -q "${beside[@]}" -m 'not slow and not long and not alone' || status=$?
# Exit code 1: tests failed. Anything else is no verdict on them.
if [ "$status" -eq 1 ]; then
  printf '[test] what failed beside others runs again, by itself\n'
  status=0
  run_tests -q --last-failed --last-failed-no-failures none -m 'not slow and not long and not alone' || status=$?
fi
alone=0
run_tests --durations=10 -m 'alone and not slow and not long' || alone=$?
[ "$status" -ne 0 ] || exit "$alone"
printf '[test] FAILED above, beside others and by itself (exit code %d)\n' "$status"
exit "$status"
