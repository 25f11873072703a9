#!/usr/bin/env bash
# Sets everything up (see setup_env.sh), then runs the tests:
#
#   ./scripts/test.sh [arguments of pytest]      e.g. tests/unit -k dispatch, -m slow, -x
#
# Without arguments: everything that is not marked slow or long. Runs in the clone's folder, to which relative paths refer.
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

cd "$ROOT"
[ $# -gt 0 ] || set -- --durations=10
printf '[test] python -m pytest %s\n' "$*"
exec "$VENV/bin/python" -m pytest "$@"
