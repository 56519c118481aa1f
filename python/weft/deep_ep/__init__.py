"""DeepEP's three interfaces over Weft: V1 `Buffer`, V2 `ElasticBuffer` and NVIDIA's `HybridEPBuffer`.

Programs that say `import deep_ep` find this package where `python -m weft.deep_ep path` is on PYTHONPATH, under
`python -m weft.deep_ep run program.py`, with the distribution weft-deep-ep installed, or after
`weft.deep_ep.install()`. docs/deep_ep.md says what differs.
"""

from __future__ import annotations

import torch

from weft import env
from weft._version import __version__ as _weft_version
from weft.deep_ep.alias import install
from weft.deep_ep.buffer import Buffer
from weft.deep_ep.buffers.elastic import ElasticBuffer, EPHandle
from weft.deep_ep.config import Config
from weft.deep_ep.errors import NotSupported
from weft.deep_ep.hybrid_ep_buffer import HybridEPBuffer, HybridEpConfigInstance
from weft.deep_ep.utils.envs import get_logical_domain_size, get_physical_domain_size
from weft.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEpConfigInstance",
    "NotSupported",
    "__version__",
    "check_nccl_so",
    "emulates",
    "find_cuda_home",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "init_jit",
    "install",
    "topk_idx_t",
    "weft",
]

__version__ = f"2.1.0+weft.{_weft_version}"
weft = True
emulates = {"v1": "1.2.1", "v2": "2.1.0", "hybrid": "94a9f8f"}
topk_idx_t = torch.int32 if env.topk_idx_bits() == 32 else torch.int64


def check_nccl_so() -> None:
    """Nothing: Weft does not use NCCL."""


def init_jit() -> None:
    """Nothing: kernels are compiled when they are first needed; `weft cache prebuild` does it before."""


def find_cuda_home() -> str:
    """Empty: no CUDA toolkit is needed."""
    return ""
