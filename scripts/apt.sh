# Decides whether scripts may install packages with apt-get, and installs them. Scripts source this file.

can_apt() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }
may_apt() { can_apt && { [ "${UCCL_EP_APT:-0}" = 1 ] || [ "${CI:-}" = true ]; }; }

# Another installation may hold the lock for a while, for instance that of another clone.
apt_install() {
  export DEBIAN_FRONTEND=noninteractive
  apt-get update && apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
}
