// One set of claims for every transport: what transport.h promises, on this machine, over the transport that is named.
//   conformance KIND              all claims but the slow ones; a line each, then a summary
//   conformance KIND "claim"      one of them
//   conformance KIND --list       their sentences; slow ones too
//   conformance KIND --probe      whether the transport can work here
//   conformance loop --seeds FROM TO    streams under faults drawn from seeds; --seed N: one of them
// Options: --slow (slow claims, too), --patience FACTOR (of all deadlines), --device NAME (several: the ranks in turn),
// --nics N (that a rank uses), --provider NAME, --interface NAME, --cut COMMAND and --heal COMMAND (of the link),
// --down COMMAND and --up COMMAND (of a port), --broken (seeds: over a transport that loses bytes). Returns 0 if all
// holds, 77 if nothing can be tried, else 1.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <optional>

#include "suite.h"
#include "transport/registry.h"

// libfabric forgets what it has of a connection that is closed before it is made.
extern "C" const char* __lsan_default_suppressions() {
  return conformance::suite().kind == "ofi" ? "leak:libfabric.so" : "";
}

namespace conformance {

void need_memory(uint64_t bytes) {
  const uint64_t free = static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (free < bytes) throw Skipped(std::to_string(bytes >> 20) + " MiB of memory are not free");
}

namespace {

constexpr int kSkip = 77;
constexpr uint64_t kMostUsecPerClaim = 120'000'000;

struct Arguments {
  std::string claim;
  bool list = false, probe = false, slow = false, broken = false;
  std::optional<std::pair<uint64_t, uint64_t>> seeds;
};

class Parser {
 public:
  Parser(int argc, char** argv) : words_(argv + 1, argv + argc) {}

  Arguments parse() {
    const std::map<std::string, std::function<void()>> known = {
        {"--list", [&] { a_.list = true; }},
        {"--probe", [&] { a_.probe = true; }},
        {"--slow", [&] { a_.slow = true; }},
        {"--broken", [&] { a_.broken = true; }},
        {"--patience", [&] { suite().patience = std::strtod(next().c_str(), nullptr); }},
        {"--device", [&] { suite().devices.push_back(next()); }},
        {"--nics", [&] { suite().num_nics = static_cast<uint32_t>(number()); }},
        {"--provider", [&] { suite().nic.provider = next(); }},
        {"--interface", [&] { suite().nic.interface = next(); }},
        {"--cut", [&] { suite().cut_command = next(); }},
        {"--heal", [&] { suite().heal_command = next(); }},
        {"--down", [&] { suite().down_command = next(); }},
        {"--up", [&] { suite().up_command = next(); }},
        {"--seed",
         [&] {
           const uint64_t seed = number();
           a_.seeds.emplace(seed, seed);
         }},
        {"--seeds",
         [&] {
           const uint64_t from = number();
           a_.seeds.emplace(from, number());
         }},
    };
    suite().kind = next();
    while (at_ < words_.size()) {
      const std::string word = next();
      const auto option = known.find(word);
      if (option != known.end()) {
        option->second();
      } else if (word.starts_with("--")) {
        throw std::invalid_argument("no such option: " + word);
      } else {
        a_.claim = word;
      }
    }
    if (!(suite().patience > 0)) throw std::invalid_argument("--patience must be positive");
    return a_;
  }

 private:
  const std::string& next() {
    if (at_ == words_.size()) throw std::invalid_argument("an argument is missing");
    return words_[at_++];
  }
  uint64_t number() {
    const std::string& word = next();
    size_t end = 0;
    const uint64_t value = std::stoull(word, &end);
    if (end != word.size()) throw std::invalid_argument("no number: " + word);
    return value;
  }

  const std::vector<std::string> words_;
  size_t at_ = 0;
  Arguments a_;
};

using Body = std::function<void()>;

// In the claim's own process.
int judge(const std::string& sentence, const Body& body) {
  const uint64_t started = uccl_ep::now_usec();
  const char* verdict = "ok";
  std::string why;
  int status = 0;
  try {
    body();
  } catch (const Skipped& skipped) {
    verdict = "skipped", why = skipped.what(), status = kSkip;
  } catch (const std::exception& failure) {
    verdict = "FAILED", why = failure.what(), status = 1;
  }
  const double seconds = 1e-6 * static_cast<double>(uccl_ep::now_usec() - started);
  std::printf("%s: %s%s%s (%.1f s)\n", verdict, sentence.c_str(), why.empty() ? "" : ": ", why.c_str(), seconds);
  std::fflush(stdout);
  return status;
}

// A claim runs in a process of its own, so that none harms the next and none hangs: 0, 1 or kSkip.
int run_alone(const std::string& sentence, const Body& body) {
  const pid_t pid = fork();
  if (pid == 0) std::exit(judge(sentence, body));
  const bool slow = slow_sentences().contains(sentence);
  const Deadline deadline(slow ? 8 * kMostUsecPerClaim : kMostUsecPerClaim);
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (deadline.over()) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      std::printf("FAILED: %s: it did not end\n", sentence.c_str());
      std::fflush(stdout);
      return 1;
    }
    usleep(2000);
  }
  if (WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kSkip)) return WEXITSTATUS(status);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 1)
    std::printf("FAILED: %s: its process ended with status %d\n", sentence.c_str(), status);
  std::fflush(stdout);
  return 1;
}

int run_claims(const Arguments& a) {
  size_t counts[3] = {0, 0, 0};  // ok, failed, skipped
  for (auto& [sentence, body] : claims::all()) {
    if (a.claim.empty() ? slow_sentences().contains(sentence) && !a.slow : sentence != a.claim) continue;
    const int status = run_alone(sentence, body);
    ++counts[status == kSkip ? 2 : status];
  }
  if (counts[0] + counts[1] + counts[2] == 0) std::printf("FAILED: no such claim\n");
  if (a.claim.empty())
    std::printf("%s over %s: %zu claims hold, %zu failed, %zu skipped\n", counts[1] == 0 ? "ok" : "FAILED",
                suite().kind.c_str(), counts[0], counts[1], counts[2]);
  if (counts[1] != 0 || counts[0] + counts[2] == 0) return 1;
  return counts[0] != 0 ? 0 : kSkip;
}

// Why the transport cannot work here; empty: it can.
std::string obstacle() {
  for (auto& kind : uccl_ep::transports()) {
    if (suite().kind != kind.name) continue;
    uccl_ep::TransportOptions options;
    options.nic = suite().nic;
    options.nic.devices = suite().devices;
    const uccl_ep::Probe probe = kind.probe(options);
    return probe.usable ? "" : probe.text;
  }
  return "this build has no transport " + suite().kind;
}

int main(int argc, char** argv) {
  const Arguments a = Parser(argc, argv).parse();
  if (a.list) {
    for (auto& [sentence, body] : claims::all()) std::printf("%s\n", sentence.c_str());
    return 0;
  }
  const std::string why = obstacle();
  if (!why.empty()) {
    std::printf("skipped: %s: %s\n", suite().kind.c_str(), why.c_str());
    return kSkip;
  }
  if (a.probe) {
    std::printf("ok: %s\n", suite().kind.c_str());
    return 0;
  }
  if (!a.seeds) return run_claims(a);
  if (suite().kind != "loop") throw std::invalid_argument("seeds are for loop");
  return run_seeds(a.seeds->first, a.seeds->second, a.broken) ? 0 : 1;
}

}  // namespace
}  // namespace conformance

int main(int argc, char** argv) {
  try {
    return conformance::main(argc, argv);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "conformance: %s\n", failure.what());
    return 1;
  }
}
