"""What scripts/soft_roce.sh promises of exit codes, output and what it leaves behind.

A few lines of shell stand in for qemu and do at once, here, what the VM would do. That the real one has RDMA
devices, and a link that loses packets, is seen where .ci/run lets it run the conformance suite.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0

QEMU = r"""#!/bin/bash
for word in "$@"; do
  case "$word" in local,path=*,mount_tag=share,*) run="${word#local,path=}" ;; esac
done
# As qemu takes it: a comma that is no separator is written twice.
bare="${run//,,/}" separators="${bare//[!,]/}"
[ ${#separators} -eq 2 ] || exit 1
run="${run%%,mount_tag=*}" run="${run//,,/,}"
echo $$ >"$QEMU_PID"
case "$QEMU_DOES" in
  hang) exec sleep 1000 ;;
  crash) echo "Kernel panic - not syncing" >"$run/console" ;;
  print) exec yes >>"$run/stdout" ;;
  *) /bin/bash "$run/command" >>"$run/stdout" 2>>"$run/stderr" </dev/null; echo $? >"$run/status" ;;
esac
"""


class Clone:
    """The scripts in a folder of their own, with a kernel that nothing will boot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "build" / "soft_roce"
        self.pid_file = root / "qemu.pid"
        shutil.copytree(ROOT / "scripts", root / "scripts")
        for place in ("boot/vmlinuz-0", "lib/modules/0/modules.dep"):
            (self.state / "kernel" / place).parent.mkdir(parents=True)
            (self.state / "kernel" / place).touch()
        (self.state / "initramfs.cpio").touch()
        qemu = root / "bin" / "qemu-system-x86_64"
        qemu.parent.mkdir()
        qemu.write_text(QEMU)
        qemu.chmod(0o755)

    def start(self, *arguments: str, does: str = "run", path: str | None = None) -> subprocess.Popen[bytes]:
        variables = {name: value for name, value in os.environ.items() if name not in ("CI", "UCCL_EP_APT")}
        variables |= {"QEMU_DOES": does, "QEMU_PID": str(self.pid_file)}
        variables["PATH"] = f"{self.root / 'bin'}:{os.environ['PATH']}" if path is None else path
        # Whoever runs the tests may ignore SIGHUP (nohup), and bash never traps what it was told to ignore.
        told = ["/usr/bin/env", "--default-signal=INT,TERM,HUP"]
        command = [*told, "/bin/bash", str(self.root / "scripts" / "soft_roce.sh"), *arguments]
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *arguments: str, does: str = "run") -> tuple[int, bytes, str]:
        """Exit code, output, error output. Skips where the script says that something is missing."""
        out, err = (process := self.start(*arguments, does=does)).communicate(timeout=WAIT_S)
        if process.returncode == 77 and "no VM" in err.decode():
            pytest.skip(err.decode().splitlines()[-1])
        return process.returncode, out, err.decode()

    def qemu_pid(self) -> int:
        until(lambda: self.pid_file.is_file() and self.pid_file.read_text().endswith("\n"), "qemu runs")
        return int(self.pid_file.read_text())

    def runs(self) -> list[Path]:
        return list(self.state.glob("run.*"))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    # A space and a comma, at which shells and qemu's options break.
    clone = Clone(tmp_path / "a clone, and another")
    clone.run("true")
    clone.pid_file.unlink()
    return clone


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_output_and_exit_code_are_the_commands(clone: Clone) -> None:
    code, out, err = clone.run(r"printf 'a\0\377b'; echo sorry >&2; exit 5")
    assert (code, out) == (5, b"a\0\377b")
    assert "sorry\n" in err and "exit code 5" in err
    assert clone.runs() == []


def test_one_word_is_a_line_for_bash_and_several_are_arguments_that_stay_as_they_are(clone: Clone) -> None:
    assert clone.run("echo $((1 + 1)); pwd")[1].decode() == f"2\n{clone.root}\n"
    words = ["a  b", "$HOME", "it's", '"', "*", ""]
    assert clone.run("printf", "<%s>", *words)[1].decode() == "".join(f"<{word}>" for word in words)


def test_a_command_cannot_claim_that_there_is_no_vm(clone: Clone) -> None:
    assert clone.run("exit 77")[0] == 1


def test_where_qemu_is_missing_and_may_not_be_installed_it_says_so(clone: Clone) -> None:
    tools = clone.root / "tools"
    tools.mkdir()
    for name in ("id", "uname", "mkdir", "flock", "sort", "ldd", "dirname", "bash"):
        (tools / name).symlink_to(shutil.which(name) or "")
    shutil.rmtree(clone.state / "kernel")
    process = clone.start("true", path=str(tools))
    out, err = process.communicate(timeout=WAIT_S)
    if (shutil.which("qemu-system-x86_64", path="/usr/sbin:/sbin")) is not None:
        pytest.skip("qemu lies where the script looks in any case")
    assert (process.returncode, out) == (77, b"")
    # All in one line, before anything is fetched.
    (line,) = err.decode().splitlines()
    assert "no VM: missing" in line and "qemu-system-x86" in line and "Debian's kernel is not" in line


def test_without_the_extension_the_default_command_fails_before_the_vm_starts(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = clone.root / "bin" / "python"
    python.write_text("#!/bin/bash\necho 'no _native' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    code, out, err = clone.run()
    assert (code, out) == (1, b"") and "no _native" in err and "does not load uccl_ep_train" in err
    assert not clone.pid_file.exists()


def test_a_limit_ends_it_and_leaves_nothing_behind(clone: Clone) -> None:
    code, _, err = clone.run("--limit", "1", "true", does="hang")
    assert code == 124 and "limit of 1 s" in err
    assert is_gone(clone.qemu_pid()) and clone.runs() == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_it_and_leaves_nothing_behind(clone: Clone, number: int, code: int) -> None:
    process = clone.start("true", does="hang")
    qemu = clone.qemu_pid()
    assert not is_gone(qemu)
    process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert is_gone(qemu) and clone.runs() == []


def test_qemu_does_not_survive_a_script_that_is_killed(clone: Clone) -> None:
    process = clone.start("true", does="hang")
    qemu = clone.qemu_pid()
    process.kill()
    until(lambda: is_gone(qemu), "qemu has ended, too")
    process.communicate(timeout=WAIT_S)


def test_a_vm_that_ends_by_itself_shows_its_console_and_keeps_it(clone: Clone) -> None:
    code, _, err = clone.run("true", does="crash")
    assert code == 125 and "Kernel panic" in err
    assert [path.joinpath("console").is_file() for path in clone.runs()] == [True]


def test_it_ends_when_nobody_reads_its_output(clone: Clone) -> None:
    process = clone.start("true", does="print")
    assert process.stdout is not None and process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.wait(WAIT_S) == 141
    assert is_gone(clone.qemu_pid()) and clone.runs() == []


def test_two_at_a_time_in_one_clone_keep_apart(clone: Clone) -> None:
    both = [clone.start(f"sleep 0.5; echo {number}; exit {number}") for number in (3, 4)]
    ended = [(process.communicate(timeout=WAIT_S)[0], process.returncode) for process in both]
    assert ended == [(b"3\n", 3), (b"4\n", 4)]


@pytest.mark.parametrize(
    "arguments", [("--loss",), ("--loss", "much"), ("--limit", "-1"), ("--no-such", "x")], ids=" ".join
)
def test_what_it_does_not_know_is_refused(clone: Clone, arguments: tuple[str, ...]) -> None:
    code, _, err = clone.run(*arguments)
    assert code == 2 and arguments[0] in err
    assert not clone.pid_file.exists()
