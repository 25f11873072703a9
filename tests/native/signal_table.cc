// Prints the declarations of signals as the table of docs/memory_model.md: see tests/signals.py.
#include <cstdio>
#include <string>

#include "backend/gpu/signals.h"

namespace {

using namespace uccl_ep;
using namespace uccl_ep::gpu;

const char* name_of(Scope scope) { return scope == Scope::kGpu ? "GPU" : "system"; }

// Of a wait for it: the step that an error names, and the deadline.
std::string patience_of(const Signal& signal) {
  switch (signal.deadline) {
    case Deadline::kArrival:
      return std::string(step_name(signal.step)) + ", arrival";
    case Deadline::kProgress:
      return std::string(step_name(signal.step)) + ", progress";
    case Deadline::kBlocks:
    case Deadline::kNobody:
      return "none";
  }
  return "";
}

void print(const Signal& signal) {
  std::printf("|`%s`|%s|%s|%s|%s|%s|%s|%s|\n", signal.name, signal.writer, signal.readers, signal.publishes,
              signal.waits, name_of(signal.scope), patience_of(signal).c_str(),
              signal.reset != nullptr ? signal.reset : "never");
}

template <typename... Of>
void print_all(const std::tuple<Of...>&) {
  (print(Of::kIs), ...);
}

}  // namespace

int main() {
  std::puts(
      "|signal|writer|readers|what it publishes|who waits|scope|step, deadline|reset|\n"
      "|---|---|---|---|---|---|---|---|");
  print_all(AllSignals{});
}
