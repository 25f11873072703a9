#!/usr/bin/env bash
# Prepares `.venv` in the clone: a virtual environment with torch, megatron-core, the tools, and this package built.
# pretrain.sh, test.sh and megatron_versions.sh source it; run by itself it only does the set-up. Needs bash and what Debian
# always has.
#
# What a user can set:
#   PYTHON              the interpreter to use, 3.11 or 3.12 (otherwise the first suitable one on PATH)
#   UCCL_EP_TORCH_SPEC  the torch to install, default torch==2.13.0; "none": use the one that PYTHON already has
#   UCCL_EP_PIP_ARGS    further arguments of every `pip install`. Without them torch comes from the default index, whose
#                       Linux build works without a GPU but brings gigabytes of CUDA libraries. For a CPU-only build,
#                       name the CPU package index that PyTorch's own installation page gives:
#                       UCCL_EP_PIP_ARGS="--extra-index-url <that address>"
#   UCCL_EP_APT=1       as root on Debian or Ubuntu: install missing packages with apt-get. These are the compiler, Python
#                       headers, spin, clang, iproute2, and the libraries of NICs and fabrics with their headers. The
#                       libraries are found at run time; one test compares with the headers
#   UCCL_EP_CUDA_ARCHS  what kernels are compiled for: "auto" (the GPUs of this machine; the default), "all", "none", names
#   UCCL_EP_WERROR=1    compiler warnings are errors
#
# An up-to-date environment costs a fraction of a second: three stamp files hold hashes of what it was made from.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
STATE="$VENV/.uccl_ep"
LOG="$STATE/setup.log"
TORCH_SPEC="${UCCL_EP_TORCH_SPEC:-torch==2.13.0}"
WERROR="${UCCL_EP_WERROR:-0}"
read -r -a PIP_ARGS <<<"${UCCL_EP_PIP_ARGS:-}"

PACKAGES=(
  # 0.16.1 is the last release for Python 3.11; releases from 0.20 on have not been tested.
  "megatron-core==0.16.1; python_version < '3.12'" "megatron-core>=0.16.1,<0.20; python_version >= '3.12'"
  numpy matplotlib tqdm
)
# Training does not need these: pretrain.sh sets TOOLS_TOO=0. Formatters and type checkers are pinned, because another
# version formats and complains differently.
TOOLS=(
  pytest pytest-timeout hypothesis pyyaml
  "ruff==0.17.5" "mypy==2.4.1" "clang-format==23.1.5"
)

say() { printf '[set-up] %s\n' "$*"; }

die() {
  printf '[set-up] FAILED: %s\n' "$1" >&2
  shift
  [ $# -eq 0 ] || printf '         %s\n' "$@" >&2
  exit 1
}

# Microseconds; the decimal separator of EPOCHREALTIME depends on the locale.
now_usec() { printf '%s' "${EPOCHREALTIME//[!0-9]/}"; }

seconds_since() {
  local tenths=$((($(now_usec) - $1) / 100000))
  printf '%d.%d s' $((tenths / 10)) $((tenths % 10))
}

# pause SECONDS: waits, then returns false. Not `sleep`: it would outlive its killed shell and hold our output open.
pause() { read -r -t "$1" <> <(:); }

TICKER=""
stop_ticker() {
  [ -z "$TICKER" ] || { kill "$TICKER" && wait "$TICKER"; } 2>/dev/null || true
  TICKER=""
}
trap stop_ticker EXIT

# progress_since LINE: setup.py's newest estimate in the log from this line on, else the log's last line.
progress_since() {
  local estimate
  estimate="$(tail -n "+$1" "$LOG" | grep -o 'compiled [0-9]* of .* left' | tail -n 1)" || true
  printf '%s' "${estimate:-$(tail -n 1 "$LOG" | cut -c 1-100)}"
}

# run_stage "what" command...: runs the command with its output in the log. Prints a sign of life every 15 s, and the end of
# the log on failure.
run_stage() {
  local what="$1" started status=0 first_line
  shift
  started="$(now_usec)"
  say "$what ..."
  printf '\n===== %s\n+ %s\n' "$what" "$*" >>"$LOG"
  first_line=$(($(wc -l <"$LOG") + 1))
  # The ticker does not get the lock (descriptor 9), because it may outlive a killed script.
  (while ! pause 15 && kill -0 $$; do
    say "  still at it, $(seconds_since "$started"): $(progress_since "$first_line")"
  done) 9>&- &
  TICKER=$!
  "$@" >>"$LOG" 2>&1 </dev/null || status=$?
  stop_ticker
  if [ "$status" -ne 0 ]; then
    printf '[set-up] FAILED after %s: %s (status %d). The end of %s:\n' \
      "$(seconds_since "$started")" "$what" "$status" "$LOG" >&2
    tail -n "+$first_line" "$LOG" | tail -n 40 | sed 's/^/    /' >&2
    exit 1
  fi
  say "  done in $(seconds_since "$started")"
}

# ------------------------------------------------------------------------------------------------------- what must be there

# It has to answer: /bin/true, as many a program that is no Python, ends well whatever it is asked.
is_usable_python() {
  "$1" -c 'import sys; print(sys.version_info[:2] in ((3, 11), (3, 12)))' 2>/dev/null | grep -qx True
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_usable_python "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
    printf '%s' "$PYTHON"
    return
  fi
  # python3 comes first: it is the interpreter whose headers people install.
  for candidate in python3 python3.12 python3.11; do
    if is_usable_python "$candidate"; then
      printf '%s' "$candidate"
      return
    fi
  done
}

. "$ROOT/scripts/apt.sh"
. "$ROOT/scripts/needs.sh"

# missing "what" package...: installs the packages if that is allowed; else says what to do and stops.
missing() {
  local what="$1"
  shift
  if may_apt; then
    run_stage "apt-get install $*" apt_install "$@"
    return
  fi
  die "$what is missing." "On Debian or Ubuntu, as root:  apt-get update && apt-get install -y $*" \
    "(as root, UCCL_EP_APT=1 lets this script do it)"
}

# wished_for package: as missing(), for a package that only some parts need. Tried once; without it their tests skip.
wished_for() {
  if ! may_apt || stamp_is "wished_for_$1" tried; then
    return
  fi
  write_stamp "wished_for_$1" tried
  (run_stage "apt-get install $1" apt_install "$1") || say "going on without $1"
}

# The packages of all parts but the VM, whose packages soft_roce.sh installs.
wished_for_all() {
  local part package
  for part in fuzzing models nics fabric abi hosts; do
    for package in $(missing_for "$part"); do
      wished_for "$package"
    done
  done
}

# The Python of this release of Debian or Ubuntu.
distribution_python() {
  local release
  release="$(. /etc/os-release 2>/dev/null && printf '%s-%s' "${ID:-}" "${VERSION_ID:-}")" || true
  case "$release" in
    ubuntu-24.*) printf 'python3.12' ;;
    *) printf 'python3.11' ;;
  esac
}

has_compiler() {
  printf '#include <bit>\n#include <concepts>\nint answer;\n' | "${CXX:-c++}" -std=c++20 -S -x c++ -o - - 2>/dev/null |
    grep answer >/dev/null
}

has_headers() {
  local include
  include="$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')" && [ -f "$include/Python.h" ]
}

has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# check_machine: sets BASE_PYTHON; stops with a plain message if something is missing.
check_machine() {
  local python version
  python="$(find_python)"
  if [ -z "$python" ]; then
    python="$(distribution_python)"
    missing "Python 3.11 or 3.12" "$python" "$python-venv" "$python-dev"
    is_usable_python "$python" || die "$python does not run after its installation"
  fi
  version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
  has_venv "$python" || missing "the venv module of $python" "$version-venv"
  has_headers "$python" || missing "Python.h of $python" "$version-dev"
  has_compiler || missing "a C++20 compiler (${CXX:-c++})" g++
  has_compiler || die "${CXX:-c++} does not compile C++20: g++ 10 or clang++ 12 is the least; CXX names another one"
  BASE_PYTHON="$python"
}

# ------------------------------------------------------------------------------------------------------------------- stages

# On a machine with a GPU, a torch that is already installed fits the driver: it is used, never replaced.
has_own_torch() {
  { [ "$TORCH_SPEC" = none ] || nvidia-smi >/dev/null 2>&1; } && "$1" -c 'import torch' >/dev/null 2>&1
}

make_venv() {
  local options=()
  ! has_own_torch "$BASE_PYTHON" || options+=(--system-site-packages)
  # Not `venv --clear`: the log and the lock live inside.
  find "$VENV" -mindepth 1 -maxdepth 1 ! -name .uccl_ep -exec rm -rf {} + &&
    rm -f "$STATE/packages" "$STATE/tools" "$STATE/build" &&
    "$BASE_PYTHON" -m venv "${options[@]}" "$VENV"
}

pip_install() {
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    "${PIP_ARGS[@]}" "$@"
}

# What the build needs, from pyproject.toml. It must be installed already, because the build is not isolated.
build_requirements() {
  "$VENV/bin/python" -c 'import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["build-system"]["requires"]))' "$ROOT/pyproject.toml"
}

install_packages() {
  local requirements
  mapfile -t requirements < <(build_requirements)
  pip_install "${PACKAGES[@]}" "${requirements[@]}"
}

# Verbose, so that the log has the estimates of setup.py.
build_package() { (cd "$ROOT" && UCCL_EP_WERROR="$WERROR" pip_install --verbose --no-build-isolation --editable .); }

hash_of() { sha256sum | cut -d ' ' -f 1; }

packages_hash() {
  { printf '%s\n' "$TORCH_SPEC" "${PIP_ARGS[*]}" "${PACKAGES[@]}" && cat "$ROOT/pyproject.toml"; } | hash_of
}

# The clone's path is part of the hash, because an editable package points to it.
build_hash() {
  {
    printf '%s\n%s\n%s\n' "$ROOT" "$("$VENV/bin/python" -V)" "$("$VENV/bin/python" "$ROOT/csrc/gpu/cuda/build.py")"
    cd "$ROOT"
    find pyproject.toml setup.py uccl_ep_train/settings/env.py csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | hash_of
}

tools_hash() { printf '%s\n' "${PIP_ARGS[*]}" "${TOOLS[@]}" | hash_of; }

stamp_is() { [ "$(cat "$STATE/$1" 2>/dev/null)" = "$2" ]; }

# The file is renamed into place, so that an interrupted script leaves no half-written stamp.
write_stamp() { printf '%s\n' "$2" >"$STATE/$1.new" && mv "$STATE/$1.new" "$STATE/$1"; }

has_tools() { [ "${TOOLS_TOO:-1}" = 0 ] || stamp_is tools "$(tools_hash)"; }

has_extension() { compgen -G "$ROOT/uccl_ep_train/_native*.so" >/dev/null; }

venv_is_usable() {
  is_usable_python "$VENV/bin/python" || return 1
  [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V 2>&1)" = "$("$VENV/bin/python" -V 2>&1)" ]
}

is_built() {
  local hash="$1"
  has_extension || return 1
  # A build without warnings also serves callers that do not ask for one, but not the other way round.
  stamp_is build "$hash 1" || { [ "$WERROR" != 1 ] && stamp_is build "$hash 0"; }
}

set_up() {
  local started hash
  started="$(now_usec)"
  mkdir -p "$STATE"
  exec 9>"$STATE/lock"
  if ! flock -n 9; then
    say "waiting for another set-up in $VENV ..."
    flock 9
  fi
  wished_for_all
  if venv_is_usable && stamp_is packages "$(packages_hash)" && has_tools && is_built "$(build_hash)"; then
    say "$VENV is up to date ($(seconds_since "$started"))"
    exec 9>&-
    return
  fi
  : >"$LOG"
  check_machine
  if ! venv_is_usable; then
    run_stage "creating the virtual environment with $("$BASE_PYTHON" -V)" make_venv
  fi
  hash="$(packages_hash)"
  if ! stamp_is packages "$hash"; then
    if has_own_torch "$VENV/bin/python"; then
      say "torch: the one that is there is used"
    elif [ "$TORCH_SPEC" = none ]; then
      die "UCCL_EP_TORCH_SPEC=none, but $VENV/bin/python has no torch" \
        "Remove $VENV, and let PYTHON name an interpreter that has one."
    else
      run_stage "installing $TORCH_SPEC (the largest download)" pip_install "$TORCH_SPEC"
    fi
    run_stage "installing megatron-core" install_packages
    write_stamp packages "$hash"
  fi
  if ! has_tools; then
    run_stage "installing what the tests need" pip_install "${TOOLS[@]}"
    pip_install "pytest-xdist>=3" >>"$LOG" 2>&1 </dev/null || say "going on without pytest-xdist: tests run one by one"
    write_stamp tools "$(tools_hash)"
  fi
  hash="$(build_hash)"
  if ! is_built "$hash"; then
    run_stage "compiling and installing uccl_ep_train" build_package
    write_stamp build "$hash $WERROR"
  fi
  say "ready after $(seconds_since "$started")"
  exec 9>&-
}

set_up
left_out | sed 's/^/[set-up] /'
# Only this script uses these. The package would warn of variables that it does not know.
unset UCCL_EP_TORCH_SPEC UCCL_EP_PIP_ARGS UCCL_EP_APT UCCL_EP_CUDA_ARCHS
