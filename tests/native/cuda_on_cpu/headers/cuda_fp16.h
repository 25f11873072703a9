// In place of CUDA's: only sync/ptx.cuh uses it, which has a stand-in of its own.
#pragma once
