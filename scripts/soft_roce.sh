#!/usr/bin/env bash
# Real RDMA verbs on a machine without an RDMA NIC: runs a command in a VM with two soft-RoCE devices. The VM has Debian's
# kernel and its rdma_rxe driver, and runs in qemu without hardware support.
#
#   ./scripts/soft_roce.sh [--loss PERCENT] [--limit SECONDS] [--memory MIB] [COMMAND...]
#
#   --loss PERCENT    packets that get lost between the devices, each way (default 0)
#   --limit SECONDS   the VM is stopped after this time (default 600; the command starts after about 10 s)
#   --memory MIB      memory of the VM (default 3072)
#   COMMAND           one word: a line for bash; several: a program and its arguments, which stay as they are. It runs as
#                     root in the clone's folder and sees this machine's files. Its changes to them are lost when the VM
#                     ends. Its output (at most 256 MiB each of stdout and stderr) and its exit code are kept. The only
#                     network is that of the devices, rxe0 and rxe1; soft_roce/wire.sh says how a test cuts and mends
#                     the link between them. Compile before: the VM is about twenty times slower. Without COMMAND, the
#                     conformance suite over verbs runs, then a whole dispatch and combine of two domains
#                     (soft_roce/default.sh). The second part has a loss of 0.5 % unless --loss is given.
#
# The exit code is the command's, or
#     77  no VM is possible here; the last line says why     (a command's own 77 becomes 1)
#    124  the limit was reached
#    125  the VM ended by itself; its console is printed
#
# All files that this script makes stay in build/soft_roce. Packages are installed by the rules of setup_env.sh: as root, if
# UCCL_EP_APT=1 or in CI. The kernel's package is unpacked in build/soft_roce and not installed.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
HERE="$ROOT/scripts/soft_roce"
STATE="$ROOT/build/soft_roce"
. "$ROOT/scripts/apt.sh"
. "$ROOT/scripts/needs.sh"
# Also the folders of root's programs.
PATH="$PATH:/usr/sbin:/sbin"

# NO_READER is a shell's exit code for a program that SIGPIPE has ended.
NO_VM=77 TIMED_OUT=124 VM_FAILED=125 NO_READER=141

# Each is loaded with its dependencies. rdma_ucm is for programs that connect through librdmacm.
MODULES=(virtio_pci 9pnet_virtio 9p overlay crc32_pclmul crc32_generic veth sch_netem rdma_rxe ib_uverbs rdma_ucm)

say() { printf '[soft_roce] %s\n' "$*" >&2; }

no_vm() {
  say "no VM: $*"
  exit "$NO_VM"
}

bad_use() {
  printf '%s\nsee the head of scripts/soft_roce.sh\n' "$*" >&2
  exit 2
}

# pause SECONDS: waits, then returns false. Not `sleep`: it would be a new process each time.
exec {NEVER}<> <(:)
pause() { read -r -t "$1" -u "$NEVER"; }

# ------------------------------------------------------------------------------------------------------- what the VM is made of

# logged "what" command...: runs the command with its output in the log, and prints a sign of life every 15 s. Callers test
# its success, so bash does not stop a function here at a failed step: such a function joins its steps with &&.
logged() {
  local what="$1" job status=0
  shift
  say "$what ..."
  "$@" >"$STATE/prepare.log" 2>&1 </dev/null &
  job=$!
  local since=$SECONDS
  while kill -0 "$job" 2>/dev/null; do
    pause 0.2 || true
    if ((SECONDS - since >= 15)); then
      say "  still at it: $(tail -n 1 "$STATE/prepare.log" | cut -c 1-100)"
      since=$SECONDS
    fi
  done
  wait "$job" || status=$?
  [ "$status" -eq 0 ] || tail -n 20 "$STATE/prepare.log" | sed 's/^/    /' >&2
  return "$status"
}

has_kernel() { compgen -G "$STATE/kernel/boot/vmlinuz-*" >/dev/null; }

# Says in one line all that is missing, before anything is installed, fetched or compiled.
check_machine() {
  local program packages why=""
  [ "$(uname -m)" = x86_64 ] || no_vm "the VM is for x86_64, this machine is $(uname -m)"
  mapfile -t packages < <(missing_for vm | sort -u)
  if ! may_apt; then
    [ ${#packages[@]} -eq 0 ] ||
      why+="missing ${packages[*]}. As root on Debian: apt-get install ${packages[*]} (UCCL_EP_APT=1 lets this script do it). "
    has_kernel ||
      why+="Debian's kernel is not in build/soft_roce, and only root with UCCL_EP_APT=1 fetches it with apt-get. "
  elif ! has_kernel; then
    for program in apt-cache dpkg-deb; do
      has_program "$program" || why+="there is no $program to fetch Debian's kernel. "
    done
  fi
  for program in flock setpriv; do
    has_program "$program" || why+="there is no $program (package util-linux). "
  done
  [ -z "$why" ] || no_vm "$why"
}

get_packages() {
  local missing
  mapfile -t missing < <(missing_for vm | sort -u)
  [ ${#missing[@]} -eq 0 ] && return
  logged "apt-get install ${missing[*]}" apt_install "${missing[@]}" || no_vm "apt-get could not install ${missing[*]}"
  mapfile -t missing < <(missing_for vm | sort -u)
  [ ${#missing[@]} -eq 0 ] || no_vm "apt-get has installed what it could, and ${missing[*]} is still missing"
}

# Takes the kernel that apt has now, and keeps it until build/soft_roce is removed. In later releases of Debian /lib is a link
# to usr/lib.
unpack_kernel() {
  local package
  package="$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')" &&
    [ -n "$package" ] &&
    rm -rf "$STATE/kernel.new" &&
    mkdir "$STATE/kernel.new" &&
    cd "$STATE/kernel.new" &&
    apt-get download "$package" &&
    dpkg-deb -x ./*.deb . &&
    rm ./*.deb &&
    { [ -d lib ] || ln -s usr/lib lib; } &&
    depmod -b . "$(ls lib/modules)" &&
    mv "$STATE/kernel.new" "$STATE/kernel"
}

get_kernel() {
  ! has_kernel || return 0
  logged "apt-get update" apt-get update || no_vm "apt-get update failed"
  logged "fetching Debian's kernel" unpack_kernel || no_vm "apt-get has no linux-image-amd64, or could not fetch it"
}

# module_files: prints the modules' files, each after its dependencies.
module_files() {
  local module
  for module in "${MODULES[@]}"; do
    modprobe -d "$STATE/kernel" -S "$(ls "$STATE/kernel/lib/modules")" --show-depends "$module" || return
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }'
}

# copy_modules FOLDER: copies the files that stdin names, and writes their order. Later releases of Debian compress them.
copy_modules() {
  local file name
  while read -r file; do
    name="$(basename "${file%.xz}")"
    if [ "$file" = "${file%.xz}" ]; then cp "$file" "$1/$name"; else xz -dc "$file" >"$1/$name"; fi &&
      printf '%s\n' "$name" >>"$1/order" || return
  done
}

# The initramfs is not compressed: the VM would take longer to unpack it than to read it.
build_initramfs() {
  local new="$STATE/initramfs.new" applet
  rm -rf "$new" &&
    mkdir -p "$new"/{bin,dev,proc,sys,host,layer,new,share,modules} &&
    cp -L "$(command -v busybox)" "$new/bin/busybox" &&
    for applet in $(busybox --list); do
      [ "$applet" = busybox ] || ln -s busybox "$new/bin/$applet" || return
    done &&
    cp "$HERE/init" "$new/init" &&
    module_files | copy_modules "$new/modules" &&
    (cd "$new" && find . | busybox cpio -o -H newc) >"$STATE/initramfs.cpio.new" &&
    rm -rf "$new" &&
    mv "$STATE/initramfs.cpio.new" "$STATE/initramfs.cpio"
}

# Takes a lock: another invocation in this clone may be preparing, too.
prepare() {
  local lock
  mkdir -p "$STATE"
  exec {lock}>"$STATE/lock"
  flock -w 600 "$lock" || no_vm "another invocation has been preparing it for 10 minutes"
  get_packages
  get_kernel
  if ! [ "$STATE/initramfs.cpio" -nt "$HERE/init" ] || ! [ "$STATE/initramfs.cpio" -nt "${BASH_SOURCE[0]}" ]; then
    logged "making the initramfs" build_initramfs || exit 1
  fi
  # Removes what failed runs left more than a day ago.
  find "$STATE" -maxdepth 1 -name 'run.*' -mmin +1440 -exec rm -rf {} +
  exec {lock}>&-
}

# ------------------------------------------------------------------------------------------------------------------- running it

QEMU="" RUN="" TAILS=()
# However this script ends, no VM stays behind. The VM's folder stays if the VM ended by itself.
clean_up() {
  local status=$?
  trap '' INT TERM HUP
  if [ -n "$QEMU" ] && kill -9 "$QEMU" 2>/dev/null; then wait "$QEMU" 2>/dev/null || true; fi
  [ ${#TAILS[@]} -eq 0 ] || kill "${TAILS[@]}" 2>/dev/null || true
  [ -z "$RUN" ] || [ "$status" -eq "$VM_FAILED" ] || rm -rf "$RUN"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# A comma in a folder's name would end an argument of qemu, so it is written twice.
start_vm() {
  # The kernel kills qemu when this script ends, even if the script gets no chance to do so.
  setpriv --pdeathsig KILL qemu-system-x86_64 \
    -machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m "$MEMORY_MIB" -nodefaults -no-reboot \
    -display none -monitor none -serial "file:${RUN//,/,,}/console" \
    -kernel "$(compgen -G "$STATE/kernel/boot/vmlinuz-*")" -initrd "$STATE/initramfs.cpio" \
    -append "console=ttyS0 panic=-1 loglevel=4 mitigations=off nokaslr no_timer_check random.trust_cpu=on" \
    -virtfs "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap" \
    -virtfs "local,path=${RUN//,/,,},mount_tag=share,security_model=none" \
    </dev/null >"$RUN/qemu" 2>&1 &
  QEMU=$!
  tail -s 0.2 -n +1 --pid="$QEMU" -f "$RUN/stdout" &
  TAILS+=($!)
  tail -s 0.2 -n +1 --pid="$QEMU" -f "$RUN/stderr" >&2 &
  TAILS+=($!)
}

# wait_for_vm: waits until the VM has ended; exits if the VM must be stopped.
wait_for_vm() {
  local next_sign_s=30
  while kill -0 "$QEMU" 2>/dev/null; do
    pause 0.1 || true
    if ((SECONDS >= LIMIT_S)); then
      say "stopped: the limit of $LIMIT_S s is over"
      exit "$TIMED_OUT"
    elif ! kill -0 "${TAILS[0]}" 2>/dev/null && kill -0 "$QEMU" 2>/dev/null; then
      say "stopped: nobody reads the output any more"
      exit "$NO_READER"
    elif ((SECONDS >= next_sign_s)); then
      say "running for $SECONDS s (limit $LIMIT_S s)"
      next_sign_s=$((next_sign_s + 30))
    fi
  done
}

# in_vm "line for bash": runs the line in the VM, and exits with its code.
in_vm() {
  local status
  RUN="$(mktemp -d "$STATE/run.XXXXXX")"
  printf '%s' "$ROOT" >"$RUN/root"
  printf '%s' "$LOSS_PERCENT" >"$RUN/loss"
  printf 'cd %q || exit\n%s\n' "$ROOT" "$1" >"$RUN/command"
  : >"$RUN/stdout" 2>"$RUN/stderr"
  SECONDS=0
  start_vm
  wait_for_vm
  QEMU=""
  wait "${TAILS[@]}" || true
  TAILS=()
  if ! status="$(cat "$RUN/status" 2>/dev/null)"; then
    say "the VM ended by itself after $SECONDS s. Its console ($RUN):"
    tail -n 40 "$RUN/qemu" "$RUN/console" >&2
    exit "$VM_FAILED"
  fi
  grep 'soft_roce: .* was cut off' "$RUN/console" >&2 || true
  say "exit code $status after $SECONDS s"
  [ "$status" -ne "$NO_VM" ] || status=1
  exit "$status"
}

# ---------------------------------------------------------------------------------------------------------------- what is asked

# within OPTION VALUE LEAST MOST
within() {
  [[ "$2" =~ ^[0-9]{1,9}(\.[0-9]+)?$ ]] && awk "BEGIN { exit !($2 >= $3 && $2 <= $4) }" ||
    bad_use "$1 $2: allowed is $3 .. $4"
}

LOSS_PERCENT="" LIMIT_S=600 MEMORY_MIB=3072
while [ $# -gt 0 ]; do
  case "$1" in
    --loss | --limit | --memory)
      [ $# -ge 2 ] || bad_use "$1 needs a value"
      case "$1" in
        --loss) within "$1" "$2" 0 100 && LOSS_PERCENT="$2" ;;
        --limit) within "$1" "$2" 1 1000000 && LIMIT_S="${2%.*}" ;;
        --memory) within "$1" "$2" 512 1000000 && MEMORY_MIB="${2%.*}" ;;
      esac
      shift 2
      ;;
    --)
      shift
      break
      ;;
    -*) bad_use "$1: allowed is --loss, --limit, --memory" ;;
    *) break ;;
  esac
done

# What the default command needs is checked first, and compiled outside the VM, which is too slow for that.
PYTHON_OF_DEFAULT="${PYTHON:-.venv/bin/python}"
check_default() {
  cd "$ROOT"
  has_program g++ || { say "there is no g++, which compiles the conformance suite" && exit 1; }
  [ -n "${PYTHON:-}" ] || "$ROOT/scripts/setup_env.sh" >&2 || exit 1
  # It has to answer: /bin/true ends well whatever it is asked.
  "$PYTHON_OF_DEFAULT" -c 'from uccl_ep_train.core.native import load_native; load_native(); print("loaded")' | grep -qx loaded || {
    say "$PYTHON_OF_DEFAULT does not load uccl_ep_train: see above; scripts/setup_env.sh builds it"
    exit 1
  }
}

default_command() {
  local conformance
  cd "$ROOT"
  conformance="$("$PYTHON_OF_DEFAULT" tests/conformance/build.py)" || return
  printf '%q ' scripts/soft_roce/default.sh "$conformance" "$PYTHON_OF_DEFAULT" "${LOSS_PERCENT:-0.5}"
}

check_machine
[ $# -gt 0 ] || check_default
prepare
case $# in
  0) line="$(default_command)" ;;
  1) line="$1" ;;
  *) line="$(printf '%q ' "$@")" ;;
esac
LOSS_PERCENT="${LOSS_PERCENT:-0}"
in_vm "$line"
