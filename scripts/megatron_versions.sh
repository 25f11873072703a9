#!/usr/bin/env bash
# Runs tests/megatron on CPUs with other releases of megatron-core than the one in .venv:
#
#   ./scripts/megatron_versions.sh                      0.17.1 0.18.2 0.19.2
#   ./scripts/megatron_versions.sh 0.18.2 -- -m slow    what follows -- are arguments of pytest
#
# Sets everything up (see setup_env.sh), then unpacks each release's source under build/megatron and compiles its one
# helper. Releases after 0.16 ask for Python 3.12, but also run on 3.11. A release takes about 3 minutes.

# Checked before the set-up, which may take minutes.
for version in "$@"; do
  [ "$version" != -- ] || break
  [[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
    { printf '%s: no release of megatron-core, as in 0.18.2; what follows -- is for pytest\n' "$version" >&2 && exit 2; }
done
for program in c++ tar; do
  command -v "$program" >/dev/null || { printf 'there is no %s, which unpacks or compiles\n' "$program" >&2 && exit 77; }
done
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  versions+=("$1")
  shift
done
[ $# -eq 0 ] || shift
[ ${#versions[@]} -gt 0 ] || versions=(0.17.1 0.18.2 0.19.2)

python="$VENV/bin/python"
folder="$ROOT/build/megatron"
mkdir -p "$folder"
# From 0.18 on Megatron imports triton, which CPU builds of torch do not bring.
[ -d "$folder/triton" ] ||
  run_stage "installing triton" "$python" -m pip install -q --no-deps --target "$folder/triton" triton

# unpack VERSION: fetches and unpacks its source and compiles its helper, once.
unpack() {
  local source="$folder/megatron_core-$1" helpers="$folder/megatron_core-$1/megatron/core/datasets"
  [ ! -e "$source/.ready" ] || return 0
  run_stage "fetching megatron-core $1" "$python" -m pip download -q --no-deps --no-binary :all: --ignore-requires-python \
    --no-build-isolation -d "$folder" "megatron-core==$1"
  tar -xzf "$folder/megatron_core-$1.tar.gz" -C "$folder"
  run_stage "compiling its helpers" c++ -O2 -shared -fPIC -std=c++17 \
    "-I$("$python" -c 'import pybind11; print(pybind11.get_include())')" \
    "-I$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    "$helpers/helpers.cpp" -o "$helpers/helpers_cpp$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
  touch "$source/.ready"
}

cd "$ROOT"
failed=()
for version in "${versions[@]}"; do
  unpack "$version"
  say "megatron-core $version"
  PYTHONPATH="$folder/megatron_core-$version:$folder/triton" "$python" -m pytest -q -p no:cacheprovider tests/megatron "$@" ||
    failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || die "tests/megatron failed with megatron-core ${failed[*]}"
say "tests/megatron passed with megatron-core ${versions[*]}"
