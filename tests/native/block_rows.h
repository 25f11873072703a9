// Rows by token block, as kernels write them (put_rows()).
#pragma once

#include <cstdint>
#include <functional>

#include "backend/gpu/words.h"

namespace uccl_ep {

// rows_before(block): of all earlier token blocks.
inline void write_blocks(gpu::BlockRows* array, uint32_t blocks, const std::function<uint32_t(uint32_t)>& rows_before) {
  constexpr uint32_t kBlocks = gpu::BlockRows::kBlocks;
  for (uint32_t group = 0; group < gpu::BlockRows::groups(blocks); ++group)
    array[group].before = rows_before(kBlocks * group);
  for (uint32_t block = 0; block < blocks; ++block)
    reinterpret_cast<uint8_t*>(array[block / kBlocks].counts)[block % kBlocks] =
        static_cast<uint8_t>(rows_before(block + 1) - rows_before(block));
}

}  // namespace uccl_ep
