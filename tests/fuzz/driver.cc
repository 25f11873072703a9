// Drives a target where there is no libFuzzer: inputs of a corpus and random changes to them. What reaches code that
// none before it has reached is kept and changed further (g++ -fsanitize-coverage=trace-pc calls us at every branch).
//   driver CORPUS SECONDS SEED CRASH    feeds inputs; the one that ends the target is written to the file CRASH
//   driver INPUT                        feeds one file
// This file is compiled without -fsanitize-coverage.
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "target.h"

namespace {

using Input = std::vector<uint8_t>;

constexpr size_t kMostBytes = 4096;
constexpr size_t kMostInputs = 4096;

std::array<bool, 1 << 16> reached;
uintptr_t last_place = 0;
bool reached_more = false;

std::string crash_path;
Input current;

void keep_current() {
  if (crash_path.empty()) return;
  std::ofstream(crash_path, std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()), static_cast<std::streamsize>(current.size()));
}

Input read(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void feed(const Input& input) {
  current = input;
  last_place = 0;
  reached_more = false;
  const Input exact(current);  // its end is the end of an allocation
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

class Changes {
 public:
  explicit Changes(uint64_t seed) : random_(seed) {}
  size_t below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  void apply(Input& input, const Input& other) {
    switch (below(8)) {
      case 0:
        return flip(input);
      case 1:
        return overwrite(input, below(256), 1);
      case 2:
        return overwrite(input, number(), size_t{1} << below(4));
      case 3:
        return replace_digits(input);
      case 4:
        return insert(input, Input(1 + below(16), static_cast<uint8_t>(below(256))));
      case 5:
        return erase(input);
      case 6:
        return insert(input, part(input));
      default:
        return insert(input, part(other));
    }
  }

 private:
  // At the edges of fields, and just past them.
  uint64_t number() {
    const uint64_t edge = below(2) == 0 ? uint64_t{1} << below(64) : below(64);
    return edge + below(3) - 1;
  }
  void flip(Input& input) {
    if (!input.empty()) input[below(input.size())] ^= static_cast<uint8_t>(1u << below(8));
  }
  void overwrite(Input& input, uint64_t value, size_t num_bytes) {
    const size_t at = below(input.size());
    for (size_t i = 0; i < num_bytes && at + i < input.size(); ++i)
      input[at + i] = static_cast<uint8_t>(value >> 8 * i);
  }
  void replace_digits(Input& input) {
    const auto is_digit = [](uint8_t c) { return c >= '0' && c <= '9'; };
    const auto from = std::find_if(input.begin() + static_cast<ptrdiff_t>(below(input.size())), input.end(), is_digit);
    const auto to = std::find_if_not(from, input.end(), is_digit);
    const std::string text = (below(8) == 0 ? "-" : "") + std::to_string(number());
    const auto at = input.erase(from, to);
    input.insert(at, text.begin(), text.end());
  }
  void insert(Input& input, const Input& what) {
    input.insert(input.begin() + static_cast<ptrdiff_t>(below(input.size() + 1)), what.begin(), what.end());
  }
  void erase(Input& input) {
    const size_t at = below(input.size()), count = std::min(1 + below(16), input.size() - at);
    input.erase(input.begin() + static_cast<ptrdiff_t>(at), input.begin() + static_cast<ptrdiff_t>(at + count));
  }
  Input part(const Input& input) {
    const size_t at = below(input.size()), count = std::min(1 + below(32), input.size() - at);
    return {input.begin() + static_cast<ptrdiff_t>(at), input.begin() + static_cast<ptrdiff_t>(at + count)};
  }

  std::mt19937_64 random_;
};

// False: a seed that has to be valid is none.
bool feed_corpus(const std::filesystem::path& folder, std::vector<Input>& inputs) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) {
    inputs.push_back(read(path));
    feed(inputs.back());
    if (path.filename().string().starts_with("valid") && !fuzz_accepted) {
      std::fprintf(stderr, "FAILED: %s is not valid\n", path.c_str());
      return false;
    }
  }
  return !inputs.empty();
}

int fuzz_for(double seconds, uint64_t seed, std::vector<Input>& inputs) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Changes changes(seed);
  uint64_t num_runs = 0;
  while (std::chrono::steady_clock::now() < deadline) {
    // The newest are where it gets further.
    const size_t newest = inputs.size() - 1 - std::min(changes.below(8), inputs.size() - 1);
    Input input = inputs[changes.below(2) == 0 ? newest : changes.below(inputs.size())];
    for (size_t n = 1 + changes.below(4); n != 0; --n) changes.apply(input, inputs[changes.below(inputs.size())]);
    if (input.size() > kMostBytes) input.resize(kMostBytes);
    feed(input);
    ++num_runs;
    if (reached_more && inputs.size() < kMostInputs) inputs.push_back(std::move(input));
  }
  std::printf("ok: %lu runs, %zu inputs, %td branches\n", num_runs, inputs.size(),
              std::count(reached.begin(), reached.end(), true));
  return 0;
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const uintptr_t place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  bool& here = reached[(place ^ last_place >> 1 ^ place >> 16) % reached.size()];
  reached_more |= !here;
  here = true;
  last_place = place;
}

// Told apart from a driver that was misused. UBSan knows nothing of our callback: it aborts, which ASan sees.
extern "C" const char* __asan_default_options() { return "handle_abort=1:exitcode=86"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

int main(int argc, char** argv) {
  if (argc == 2 && std::filesystem::exists(argv[1])) {
    feed(read(argv[1]));
    std::printf("ok: %s\n", argv[1]);
    return 0;
  }
  if (argc != 5) return 2;
  crash_path = argv[4];
  __sanitizer_set_death_callback(keep_current);
  std::vector<Input> inputs;
  if (!feed_corpus(argv[1], inputs)) return 1;
  return fuzz_for(std::stod(argv[2]), std::stoull(argv[3]), inputs);
}
