"""What may stand in a report that users paste in public: the variables shown, and texts without names or places.

Standard library only, and nothing here raises: weft.collect_env must work on a broken machine.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import socket

__all__ = ["VARIABLES", "redact", "redact_names", "redact_variable"]

# Documented variables only, each by its full name: a prefix would let a token through that somebody named NCCL_KEY.
VARIABLES = (
    *("WEFT_LOG_LEVEL", "WEFT_PLACEMENT", "WEFT_SPIN_US", "WEFT_CACHE_DIR", "WEFT_NETWORK", "WEFT_CONTROL_INTERFACE"),
    *("WEFT_DEEP_EP_DEVICE", "WEFT_DEEP_EP_MAX_TOKENS", "WEFT_DEEP_EP_TIMEOUT_S", "WEFT_CONTROL_PORT"),
    *("WEFT_DEEP_EP_STORE", "WEFT_DEEP_EP_NODE_RANKS", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"),
    "EP_OVERRIDE_RDMA_SL",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "MKL_NUM_THREADS", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_MODULE_LOADING", "CUDA_MODULE_DATA_LOADING", "CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE"),
    *("CUDA_CACHE_PATH", "CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT", "CUDA_AUTO_BOOST", "CUDA_SCALE_LAUNCH_QUEUES"),
    *("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_WAITS_ON_EXCEPTION", "CUDA_ENABLE_COREDUMP_ON_EXCEPTION"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *(
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    ),
    *("TORCH_CUDA_ARCH_LIST", "TORCH_LOGS", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"),
    *("TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_CUDA_EVENT_CACHE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    *("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
    *("TORCH_NCCL_HIGH_PRIORITY", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_USE_COMM_NONBLOCKING"),
    *("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "TORCHINDUCTOR_COMPILE_THREADS", "TRITON_CACHE_DIR"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_NTHREADS"),
    *("NCCL_NSOCKS_PERTHREAD", "NCCL_COMM_ID", "NCCL_CONF_FILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"),
    *("NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_GID_INDEX"),
    *("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM", "NCCL_IB_SL", "NCCL_IB_TC"),
    *("NCCL_IB_FIFO_TC", "NCCL_IB_AR_THRESHOLD", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SPLIT_DATA_ON_QPS"),
    *("NCCL_IB_CUDA_SUPPORT", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_ECE_ENABLE"),
    *("NCCL_IB_MERGE_NICS", "NCCL_IB_MERGE_VFS", "NCCL_NET_MERGE_LEVEL", "NCCL_NET_FORCE_MERGE", "NCCL_NET"),
    *("NCCL_NET_PLUGIN", "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_NET_GDR_C2C", "NCCL_NET_SHARED_BUFFERS"),
    *("NCCL_NET_SHARED_COMMS", "NCCL_NETDEVS_POLICY", "NCCL_DMABUF_ENABLE", "NCCL_CROSS_NIC", "NCCL_ALGO"),
    *("NCCL_PROTO", "NCCL_NTHREADS", "NCCL_NCHANNELS_PER_NET_PEER", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CGA_CLUSTER_SIZE", "NCCL_BUFFSIZE", "NCCL_CHECKS_DISABLE"),
    *("NCCL_LAUNCH_MODE", "NCCL_RUNTIME_CONNECT", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_NVB_DISABLE"),
    *("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_MNNVL_UUID", "NCCL_MNNVL_CLIQUE_ID", "NCCL_P2P_DISABLE"),
    *("NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_PXN_DISABLE", "NCCL_P2P_PXN_LEVEL", "NCCL_SHM_DISABLE"),
    *("NCCL_IGNORE_CPU_AFFINITY", "NCCL_IGNORE_DISABLED_P2P", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE"),
    *(
        "NCCL_GRAPH_REGISTER",
        "NCCL_LOCAL_REGISTER",
        "NCCL_SET_STACK_SIZE",
        "NCCL_SET_THREAD_NAME",
        "NCCL_OOB_NET_ENABLE",
    ),
    *("NCCL_GIN_ENABLE", "NCCL_GIN_TYPE", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_RAS_ENABLE"),
    *("NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_ENABLE_NIC_PE_MAPPING", "NVSHMEM_HCA_PREFIX"),
    *("NVSHMEM_IB_SL", "NVSHMEM_IB_TRAFFIC_CLASS", "NVSHMEM_IB_GID_INDEX", "NVSHMEM_IB_ENABLE_IBGDA"),
    *("NVSHMEM_IBGDA_NIC_HANDLER", "NVSHMEM_IBGDA_NUM_RC_PER_PE", "NVSHMEM_QP_DEPTH", "NVSHMEM_DISABLE_P2P"),
    *("NVSHMEM_DISABLE_NVLS", "NVSHMEM_DISABLE_CUDA_VMM", "NVSHMEM_CUMEM_GRANULARITY", "NVSHMEM_SYMMETRIC_SIZE"),
    *("NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_LIBFABRIC_PROVIDER", "NVSHMEM_BOOTSTRAP", "NVSHMEM_DEBUG"),
    *("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE"),
    *("UCX_NET_DEVICES", "UCX_TLS", "MLX5_SINGLE_THREADED", "MLX5_SHUT_UP_BF"),
)

# Their values are names of hosts or files whatever they look like.
_HIDDEN = {"MASTER_ADDR", "NCCL_COMM_ID", "NCCL_MNNVL_UUID", "NCCL_IB_ADDR_RANGE"}
_MAX_VALUE = 200

_IPV4 = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?:/\d+|:\d+)?")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:.])")
_PCI = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?")
# Of devices their beginnings, too: CUDA takes "GPU-1a2b".
_UUID = re.compile(
    r"\b(?:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|(?:GPU|MIG)-[0-9a-f]{4}[0-9a-f-]*)",
    re.IGNORECASE,
)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_MAIL = re.compile(r"[\w.+-]+@[\w.-]*")  # of whoever built the driver, too
_PATH = re.compile(r"(?<![\w.<>])~?(?:/[^\s/:;,'\"()<>]+)+/?")
_HARMLESS_FILE = re.compile(r"[\w.+-]+\.(?:so(?:\.\d+)*|py|h|cuh)")
_PUBLIC_NAMES = {"root", "user", "ubuntu", "admin", "nobody", "node", "host", "localhost", "runner", "linux", "none"}


def redact(text: str) -> str:
    """The text without paths, addresses, URLs, device UUIDs, and the names of this host and user."""
    text = _URL.sub("<url>", text)
    text = _MAIL.sub("<user>", text)
    text = _UUID.sub("<uuid>", text)
    text = _IPV4.sub("<address>", text)
    text = _IPV6.sub(lambda match: match[0] if _PCI.fullmatch(match[0]) else "<address>", text)
    text = _PATH.sub(_short_path, text)
    return redact_names(text)


def redact_names(text: str) -> str:
    """The text without the names of this host and user; versions of four numbers stay."""
    for name, stands_for in _private_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stands_for, text)
    return text


def redact_variable(name: str, value: str) -> str:
    """The value of an environment variable as a report may show it: places counted or hidden, the rest as it is."""
    if name in _HIDDEN:
        return "<set>" if value else ""
    if name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        return f"<{len([part for part in re.split('[:; ]', value) if part])} entries>"
    return redact(value)[:_MAX_VALUE]


def _short_path(match: re.Match[str]) -> str:
    """A library or source file keeps its name, any other path nothing."""
    last = match[0].rstrip("/").rsplit("/", 1)[-1]
    return f"<path>/{last}" if _HARMLESS_FILE.fullmatch(last) else "<path>"


@functools.cache
def _private_names() -> tuple[tuple[str, str], ...]:
    """Names of this machine and its user, longest first; none that anybody could have."""
    found: dict[str, str] = {}
    for read, stands_for in ((socket.gethostname, "<host>"), (os.uname, "<host>"), (getpass.getuser, "<user>")):
        try:
            value = read()
        except Exception:  # noqa: BLE001  no such entry, no such file: nothing to hide
            continue
        name = value if isinstance(value, str) else value.nodename
        for part in {name, name.split(".")[0]}:
            if len(part) > 2 and part.lower() not in _PUBLIC_NAMES:
                found[part] = stands_for
    return tuple(sorted(found.items(), key=lambda item: -len(item[0])))
