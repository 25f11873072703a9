#include "engine/stats.h"

namespace uccl_ep {

void put_straggler(Stats& out, const std::vector<uint64_t>& waited_usec, int own_rank) {
  int straggler = -1;
  uint64_t most_usec = 0;
  for (size_t rank = 0; rank < waited_usec.size(); ++rank) {
    if (static_cast<int>(rank) == own_rank || waited_usec[rank] <= most_usec) continue;
    most_usec = waited_usec[rank];
    straggler = static_cast<int>(rank);
  }
  put(out, "straggler.rank", straggler);
  put(out, "straggler.wait_seconds", static_cast<double>(most_usec) * 1e-6);
}

}  // namespace uccl_ep
