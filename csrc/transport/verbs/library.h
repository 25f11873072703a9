// libibverbs and libefa, found at run time: a machine without them has no verbs transport and misses nothing else.
#pragma once

#include <string>

namespace uccl_ep::verbs {

// Loads libibverbs. Empty, or why it cannot be loaded.
std::string load_library();
// A function of libefa; nullptr without the library or without the function.
void* efa_symbol(const char* name);

}  // namespace uccl_ep::verbs
