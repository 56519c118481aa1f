"""`python -m weft.deep_ep path | run program.py ... | run -m module ... | check [--json]`."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

from weft import env
from weft._version import __version__
from weft.deep_ep import alias
from weft.machine.doctor import deep_ep

_WITHOUT_EFFECT = (
    "EP_JIT_CACHE_DIR", "EP_JIT_DEBUG", "EP_JIT_NVCC_COMPILER", "EP_NCCL_ROOT_DIR", "EP_REUSE_NCCL_COMM",
    "EP_SUPPRESS_NCCL_CHECK", "HYBRID_EP_MULTINODE",
    "NVSHMEM_DIR", "NVSHMEM_IBGDA_NUM_RC_PER_PE", "NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_IB_SL", "NVSHMEM_QP_DEPTH",
    "RDMA_CORE_HOME", "USE_MNNVL", "USE_NIXL",
)  # fmt: skip
_REFUSED = (
    "Buffer(enable_shrink=True) on GPUs", "low_latency_dispatch(use_nvfp4=True)",
    "low_latency_combine(overlap=True)", "nixl_buffer on GPUs",
    "ElasticBuffer.engram_*", "ElasticBuffer.pp_*", "ElasticBuffer agrs, all_gather", "num_cpu_bytes > 0",
    "Buffer.dispatch_pcie",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "path" and not rest:
        print(alias.folder())  # noqa: T201
        return 0
    if command == "run" and rest:
        _run(rest)
    if command == "check" and rest in ([], ["--json"]):
        _check(as_json=bool(rest))
        return 0
    print(__doc__, file=sys.stderr)  # noqa: T201
    return 2


def _run(rest: list[str]) -> NoReturn:
    """In an interpreter of its own, so that the program's children are started alike."""
    env.run_with_path(str(alias.folder()), [sys.executable, *rest])


def _check(*, as_json: bool) -> None:
    file = deep_ep.origin()
    found = {
        "import deep_ep": file,
        "is Weft's": deep_ep.is_wefts(file),
        "weft": __version__,
        "version": f"2.1.0+weft.{__version__}",
        "other owners": deep_ep.owners(),
        "refused": list(_REFUSED),
        "set without effect": env.set_among(_WITHOUT_EFFECT),
    }
    if as_json:
        print(json.dumps(found))  # noqa: T201
        return
    for name, value in found.items():
        print(f"{name}: {', '.join(map(str, value)) if isinstance(value, (list, dict)) else value}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
