# shellcheck shell=bash
# Sourced: the environment that ranks need on a cluster of kind $FABRIC. What is set already stays as it is.
#
#   infiniband   ConnectX on InfiniBand
#   roce         ConnectX, Thor2 or Pollara on Ethernet (RoCE v2)
#   efa          AWS
#   slingshot    HPE Cray, cxi
#   tcp          Ethernet without RDMA; tensors in CPU memory only
#   none         one host, or an environment that is right as it is
#
# INTERFACE names the network interface whose addresses all hosts reach (`ip -br addr`): the control plane's, not that of
# the NICs that carry rows. None of these settings has been run on such a cluster: the doctor says what does not fit yours.

give() { # give NAME VALUE: exported, unless it is set
  [ -n "${!1:-}" ] || printf -v "$1" '%s' "$2"
  export "${1?}"
}

case "${FABRIC:-none}" in
  infiniband)
    # The nearest NICs are chosen (docs/nics.md); to use others: UCCL_EP_NICS=mlx5_0,mlx5_1 and NCCL_IB_HCA=mlx5_0,mlx5_1.
    # The service level is 3 unless the fabric's administrator says otherwise.
    give UCCL_EP_IB_SERVICE_LEVEL 3
    give NCCL_IB_SL "$UCCL_EP_IB_SERVICE_LEVEL"
    ;;
  roce)
    # The GID of RoCE v2 with an IPv4 address is found by itself. Where NCCL needs an index (often 3), say the same to both:
    # UCCL_EP_IB_GID_INDEX=3 NCCL_IB_GID_INDEX=3. `show_gids`, or the doctor, lists them.
    [ -z "${NCCL_IB_GID_INDEX:-}" ] || give UCCL_EP_IB_GID_INDEX "$NCCL_IB_GID_INDEX"
    [ -z "${UCCL_EP_IB_GID_INDEX:-}" ] || give NCCL_IB_GID_INDEX "$UCCL_EP_IB_GID_INDEX"
    # The class that the switches keep lossless (PFC) or mark (ECN): four times its DSCP.
    give UCCL_EP_IB_TRAFFIC_CLASS 104
    give NCCL_IB_TC "$UCCL_EP_IB_TRAFFIC_CLASS"
    # MTU: 9000 on hosts and switch ports, set by the administrator; RoCE then sends 4096 bytes a packet.
    # Without flow control Thor2 and Pollara need small windows; they are the family's default (docs/nics.md).
    ;;
  efa)
    # Ours goes to EFA by libibverbs (SRD); what follows is for NCCL's plug-in, aws-ofi-nccl.
    give FI_PROVIDER efa
    give FI_EFA_USE_DEVICE_RDMA 1
    ;;
  slingshot)
    give UCCL_EP_TRANSPORT ofi
    give UCCL_EP_OFI_PROVIDER cxi
    INTERFACE="${INTERFACE:-hsn0}"
    # What operators of such systems set for libfabric and NCCL's plug-in.
    give FI_CXI_DISABLE_HOST_REGISTER 1
    give FI_MR_CACHE_MONITOR userfaultfd
    give FI_CXI_DEFAULT_CQ_SIZE 131072
    ;;
  tcp)
    give UCCL_EP_TRANSPORT ofi
    give UCCL_EP_OFI_PROVIDER tcp
    [ -z "${INTERFACE:-}" ] || give UCCL_EP_NET_INTERFACE "$INTERFACE"
    ;;
  none) ;;
  *)
    printf 'FABRIC = %s: allowed is infiniband, roce, efa, slingshot, tcp or none\n' "$FABRIC" >&2
    exit 2
    ;;
esac

if [ -n "${INTERFACE:-}" ]; then
  give GLOO_SOCKET_IFNAME "$INTERFACE"
  give NCCL_SOCKET_IFNAME "$INTERFACE"
fi
# Megatron's overlap of computing and communicating wants one queue; ours holds with it.
give CUDA_DEVICE_MAX_CONNECTIONS 1
