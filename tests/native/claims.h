// A claim is a sentence with a function that fails by throwing. Each test program is a list of them:
//   program            runs all      program --list     names them      program "sentence"    runs one
// Returns 0 when all that ran hold. A claim that cannot be tried on this machine throws Skip.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace claims {

using List = std::vector<std::pair<std::string, std::function<void()>>>;

inline List& all() {
  static List list;
  return list;
}

struct Skip {
  std::string why;
};

struct Register {
  Register(const char* sentence, void (*body)()) { all().emplace_back(sentence, body); }
};

inline bool run(const std::string& sentence, const std::function<void()>& body) {
  std::string why;
  try {
    body();
  } catch (const Skip& skip) {
    std::printf("skipped: %s: %s\n", sentence.c_str(), skip.why.c_str());
    std::fflush(stdout);
    return true;
  } catch (const std::exception& failure) {
    why = failure.what();
  }
  std::printf("%s: %s%s%s\n", why.empty() ? "ok" : "FAILED", sentence.c_str(), why.empty() ? "" : ": ", why.c_str());
  std::fflush(stdout);
  return why.empty();
}

inline int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--list") == 0) {
    for (auto& [sentence, body] : all()) std::printf("%s\n", sentence.c_str());
    return 0;
  }
  bool hold = true;
  size_t num_run = 0;
  for (auto& [sentence, body] : all()) {
    if (argc > 1 && sentence != argv[1]) continue;
    ++num_run;
    hold &= run(sentence, body);
  }
  if (num_run == 0) std::printf("FAILED: no such claim\n");
  return hold && num_run != 0 ? 0 : 1;
}

}  // namespace claims

#define CLAIM_JOIN2(a, b) a##b
#define CLAIM_JOIN(a, b) CLAIM_JOIN2(a, b)
#define CLAIM(sentence)                                                                               \
  static void CLAIM_JOIN(claim_, __LINE__)();                                                         \
  static const claims::Register CLAIM_JOIN(entry_, __LINE__){sentence, CLAIM_JOIN(claim_, __LINE__)}; \
  static void CLAIM_JOIN(claim_, __LINE__)()

// Functions, not code at each use: sanitizers make the compiler slow enough.
namespace claims {

[[noreturn]] __attribute__((noinline)) inline void fail(const char* file, int line, const std::string& text) {
  throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": " + text);
}
__attribute__((noinline)) inline void expect(bool condition, const char* text, const char* file, int line) {
  if (!condition) fail(file, line, std::string("not ") + text);
}
template <typename T>
__attribute__((noinline)) void expect_equal(T left, T right, const char* text, const char* file, int line) {
  if (!(left == right))
    fail(file, line, std::string(text) + ": " + std::to_string(left) + " and " + std::to_string(right));
}
template <typename Kind, typename Body>
void expect_throws(Body body, const char* text, const char* file, int line) {
  try {
    body();
  } catch (const Kind&) {
    return;
  }
  fail(file, line, std::string("did not throw: ") + text);
}

}  // namespace claims

#define EXPECT(condition) claims::expect(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
#define EXPECT_EQ(a, b) \
  claims::expect_equal<std::common_type_t<decltype(a), decltype(b)>>(a, b, #a " == " #b, __FILE__, __LINE__)
#define EXPECT_THROWS(kind, statement) claims::expect_throws<kind>([&] { statement; }, #statement, __FILE__, __LINE__)
