"""DeepEP's three interfaces over Weft: V1 `Buffer`, V2 `ElasticBuffer` and NVIDIA's `HybridEPBuffer`.

Programs that say `import deep_ep` find this package where `python -m weft.deep_ep path` is on PYTHONPATH, under
`python -m weft.deep_ep run program.py`, with the distribution weft-deep-ep installed, or after
`weft.deep_ep.install()`. docs/deep_ep.md says what differs. Importing it loads nothing: names are loaded when they are
first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft import env
from weft._version import __version__ as _weft_version
from weft.deep_ep.alias import install

if TYPE_CHECKING:
    import torch

    from weft.deep_ep.buffer import Buffer
    from weft.deep_ep.buffers.elastic import ElasticBuffer, EPHandle
    from weft.deep_ep.config import Config
    from weft.deep_ep.errors import NotSupported
    from weft.deep_ep.hybrid_ep_buffer import HybridEPBuffer, HybridEpConfigInstance
    from weft.deep_ep.nixl import NixlBuffer, nixl_buffer
    from weft.deep_ep.utils.envs import get_logical_domain_size, get_physical_domain_size
    from weft.deep_ep.utils.event import EventHandle, EventOverlap

    topk_idx_t: torch.dtype

_HOME = {
    "Buffer": "buffer",
    "Config": "config",
    "EPHandle": "buffers.elastic",
    "ElasticBuffer": "buffers.elastic",
    "EventHandle": "utils.event",
    "EventOverlap": "utils.event",
    "HybridEPBuffer": "hybrid_ep_buffer",
    "HybridEpConfigInstance": "hybrid_ep_buffer",
    "NixlBuffer": "nixl",
    "NotSupported": "errors",
    "get_logical_domain_size": "utils.envs",
    "get_physical_domain_size": "utils.envs",
    "nixl_buffer": "nixl",
}
_MODULES = ("_C", "buffer", "buffers", "hybrid_ep_buffer", "utils")

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEpConfigInstance",
    "NixlBuffer",
    "NotSupported",
    "__version__",
    "check_nccl_so",
    "emulates",
    "find_cuda_home",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "init_jit",
    "install",
    "nixl_buffer",
    "topk_idx_t",
    "weft",
]

__version__ = f"2.1.0+weft.{_weft_version}"
weft = True
emulates = {"v1": "1.2.1", "v2": "2.1.0", "hybrid": "94a9f8f"}
_has_ids_of_32_bits = env.topk_idx_bits() == 32


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"weft.deep_ep.{name}")
    if name == "topk_idx_t":
        torch = importlib.import_module("torch")
        value: Any = torch.int32 if _has_ids_of_32_bits else torch.int64
    elif name in _HOME:
        value = getattr(importlib.import_module(f"weft.deep_ep.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'deep_ep' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def check_nccl_so() -> None:
    """Nothing: Weft does not use NCCL."""


def init_jit() -> None:
    """Nothing: kernels are compiled when they are first needed; `weft cache prebuild` does it before."""


def find_cuda_home() -> str:
    """Empty: no CUDA toolkit is needed."""
    return ""
