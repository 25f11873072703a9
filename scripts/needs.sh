# What parts of this project need besides Python and a compiler, and the Debian or Ubuntu packages that bring it. Scripts
# source this file; it installs nothing.

# Each part, and its description in messages.
declare -A PARTS=(
  [fuzzing]="fuzzing by libFuzzer" [models]="the model checker" [nics]="RDMA NICs (transport verbs)"
  [fabric]="TCP and fabrics between hosts (transport ofi)" [hosts]="several hosts on this machine"
  [abi]="comparing what is declared of libibverbs and libfabric with their headers"
  [vm]="RDMA verbs in a VM (soft_roce.sh)"
)

# program:package, for soft_roce.sh: programs that run the VM, and programs of this machine that are used inside it.
VM_PROGRAMS=(
  qemu-system-x86_64:qemu-system-x86 busybox:busybox-static modprobe:kmod depmod:kmod
  ip:iproute2 tc:iproute2 rdma:iproute2 ibv_rc_pingpong:ibverbs-utils
)

# Also looks in the folders of root's programs.
has_program() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null; }

has_library() { [[ "$(PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null)" == *"$1 "* ]]; }

# Debian's other busybox is not static: it needs libraries, which the initramfs does not have.
has_static_busybox() { ! ldd "$(PATH="$PATH:/usr/sbin:/sbin" command -v busybox)" >/dev/null 2>&1; }

# missing_for PART: prints the packages that are missing for the part, one a line.
missing_for() {
  local entry
  case "$1" in
    fuzzing)
      has_program clang++ || printf 'clang\n'
      compgen -G '/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*' >/dev/null || printf 'libclang-rt-dev\n'
      ;;
    models) has_program spin || printf 'spin\n' ;;
    nics) compgen -G '/etc/libibverbs.d/*.driver' >/dev/null || printf 'ibverbs-providers\n' ;;
    fabric) has_library libfabric.so.1 || compgen -G '/opt/amazon/efa/lib*/libfabric.so.1' >/dev/null || printf 'libfabric1\n' ;;
    abi)
      [ -e /usr/include/infiniband/efadv.h ] || printf 'libibverbs-dev\n'
      [ -e /usr/include/rdma/fabric.h ] || printf 'libfabric-dev\n'
      ;;
    hosts) has_program ip || printf 'iproute2\n' ;;
    vm)
      for entry in "${VM_PROGRAMS[@]}"; do
        has_program "${entry%%:*}" || printf '%s\n' "${entry#*:}"
      done
      ! has_program busybox || has_static_busybox || printf 'busybox-static\n'
      compgen -G '/usr/lib/*/libibverbs/librxe-*.so' >/dev/null || printf 'ibverbs-providers\n'
      compgen -G '/usr/share/*/bios-256k.bin' >/dev/null || printf 'seabios\n'
      ;;
  esac
}

has_nvcc() { command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; }
has_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

# Prints what this machine does without, and the one command that adds the packages. They need no new build.
left_out() {
  local part missing packages=()
  for part in nics fabric fuzzing models abi hosts vm; do
    mapfile -t missing < <(missing_for "$part" | sort -u)
    [ ${#missing[@]} -gt 0 ] || continue
    [ ${#packages[@]} -gt 0 ] || printf 'left out on this machine:\n'
    printf '  %s: %s\n' "${PARTS[$part]}" "${missing[*]}"
    packages+=("${missing[@]}")
  done
  if has_gpu && ! has_nvcc; then
    printf 'left out of the build: GPUs. There is no nvcc: install the CUDA toolkit, or name it by CUDA_HOME; remove .venv/.uccl_ep/build\n'
  fi
  if has_nvcc && ! has_gpu && [ "${UCCL_EP_CUDA_ARCHS:-auto}" = auto ]; then
    printf 'left out of the build: kernels, as there is no GPU here. UCCL_EP_CUDA_ARCHS=all compiles those of every GPU\n'
  fi
  [ ${#packages[@]} -gt 0 ] || return 0
  mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
  printf 'to add it, on Debian or Ubuntu, as root:  apt-get update && apt-get install -y %s\n' "${packages[*]}"
}
