"""The one place of the Python package that reads the environment. The native module has its own, src/base/env.cc.

| variable | meaning |
| --- | --- |
| `WEFT_LOG_LEVEL` | `debug`, `info`, `warning`, `error`, `off`: level of the logger `weft`, with lines on stderr |
| `WEFT_PLACEMENT` | `auto`, `process`, `off`: takes the place of `placement="auto"`, the default of every call |
| `RANK`, `WORLD_SIZE` | set by torchrun: this rank and their number, for `Communicator.from_env`; none: one rank |
| `LOCAL_RANK` | set by torchrun: the GPU of this rank where ranks have one each |
| `LOCAL_WORLD_SIZE` | set by torchrun: ranks of this machine, for `weft run` |
| `MASTER_ADDR`, `MASTER_PORT` | set by torchrun: the store through which the ranks of `from_env` find each other |
| `TORCHELASTIC_USE_AGENT_STORE`, `TORCHELASTIC_RUN_ID` | set by torchrun: who hosts that store; a prefix of its keys |
| `WEFT_CONTROL_INTERFACE` | the network interface through which ranks of several machines meet; not set: all of them |
| `WEFT_CONTROL_PORT` | the first of 256 TCP ports for that, of which each rank takes a free one; not set: any port |
| `CUDA_VISIBLE_DEVICES` | read, not set: which GPU a device number means, for placement |
| `WEFT_CACHE_DIR` | folder of kernels and tuning tables; empty: none. Not set: `weft` in `XDG_CACHE_HOME`, `~/.cache` |
| `EP_NUM_TOPK_IDX_BITS`, `TOPK_IDX_BITS` | 32: `deep_ep.topk_idx_t` is torch.int32; read when it is imported |
| `WEFT_DEEP_EP_DEVICE` | `cpu`: buffers of `deep_ep` keep to host memory; `cuda` |
| `WEFT_DEEP_EP_MAX_TOKENS` | windows of `deep_ep.Buffer` begin with room for so many tokens of a rank |
| `WEFT_DEEP_EP_TIMEOUT_S` | deadline of every call of `deep_ep`, in seconds |
| `WEFT_DEEP_EP_NODE_RANKS` | on one machine so many ranks count as a machine for buffers of `deep_ep` |
| `WEFT_DEEP_EP_STORE` | where ranks of `deep_ep.nixl_buffer` meet: `host:port` of a TCPStore, or the path of a file |
| `WEFT_NETWORK` | `nccl`: GPUs of several nodes reach each other through NCCL; `block`: no network is needed |
| `PYTHONPATH` | `python -m weft.deep_ep run` adds the folder of `deep_ep` for the program that it becomes |
| `COLUMNS` | width of what the commands print where they do not print on a terminal; 160 without it |
| `CUDA_DEVICE_MAX_CONNECTIONS` | read by CUDA; `weft.spawn(isolation="thread")` sets it, and `CUDA_MODULE_LOADING` |

docs/environment.md holds the table of both.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from weft.errors import InvalidArgument

__all__ = [
    "MAX_SERVICE_LEVEL",
    "DeepEp",
    "Torchrun",
    "cache_folder",
    "columns",
    "control",
    "cuda_queues",
    "deep_ep",
    "hybrid_node_ranks",
    "launched",
    "lend_variables",
    "local_rank",
    "log_level",
    "network",
    "placement",
    "run_bound",
    "run_with_path",
    "service_level",
    "set_among",
    "set_cuda_queues",
    "set_variables",
    "take_back_variables",
    "topk_idx_bits",
    "torchrun",
]

_MAX_PORT = 65535
MAX_SERVICE_LEVEL = 15  # of InfiniBand
_MAX_HOST = 253  # characters of a name in DNS
_MAX_DIGITS = 9
_NETWORKS = ("block", "nccl")
_PLACEMENTS = ("auto", "process", "off")
_LEVELS = ("debug", "info", "warning", "error", "off")


@dataclass(frozen=True)
class Torchrun:
    """What torchrun says about this process."""

    rank: int
    num_ranks: int
    local_rank: int
    address: str = ""  # of the store; not read for one rank
    port: int = 0
    run_id: str = ""
    has_agent_store: bool = False  # torchrun's agent hosts the store; else rank 0 does


def torchrun(max_ranks: int) -> Torchrun | None:
    """Rank, size and store from the environment, or None where neither rank nor size is set.

    Raises:
        InvalidArgument: only one of RANK and WORLD_SIZE is set; they or LOCAL_RANK are no numbers that fit each other;
            there are more ranks than Weft takes; or MASTER_ADDR or MASTER_PORT is missing or no port.
    """
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        raise InvalidArgument(
            f"RANK is {rank!r} and WORLD_SIZE is {size!r} in the environment; set both (torchrun does) or neither"
        )
    numbers = (
        _number("RANK", rank),
        _number("WORLD_SIZE", size),
        _number("LOCAL_RANK", os.environ.get("LOCAL_RANK", rank)),
    )
    if not 1 <= numbers[1] <= max_ranks:
        raise InvalidArgument(f"WORLD_SIZE is {numbers[1]} in the environment; allowed are 1 to {max_ranks}")
    if numbers[0] >= numbers[1]:
        raise InvalidArgument(
            f"RANK is {numbers[0]} in the environment; allowed are 0 to WORLD_SIZE - 1 = {numbers[1] - 1}"
        )
    if numbers[1] == 1:
        return Torchrun(*numbers)
    address = _needed("MASTER_ADDR", "the host of rank 0")
    if len(address) > _MAX_HOST or any(each.isspace() or each == "/" for each in address):
        raise InvalidArgument(
            f"MASTER_ADDR is {address!r} in the environment; the name or address of a host is expected"
        )
    port = _number("MASTER_PORT", _needed("MASTER_PORT", "a port of that host"))
    if not 1 <= port <= _MAX_PORT:
        raise InvalidArgument(f"MASTER_PORT is {port} in the environment; allowed are 1 to {_MAX_PORT}")
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return Torchrun(*numbers, address, port, run_id, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def log_level() -> str | None:
    """The level asked for by WEFT_LOG_LEVEL in lower case, or None.

    Raises:
        InvalidArgument: it is set to another word.
    """
    level = os.environ.get("WEFT_LOG_LEVEL", "").lower()
    if level and level not in _LEVELS:
        raise InvalidArgument(f"WEFT_LOG_LEVEL is {level!r} in the environment; allowed are {', '.join(_LEVELS)}")
    return level or None


def columns() -> int | None:
    """Width of a terminal that COLUMNS gives, for output that goes elsewhere; None without one."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def placement() -> str:
    """The mode of placement for those who do not choose one: WEFT_PLACEMENT, else "auto".

    Raises:
        InvalidArgument: it is set to another word.
    """
    mode = os.environ.get("WEFT_PLACEMENT", "").lower() or "auto"
    if mode not in _PLACEMENTS:
        raise InvalidArgument(f"WEFT_PLACEMENT is {mode!r} in the environment; allowed are {', '.join(_PLACEMENTS)}")
    return mode


def control() -> tuple[str, int]:
    """WEFT_CONTROL_INTERFACE and WEFT_CONTROL_PORT: "" and 0 where they are not set.

    Raises:
        InvalidArgument: the port is none.
    """
    port = _number("WEFT_CONTROL_PORT", os.environ.get("WEFT_CONTROL_PORT", "0"))
    if port > _MAX_PORT:
        raise InvalidArgument(f"WEFT_CONTROL_PORT is {port} in the environment; allowed are 1 to {_MAX_PORT}")
    return os.environ.get("WEFT_CONTROL_INTERFACE", ""), port


def local_rank() -> tuple[int, int]:
    """This rank among those of its machine, and their number, as torchrun says; 0 of 1 without it.

    Raises:
        InvalidArgument: LOCAL_RANK or LOCAL_WORLD_SIZE is no number.
    """
    rank, size = (os.environ.get(name, other) for name, other in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    return _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size)


def run_bound(command: list[str], *, bound: bool) -> NoReturn:
    """Become `command`; if it is bound already its Weft binds nothing more, unless WEFT_PLACEMENT says otherwise.

    Raises:
        OSError: it can't be started.
    """
    ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # by Python, and a program inherits that
    before = [signal.signal(each, signal.SIG_DFL) for each in ignored]
    if bound:
        os.environ.setdefault("WEFT_PLACEMENT", "off")
    try:
        os.execvp(command[0], command)
    finally:
        for each, handler in zip(ignored, before, strict=True):
            signal.signal(each, handler)


def run_with_path(folder: str, command: list[str]) -> NoReturn:
    """Become `command`, which finds modules of `folder` before all others; so do the programs that it starts.

    Raises:
        OSError: it can't be started.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, before] if before else [folder])
    os.execvp(command[0], command)


@dataclass(frozen=True)
class DeepEp:
    """What buffers of `weft.deep_ep` are told: `device`, "" for the usual one; `max_tokens` and `timeout_s`, 0 if not
    set; `store`, "" if not set; `node_ranks`, 0 if not set."""

    device: str = ""
    max_tokens: int = 0
    timeout_s: float = 0.0
    store: str = ""
    node_ranks: int = 0


def deep_ep() -> DeepEp:
    """WEFT_DEEP_EP_DEVICE, WEFT_DEEP_EP_MAX_TOKENS, WEFT_DEEP_EP_TIMEOUT_S, WEFT_DEEP_EP_STORE and
    WEFT_DEEP_EP_NODE_RANKS.

    Raises:
        InvalidArgument: one of them is set to what is not allowed.
    """
    device = os.environ.get("WEFT_DEEP_EP_DEVICE", "").lower()
    if device not in ("", "cpu", "cuda"):
        raise InvalidArgument(f"WEFT_DEEP_EP_DEVICE is {device!r} in the environment; allowed are cpu, cuda")
    tokens = _number("WEFT_DEEP_EP_MAX_TOKENS", os.environ.get("WEFT_DEEP_EP_MAX_TOKENS", "0"))
    if tokens >= 1 << 24:
        raise InvalidArgument(
            f"WEFT_DEEP_EP_MAX_TOKENS is {tokens} in the environment; allowed are 1 to {(1 << 24) - 1}"
        )
    timeout_s = _number("WEFT_DEEP_EP_TIMEOUT_S", os.environ.get("WEFT_DEEP_EP_TIMEOUT_S", "0"))
    node_ranks = _number("WEFT_DEEP_EP_NODE_RANKS", os.environ.get("WEFT_DEEP_EP_NODE_RANKS", "0"))
    return DeepEp(device, tokens, timeout_s, os.environ.get("WEFT_DEEP_EP_STORE", ""), node_ranks)


def hybrid_node_ranks() -> int:
    """NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN, which programs for `HybridEPBuffer` set; 0 if not set."""
    name = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
    return _number(name, os.environ.get(name, "0"))


def service_level(name: str) -> int | None:
    """NVSHMEM_IB_SL, of `Buffer`, or EP_OVERRIDE_RDMA_SL, which counts for `ElasticBuffer` in place of its sl_idx; None
    if not set.

    Raises:
        InvalidArgument: it is no service level, 0 to 15.
    """
    given = os.environ.get(name)
    if given is None:
        return None
    level = _number(name, given)
    if level > MAX_SERVICE_LEVEL:
        raise InvalidArgument(f"{name} is {level} in the environment; allowed are 0 to {MAX_SERVICE_LEVEL}")
    return level


def topk_idx_bits() -> int:
    """Of `deep_ep.topk_idx_t`: EP_NUM_TOPK_IDX_BITS or TOPK_IDX_BITS where one is 32, else 64."""
    return 32 if "32" in (os.environ.get("EP_NUM_TOPK_IDX_BITS"), os.environ.get("TOPK_IDX_BITS")) else 64


def launched() -> tuple[str, int, int, int]:
    """Address, port, number of machines and number of this one, as DeepEP's own tests are started."""
    ask = os.environ.get
    numbers = [
        _number(name, ask(name, other)) for name, other in (("MASTER_PORT", "8361"), ("WORLD_SIZE", "1"), ("RANK", "0"))
    ]
    return ask("MASTER_ADDR", "127.0.0.1"), numbers[0], numbers[1], numbers[2]


def set_among(names: Iterable[str]) -> dict[str, str]:
    """Those of the named variables that are set, as they are: for reports, not for settings."""
    return {name: os.environ[name] for name in names if name in os.environ}


def set_variables(values: Mapping[str, str]) -> None:
    """Of this process, which a benchmark has started as one of torchrun's ranks."""
    os.environ.update(values)


_lent: dict[str, str] = {}


def lend_variables(values: Mapping[str, str]) -> None:
    """Set those that are not set yet, for a library that reads them once; `take_back_variables` removes them."""
    for name, value in values.items():
        if name not in os.environ:
            _lent[name] = value
            os.environ[name] = value


def take_back_variables() -> None:
    """What lend_variables() has set, unless somebody has changed it since."""
    for name, value in _lent.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _lent.clear()


def network() -> str:
    """What leads between nodes of GPUs: WEFT_NETWORK, else "block".

    Raises:
        InvalidArgument: it is set to another word.
    """
    word = os.environ.get("WEFT_NETWORK", "").lower() or "block"
    if word not in _NETWORKS:
        raise InvalidArgument(f"WEFT_NETWORK is {word!r} in the environment; allowed are {', '.join(_NETWORKS)}")
    return word


def cache_folder() -> str:
    """Where compiled kernels are kept between processes; "" for nowhere. The native module makes it, mode 0700."""
    folder = os.environ.get("WEFT_CACHE_DIR")
    if folder is not None:
        return folder
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "weft") if os.path.isabs(base) else ""


def cuda_queues() -> int:
    """Hardware queues that CUDA gives a context of this process."""
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(text) if text.isdecimal() else 8


def set_cuda_queues(num_queues: int) -> None:
    """For the CUDA that this process has yet to start: enough queues, and every kernel loaded at the start."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(num_queues))
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def _needed(name: str, what: str) -> str:
    text = os.environ.get(name, "")
    if not text:
        state = "empty" if name in os.environ else "not set"
        raise InvalidArgument(f"{name} is {state} in the environment; {what} is expected, as torchrun sets it")
    return text


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise InvalidArgument(f"{name} is {text!r} in the environment; a number from 0 is expected")
    return int(text)
