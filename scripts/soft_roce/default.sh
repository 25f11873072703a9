#!/usr/bin/env bash
# What soft_roce.sh runs in the VM when it is told nothing else, in the clone's folder:
#
#   default.sh CONFORMANCE PYTHON LOSS_PERCENT      the compiled suite, the interpreter, and the loss of the second part
#
# Both parts run whatever becomes of the other; the exit code is 0 if both are right.
set -euo pipefail

conformance="$1" python="$2" loss_percent="$3"
failed=()

# Deadlines are stretched: an emulated core is some twenty times slower.
"$conformance" verbs --device rxe0 --device rxe1 --patience 4 --cut 'soft_roce_wire cut' --heal 'soft_roce_wire heal' \
  --down 'soft_roce_wire down' --up 'soft_roce_wire up' ||
  failed+=("the conformance suite")

soft_roce_wire loss "$loss_percent"
"$python" tests/conformance/two_domains.py --transport verbs --nics rxe0,rxe1 || failed+=("dispatch and combine")
lost_packets="$(soft_roce_wire lost)"
printf '%d packets were lost at %s %%\n' "$lost_packets" "$loss_percent"
# Or it was shown for a link that loses nothing.
[ "$loss_percent" = 0 ] || [ "$lost_packets" -gt 0 ] || failed+=("the loss of packets")

printf 'soft-RoCE: %s\n' "$([ ${#failed[@]} -eq 0 ] && echo 'all is right' || printf 'FAILED: %s. ' "${failed[@]}")"
exit $((${#failed[@]} > 0))
