#!/usr/bin/env bash
# The default command of soft_roce.sh. It runs in the VM, in the clone's folder:
#
#   default.sh CONFORMANCE PYTHON LOSS_PERCENT      the compiled suite, the interpreter, and the loss of the second part
#
# The second part runs even if the first fails. The exit code is 0 if both succeed.
set -euo pipefail

conformance="$1" python="$2" loss_percent="$3"
failed=()

# Deadlines are stretched: an emulated core is about twenty times slower.
"$conformance" verbs --device rxe0 --device rxe1 --patience 4 --cut 'soft_roce_wire cut' --heal 'soft_roce_wire heal' \
  --down 'soft_roce_wire down' --up 'soft_roce_wire up' ||
  failed+=("the conformance suite")

soft_roce_wire loss "$loss_percent"
"$python" tests/conformance/two_domains.py --transport verbs --nics rxe0,rxe1 || failed+=("dispatch and combine")
lost_packets="$(soft_roce_wire lost)"
printf '%d packets were lost at %s %%\n' "$lost_packets" "$loss_percent"
# Otherwise the second part has run on a link that loses nothing.
[ "$loss_percent" = 0 ] || [ "$lost_packets" -gt 0 ] || failed+=("the loss of packets")

printf 'soft-RoCE: %s\n' "$([ ${#failed[@]} -eq 0 ] && echo 'all is right' || printf 'FAILED: %s. ' "${failed[@]}")"
exit $((${#failed[@]} > 0))
