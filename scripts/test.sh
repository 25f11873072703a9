#!/usr/bin/env bash
# Sets everything up (see setup_env.sh), then runs the tests:
#
#   ./scripts/test.sh [arguments of pytest]      e.g. tests/unit -k dispatch, -m slow, -x
#
# Without arguments it runs everything that is not marked slow or long, in the three shares of tests/shares.py. Runs in the
# clone's folder, to which relative paths refer.
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

cd "$ROOT"

if [ $# -gt 0 ]; then
  printf '[test] python -m pytest %s\n' "$*"
  "$VENV/bin/python" -m pytest "$@"
  exit
fi

# share NAME PRIORITY MARKS arguments...: runs pytest with a cache of its own, which `again` uses.
share() {
  local name="$1" priority="$2" marks="not slow and not long${3:+ and $3}"
  shift 3
  printf '[test] %s: python -m pytest -m "%s" %s\n' "$name" "$marks" "$*"
  nice -n "$priority" "$VENV/bin/python" -m pytest -o cache_dir="build/pytest/$name" -m "$marks" "$@"
}
# again NAME STATUS: runs the tests that failed beside others once more, by themselves. Exit code 1 says that tests failed;
# any other code says nothing about them, and is returned.
again() {
  [ "$2" -eq 1 ] || return "$2"
  share "$1" 0 "" -q --last-failed --last-failed-no-failures none
}

processes=$(nproc)
[ "$processes" -le 8 ] || processes=8
beside=(-n "$processes" --dist loadgroup)
"$VENV/bin/python" -c 'import xdist' 2>/dev/null || beside=()
mkdir -p build/pytest

# Tests that wait hardly compute: they run beside the others, with a higher priority.
share waits 0 waits --durations=10 >build/pytest/waits.log 2>&1 </dev/null &
waits=$!
trap 'kill "$waits" 2>/dev/null || true' EXIT
trains=0 others=0 waited=0
share trains 10 trains --durations=10 || trains=$?
share others 10 "not waits and not trains" --durations=10 -q "${beside[@]}" || others=$?
printf '[test] what waits has run meanwhile, or still does\n'
wait "$waits" || waited=$?
trap - EXIT
cat build/pytest/waits.log

failed=0
for result in "trains $trains" "others $others" "waits $waited"; do
  read -r name status <<<"$result"
  [ "$status" -eq 0 ] || again "$name" "$status" || failed=$?
done
exit "$failed"
