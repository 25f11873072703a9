# When the scripts may install packages with apt-get, and how; sourced by them.

can_apt() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }
may_apt() { can_apt && { [ "${UCCL_EP_APT:-0}" = 1 ] || [ "${CI:-}" = true ]; }; }

# The lock may be held by another installation for a while: by that of another clone, for instance.
apt_install() {
  export DEBIAN_FRONTEND=noninteractive
  apt-get update && apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
}
