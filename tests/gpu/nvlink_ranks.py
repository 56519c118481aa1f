"""Guards against wrong rows, wrong sums and lost speed between real GPUs. Run by hand on a machine with several GPUs.

python tests/gpu/nvlink_ranks.py [--speed] [--trials N] writes one JSON object a line.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing as mp
import os
import sys
import traceback
from typing import Any

import torch

from weft import _native, reference

DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def nvrtc_paths() -> dict[str, str]:
    """Where the compiler, the kernels' headers and the cache are."""
    from pathlib import Path

    from cuda import pathfinder

    found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    include = Path(__file__).parents[2] / "include"
    return {"nvrtc": str(found), "include": str(include), "cache": "/tmp/weft-kernels"}


class Rank:
    """One rank with its window; the calls of the native module with tensors."""

    def __init__(self, comm: Any, gpu: Any, index: int, shape: dict[str, int]) -> None:
        self.comm, self.gpu, self.device, self.shape = comm, gpu, torch.device("cuda", index), shape
        self.window = _native.GpuWindow(comm, gpu, **shape)

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_blocks: int, capacity: int = -1
    ) -> dict[str, Any]:
        ranks, experts = self.comm.num_ranks, self.shape["num_experts"]
        sizes = {
            "slot": (max(x.shape[0], 1), ranks),
            "row_start": (ranks,),
            "num_rows_to": (ranks,),
            "source_offset": (ranks + 1,),
            "counts": (experts // ranks,),
            "offsets": (ranks + 1,),
            "num_rows": (1,),
        }
        out = {name: torch.empty(size, dtype=torch.int32, device=self.device) for name, size in sizes.items()}
        args = _native.GpuDispatchArgs()
        args.x, args.topk_idx, args.topk_weights = x.data_ptr(), ids.data_ptr(), weights.data_ptr()
        args.num_tokens, args.row_bytes, args.dtype = x.shape[0], x.shape[1] * x.element_size(), DTYPES.get(x.dtype, 0)
        args.max_tokens, args.capacity, args.num_blocks = self.shape["max_tokens"], capacity, num_blocks
        args.timeout_ns, args.stream = 20_000_000_000, torch.cuda.current_stream().cuda_stream
        for name, tensor in out.items():
            setattr(args, name, tensor.data_ptr())
        result = self.window.dispatch(args)
        received: dict[str, Any] = dict(out)
        received["x"], received["topk_idx"], received["topk_weights"] = (
            torch.from_dlpack(part) for part in (result.x, result.topk_idx, result.topk_weights)
        )
        return received

    def combine(
        self, y: torch.Tensor, sent: dict[str, Any], num_tokens: int, out: torch.Tensor, num_blocks: int
    ) -> None:
        args = _native.GpuCombineArgs()
        args.y, args.num_rows, args.dtype, args.hidden = y.data_ptr(), y.shape[0], DTYPES[y.dtype], y.shape[1]
        args.num_tokens, args.slot, args.row_start = num_tokens, sent["slot"].data_ptr(), sent["row_start"].data_ptr()
        args.out, args.num_blocks = out.data_ptr(), num_blocks
        args.timeout_ns, args.stream = 20_000_000_000, torch.cuda.current_stream().cuda_stream
        self.window.combine(args)


def check_case(rank: Rank, seed: int, num_blocks: int) -> None:
    """Random tokens on every rank, compared word for word with weft.reference."""
    ranks, me = rank.comm.num_ranks, rank.comm.rank
    experts, top_k = rank.shape["num_experts"], rank.shape["top_k"]
    gen = torch.Generator().manual_seed(seed)
    hidden = 8 * int(torch.randint(1, 300, (), generator=gen))
    dtype = list(DTYPES)[seed % 3]
    sizes = [int(torch.randint(0, rank.shape["max_tokens"] + 1, (), generator=gen)) for _ in range(ranks)]
    xs = [torch.randn(size, hidden, generator=gen).to(dtype) for size in sizes]
    ids = [torch.randint(-1, experts, (size, top_k), generator=gen) for size in sizes]
    weights = [torch.rand(size, top_k, generator=gen) for size in sizes]
    want = reference.dispatch(xs, ids, weights, num_experts=experts)
    x, own_ids, own_weights = (part[me].cuda() for part in (xs, ids, weights))
    got = rank.dispatch(x, own_ids, own_weights, num_blocks)
    for name in ("x", "topk_idx", "topk_weights"):
        same = torch.equal(got[name].cpu().view(torch.uint8), getattr(want[me], name).contiguous().view(torch.uint8))
        if not same:
            raise AssertionError(f"seed {seed}: rank {me}: {name} differs")
    if not torch.equal(got["counts"].cpu(), want[me].num_tokens_per_expert) or not torch.equal(
        got["offsets"].cpu(), want[me].offsets
    ):
        raise AssertionError(f"seed {seed}: rank {me}: counts differ")
    ys = [(part.x.float() * 1.5 + 0.1).to(dtype) for part in want]
    sums = reference.combine(ys, want)
    for y in (got["x"].copy_(ys[me].cuda()), ys[me].cuda()):
        out = torch.full((sizes[me], hidden), float("nan"), dtype=dtype, device="cuda")
        rank.combine(y, got, sizes[me], out, num_blocks)
        if not torch.equal(out.cpu().view(torch.uint8), sums[me].contiguous().view(torch.uint8)):
            raise AssertionError(f"seed {seed}: rank {me}: combine differs")
    rank.window.check()


REFERENCE_SHAPE = {
    "num_experts": 256,
    "top_k": 8,
    "max_tokens": 4096,
    "max_row_bytes": 28672,
    "num_blocks": 64,
    "heap_bytes": 2 << 30,
}


def small_shape(num_ranks: int) -> dict[str, int]:
    """Odd sizes, many calls: for the comparison with the reference."""
    return {
        "num_experts": 8 * num_ranks,
        "top_k": 6,
        "max_tokens": 200,
        "max_row_bytes": 16384,
        "num_blocks": 64,
        "heap_bytes": 256 << 20,
    }


def timed(call: Any, num_calls: int = 10, num_rounds: int = 5) -> float:
    """Microseconds a call: the median over rounds of calls back to back."""
    call()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(num_rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) / num_calls * 1000)
    return sorted(rounds)[num_rounds // 2]


def speed(rank: Rank, num_tokens: int, hidden: int, num_blocks: int, dtype: torch.dtype) -> dict[str, Any]:
    experts, top_k, ranks = rank.shape["num_experts"], rank.shape["top_k"], rank.comm.num_ranks
    gen = torch.Generator(device="cuda").manual_seed(rank.comm.rank)
    x = torch.randn(num_tokens, hidden, generator=gen, device="cuda").to(dtype)
    ids = torch.rand(num_tokens, experts, generator=gen, device="cuda").topk(top_k).indices
    weights = torch.rand(num_tokens, top_k, generator=gen, device="cuda")
    owner = torch.zeros(num_tokens, ranks, dtype=torch.bool, device="cuda").scatter_(1, ids // (experts // ranks), True)
    remote = int(owner.sum()) - int(owner[:, rank.comm.rank].sum())
    row: dict[str, Any] = {"num_tokens": num_tokens, "dtype": str(dtype), "num_sms": num_blocks, "remote_rows": remote}
    capacity = ranks * num_tokens
    row["dispatch_us"] = sorted(
        timed(lambda: rank.dispatch(x, ids, weights, num_blocks, capacity), 10) for _ in range(5)
    )[2]
    row["dispatch_exact_us"] = sorted(timed(lambda: rank.dispatch(x, ids, weights, num_blocks), 10) for _ in range(5))[
        2
    ]
    if dtype in (torch.bfloat16, torch.float16):
        got = rank.dispatch(x, ids, weights, num_blocks)
        out = torch.empty(num_tokens, hidden, dtype=dtype, device="cuda")
        row["combine_us"] = sorted(
            timed(lambda: rank.combine(got["x"], got, num_tokens, out, num_blocks), 10) for _ in range(5)
        )[2]
        row["combine_wire_gbs"] = remote * hidden * 2 / row["combine_us"] / 1e3
    row["dispatch_wire_gbs"] = remote * hidden * x.element_size() / row["dispatch_us"] / 1e3
    rank.window.check()
    return row


def run_rank(index: int, num_ranks: int, pipe: Any, options: argparse.Namespace) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(200, exit=True)
    try:
        torch.cuda.set_device(index % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
        listener = _native.Listener()
        pipe.send(listener.endpoint())
        comm = _native.Communicator.connect(index, pipe.recv(), listener, 60.0)
        gpu = _native.Gpu(torch.cuda.current_device(), **nvrtc_paths())
        small = Rank(comm, gpu, torch.cuda.current_device(), small_shape(num_ranks))
        for trial in range(options.trials):
            check_case(small, trial, (1, 4, 8, 16)[trial % 4])
        lines = [{"rank": index, "trials": options.trials, "ok": True}]
        if options.speed:
            big = Rank(comm, gpu, torch.cuda.current_device(), REFERENCE_SHAPE)
            for dtype, hidden in ((torch.bfloat16, 7168), (torch.uint8, 7168)):
                for num_blocks in (8, 12, 16, 20, 24):
                    lines.append({"rank": index, **speed(big, 4096, hidden, num_blocks, dtype)})
        pipe.send(lines)
        comm.exchange(1, b"", 60.0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    """Fork the ranks, connect them, print what they found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    context = mp.get_context("fork")
    ranks = []
    for index in range(options.ranks):
        here, there = context.Pipe()
        process = context.Process(target=run_rank, args=(index, options.ranks, there, options))
        process.start()
        ranks.append((process, here))
    endpoints = [pipe.recv() for _, pipe in ranks]
    for _, pipe in ranks:
        pipe.send(endpoints)
    found = [pipe.recv() if pipe.poll(240) else [{"rank": idx, "ok": False}] for idx, (_, pipe) in enumerate(ranks)]
    for lines in zip(*found, strict=False):
        slowest = dict(lines[0])
        for key in slowest:
            if key.endswith("_us"):
                slowest[key] = round(max(line[key] for line in lines), 1)
        print(json.dumps(slowest))
    for process, _ in ranks:
        process.join(30)
    return 0 if all(lines[0].get("ok") for lines in found) else 1


if __name__ == "__main__":
    sys.exit(main())
