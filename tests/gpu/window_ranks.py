"""Ranks that are threads of one process on one GPU, or processes, with a native GPU window each: what the checks of
tests/gpu/window_checks.py share."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft import _native

DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
LAYOUTS = {"rank_major": 0, "expert_major": 1, "masked": 2}
SMALL = {
    "num_experts": 32,
    "top_k": 4,
    "max_tokens": 64,
    "landing_row_bytes": 4096,
    "num_blocks": 8,
    "heap_bytes": 32 << 20,
}


def paths() -> dict[str, str]:
    """Where the compiler, the kernels' sources and the cache are."""
    from cuda import pathfinder

    found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    return {"nvrtc": str(found), "include": str(Path(__file__).parents[2] / "include"), "cache": "/tmp/weft-kernels"}


class Rank:
    """One rank with its stream and one window; the calls of the native module with tensors."""

    def __init__(self, comm: Any, gpu: Any, index: int, **shape: int) -> None:
        self.comm, self.gpu, self.index = comm, gpu, index
        self.shape = {**SMALL, **shape}
        self.device = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self.device)
        self.window = _native.GpuWindow(comm, gpu, **self.shape, timeout_s=60.0)

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        layout: str = "rank_major",
        *,
        alignment: int = 1,
        capacity: int = -1,
        num_blocks: int = 4,
        timeout_s: float = 20.0,
    ) -> dict[str, Any]:
        """On the current stream. With tensors of its own if the heap has no room."""
        ranks, code = self.comm.num_ranks, LAYOUTS[layout]
        num_local, top_k = self.shape["num_experts"] // ranks, self.shape["top_k"]
        plan_len = _native.gpu_send_plan_len(x.shape[0], top_k, ranks, code)
        out: dict[str, Any] = {
            "send_plan": torch.empty(plan_len, dtype=torch.int32, device=self.device),
            "overflow": torch.zeros(1, dtype=torch.int64, device=self.device),
        }
        sizes = torch.full((num_local + (num_local if code else ranks) + 2,), -7, dtype=torch.int32, device=self.device)
        out |= {"counts": sizes[:num_local], "offsets": sizes[num_local:-1], "num_rows": sizes[-1:]}
        spec = _native.DispatchSpec(
            layout=code, alignment=alignment, capacity=capacity, max_tokens=self.shape["max_tokens"], hidden=x.shape[1],
            num_blocks=num_blocks, timeout_ns=int(timeout_s * 1e9), row_bytes=x.shape[1] * x.element_size(),
            dtype=DTYPES[x.dtype],
        )  # fmt: skip
        buffers = _native.DispatchBuffers(
            stream=torch.cuda.current_stream().cuda_stream, num_tokens=x.shape[0], x=x.data_ptr(),
            topk_idx=ids.data_ptr(), topk_weights=weights.data_ptr(), send_plan=out["send_plan"].data_ptr(),
            sizes=sizes.data_ptr(), overflow=out["overflow"].data_ptr(),
        )  # fmt: skip
        result = self.window.dispatch(spec, buffers)
        out["in_heap"] = result.in_heap
        if result.in_heap:
            for name in ("x", "topk_weights", "recv_plan", "topk_idx"):
                part = getattr(result, name)
                out[name] = None if part is None else torch.from_dlpack(part)
            return out
        return self._unload(out, result.result_rows, x, code, capacity)

    def _unload(self, out: dict[str, Any], num_rows: int, x: torch.Tensor, code: int, capacity: int) -> dict[str, Any]:
        ranks, top_k = self.comm.num_ranks, self.shape["top_k"]
        num_local = self.shape["num_experts"] // ranks
        lead = (num_local, capacity) if code == 2 else (num_rows,)
        plan_len = _native.gpu_recv_plan_len(self.shape["max_tokens"], top_k, ranks, code)
        out["x"] = torch.full((*lead, x.shape[1]), float("nan"), dtype=x.dtype, device=self.device)
        weights = (*lead, top_k) if code == 0 else lead
        out["topk_weights"] = torch.full(weights, float("nan"), device=self.device)
        out["topk_idx"] = torch.full(weights, -9, dtype=torch.int64, device=self.device) if code == 0 else None
        out["recv_plan"] = torch.empty(plan_len, dtype=torch.int32, device=self.device)
        to = _native.DispatchBuffers(
            out_x=out["x"].data_ptr(), out_weights=out["topk_weights"].data_ptr(),
            out_ids=0 if out["topk_idx"] is None else out["topk_idx"].data_ptr(), recv_plan=out["recv_plan"].data_ptr(),
        )  # fmt: skip
        self.window.unload(to)
        return out


def thread_ranks(num_ranks: int, body: Callable[[Any, Any], Any], gpu: Any, timeout_s: float = 100.0) -> list[Any]:
    """Run body(comm, gpu) on threads; returns what they returned, or raises the first exception."""
    hub = _native.LocalHub(num_ranks)
    results: list[Any] = [None] * num_ranks

    def run(index: int) -> None:
        try:
            torch.cuda.set_device(gpu.index)
            comm = _native.Communicator.local(hub, index)
            with torch.cuda.stream(torch.cuda.Stream()):
                results[index] = body(comm, gpu)
        except BaseException as error:  # told below
            traceback.print_exc()
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        if thread.is_alive():
            raise TimeoutError("a rank hangs")
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def inputs(seed: int, num_ranks: int, hidden: int = 256, max_tokens: int = 64) -> tuple[list[torch.Tensor], ...]:
    """Rows, ids and weights of every rank, on the CPU, equal on all that ask with the same seed."""
    gen = torch.Generator().manual_seed(seed)
    sizes = [int(torch.randint(1, max_tokens + 1, (), generator=gen)) for _ in range(num_ranks)]
    xs = [torch.randn(size, hidden, generator=gen).to(torch.bfloat16) for size in sizes]
    ids = [torch.randint(-1, SMALL["num_experts"], (size, SMALL["top_k"]), generator=gen) for size in sizes]
    weights = [torch.rand(size, SMALL["top_k"], generator=gen) for size in sizes]
    return xs, ids, weights


def differences(got: dict[str, Any], want: Any, layout: str) -> list[str]:
    """Names of the parts that differ from the reference; masked tails are not looked at."""
    torch.cuda.current_stream().synchronize()
    bad = []
    count = int(got["num_rows"].item())
    for name, other in (("counts", want.num_tokens_per_expert), ("offsets", want.offsets)):
        if not torch.equal(got[name].cpu(), other.to(torch.int32)):
            bad.append(name)
    if count != int(want.num_rows):
        bad.append("num_rows")
    for name in ("x", "topk_weights", "topk_idx"):
        mine, other = got[name], getattr(want, name)
        if mine is None or other is None:
            continue
        mine, other = mine.cpu(), other.contiguous()
        if layout == "masked":
            keep = torch.arange(other.shape[1])[None, :] < want.num_tokens_per_expert[:, None]
            mine, other = mine[keep], other[keep]
        else:
            mine, other = mine[:count], other[:count]
        if mine.shape != other.shape or not torch.equal(
            mine.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        ):
            bad.append(name)
    return bad
