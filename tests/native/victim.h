// A process that lives until it is told to end.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

namespace uccl_ep {

class Victim {
 public:
  Victim() {
    if (pipe(gate_) != 0) throw std::logic_error("pipe");
    pid_ = fork();
    if (pid_ == 0) {
      char byte;
      close(gate_[1]);
      _exit(read(gate_[0], &byte, 1) == 0 ? 0 : 1);
    }
    close(gate_[0]);
  }
  ~Victim() {
    end();
    reap();
  }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;
  // It ends, and is a zombie until reap().
  void end() {
    if (gate_[1] >= 0) close(gate_[1]);
    gate_[1] = -1;
  }
  // Its exit status; -1 if it was reaped before.
  int reap() {
    int status = -1;
    return waitpid(pid_, &status, 0) == pid_ ? status : -1;
  }
  pid_t pid() const { return pid_; }

 private:
  int gate_[2];
  pid_t pid_;
};

}  // namespace uccl_ep
