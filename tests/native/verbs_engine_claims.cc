// Whole dispatches and combines over the verbs transport, whose NICs are the stand-in: EFA's queue pairs, which no CPU
// has, and RC with several NICs.
#include <string>

#include "claims.h"
#include "engine_runs.h"
#include "fake_verbs.h"
#include "transport/verbs/abi.h"

using namespace uccl_ep;

namespace {

void over_verbs(EngineConfig& config) {
  config.transport = "verbs";
  config.nic.devices = {"fake0", "fake1"};
}

}  // namespace

CLAIM("2 domains of 2 ranks give every token back over connections of two NICs") {
  run({0, 0, 1, 1}, {}, 6, over_verbs);
}

CLAIM("interleaved domains give every token back over EFA's datagrams in any order") {
  fake_verbs().is_efa = true;
  for (uint64_t seed : {1, 2, 3})
    for (bool unsolicited : {true, false}) {
      fake_verbs().seed = seed;
      fake_verbs().can_receive_unsolicited = unsolicited;
      run({0, 1, 0, 2}, {}, 3, over_verbs);
    }
  EXPECT(fake_verbs().writes > 500);
  EXPECT_EQ(fake_verbs().outside, uint64_t{0});
}

CLAIM("limits of one write per NIC, as Thor2 wants, only cost time") {
  run({0, 1, 0, 1}, {}, 3, [](EngineConfig& config) {
    over_verbs(config);
    config.nic.window_ops = 1;
    config.nic.window_bytes = 1572864;
  });
}

CLAIM("an operation that is late while a port is down names the port") {
  fake_verbs().holds = true;
  fake_verbs().event = verbs::IBV_EVENT_PORT_ERR;
  std::string text;
  try {
    run({0, 1}, {}, 1, [](EngineConfig& config) {
      over_verbs(config);
      config.arrival_timeout_s = 1.5;
      config.progress_timeout_s = 1;
    });
  } catch (const std::exception& failure) {
    text = failure.what();
  }
  EXPECT(text.find("to enter the operation") != std::string::npos);
  EXPECT(text.find("; port 1 of NIC fake0 went down 1.") != std::string::npos);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
