// Starts threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cfenv>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "common/limits.h"

namespace uccl_ep {

// Runs `run` on a thread that gets no signals: they are for the application's threads. Nor does its arithmetic follow
// the starting thread's, which may flush denormals or round otherwise: contract 2. Throws LimitFailure(kThreads) if the
// host allows no more threads; `what` names the thread.
template <typename Run>
std::thread start_thread(const char* what, Run run) {
  struct Blocked {
    sigset_t before;
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  };
  try {
    const Blocked blocked;
    return std::thread([run = std::move(run)]() mutable {
      std::fesetenv(FE_DFL_ENV);
      run();
    });
  } catch (const std::system_error& error) {
    throw LimitFailure(HostLimit::kThreads, std::string("no thread for ") + what + ": " + error.code().message());
  }
}

}  // namespace uccl_ep
