"""Guards against wrong sums, hangs and early ends of the combine kernels where there is no GPU.

The kernels' own source is compiled with g++: a block is a process, its threads are threads, bulk copies are done as
late as the rules allow and in any order (`weft/ptx/bulk.cuh` here). That says nothing about fences, nor about speed.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft import _load, reference

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "include"
SHARED_BYTES = 227 << 10
DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
LAYOUTS = ("rank_major", "expert_major", "masked")
PRINT = 77
DEADLINE, MISMATCH, BAD_WORD = 1, 3, 4  # transport::ErrorCause


class WindowCall(ctypes.Structure):
    """`Call` of combine_main.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("num_ranks", "num_experts", "top_k", "num_blocks")] + [
        (name, ctypes.c_int64) for name in ("max_tokens", "landing_row_bytes", "call_tokens", "timeout_ns")
    ]


class RankCall(ctypes.Structure):
    """`RankCall` of combine_main.h."""

    _fields_ = (
        [
            (name, ctypes.c_uint64)
            for name in ("rows", "weights", "side", "send_plan", "recv_plan", "bias", "out", "side_out")
        ]
        + [(name, ctypes.c_int64) for name in ("num_rows", "row_bytes", "num_tokens", "bias_row_bytes", "claimed_rows")]
        + [(name, ctypes.c_int32) for name in ("bias_is_fp32", "is_in_heap", "print", "is_absent")]
        + [("finished_sequence", ctypes.c_uint64), ("error", ctypes.c_uint32), ("culprit", ctypes.c_uint32)]
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call: what every rank does. `heap`: ranks whose rows lie in their heap; `bias`: dimensions, 0 none."""

    layout: str = "rank_major"
    ranks: int = 2
    experts: int = 4
    top_k: int = 3
    hidden: int = 136
    dtype: torch.dtype = torch.bfloat16
    sizes: tuple[int, ...] = (9, 14)
    heap: tuple[int, ...] = ()
    blocks: int = 1
    wire: str | None = None
    weighted: bool = True
    side: bool = False
    bias: int = 0
    bias_dtype: torch.dtype | None = None
    capacity: int | None = None
    landing_row_bytes: int = 1024
    special: bool = False  # rows hold infinities, NaN and -0
    faults: tuple[tuple[int, str, int], ...] = ()  # (rank, field of RankCall, value)

    @property
    def is_pulled(self) -> bool:
        return self.layout == "rank_major" and self.wire is None


def headers(folder: Path) -> Path:
    """Where the kernel is that has its dynamic shared memory from main."""
    kernels = folder / "weft" / "kernels"
    kernels.mkdir(parents=True)
    text = (INCLUDE / "weft" / "kernels" / "combine.cuh").read_text()
    (kernels / "combine.cuh").write_text(re.sub(r"\n *extern __shared__ [^\n]*", "", text))
    return folder


def config_of(case: Case, *, has_push: bool) -> str:
    """The configuration that a real call has, as text."""
    native: Any = _load.native()
    args = native.GpuCombineArgs()
    args.layout, args.num_blocks, args.hidden = LAYOUTS.index(case.layout), case.blocks, case.hidden
    args.dtype, args.wire_is_fp8, args.has_side = DTYPES[case.dtype], case.wire is not None, case.side
    source = native.render_combine(
        args,
        num_ranks=case.ranks,
        num_experts=case.experts,
        top_k=case.top_k,
        has_push=has_push,
        shared_bytes=SHARED_BYTES,
    )
    found = re.search(r"kConfig(\{.*?\});", source)
    assert found, source
    return found[1]


@functools.cache
def program(push: str, pull: str) -> Path:
    """Compile main and the two kernels of a call, from their configurations."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    configs = f"constexpr weft::CombineKernelConfig kPush{push}, kPull{pull};"
    source, built = folder / "main.cc", folder / "main"
    source.write_text(f'#include "weft/config/kernel.h"\n{configs}\n#include "combine_main.h"\n')
    folders = [f"-I{path}" for path in (headers(folder / "headers"), HERE, INCLUDE)]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-pthread", "-w"]
    subprocess.run([compiler, *flags, *folders, str(source), "-o", str(built)], check=True)
    return built


def plans(case: Case, routing: reference.Routing, max_tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """The send plan and the receive plan of every rank (layout/gpu_plan.h); what is undefined is poison."""
    starts = np.concatenate([[0], np.cumsum(case.sizes)])
    send, recv = [], []
    for rank, size in enumerate(case.sizes):
        own = [rows[starts[rank] : starts[rank + 1]].to(torch.int32) for rows in routing.rows]
        mask = sum((rows >= 0).any(1).to(torch.int32) << other for other, rows in enumerate(own))
        row, destination = torch.full((2, size, case.top_k), -1, dtype=torch.int32)
        for other, rows in enumerate(own):
            row[rows >= 0], destination[rows >= 0] = rows[rows >= 0], other
        if case.layout == "rank_major":
            row = torch.stack([rows.amax(1) if size else rows[:, 0] for rows in own], 1)
        send.append(torch.cat([torch.as_tensor(mask), row.flatten(), destination.flatten()]))
    width = 1 if case.layout == "rank_major" else case.top_k
    for rank in range(case.ranks):
        table = torch.full((case.ranks, max_tokens, width), 123456789, dtype=torch.int32)
        for other, size in enumerate(case.sizes):
            rows = routing.rows[rank][starts[other] : starts[other + 1]]
            if size:
                table[other, :size] = (rows.amax(1, keepdim=True) if width == 1 else rows).to(torch.int32)
        recv.append(torch.cat([torch.tensor([*case.sizes, *[0] * (16 - case.ranks)]).int(), table.flatten()]))
    return send, recv


class File:
    """Tensors one after the other, at multiples of 256 bytes."""

    def __init__(self, num_ranks: int) -> None:
        self.parts = [np.zeros(ctypes.sizeof(WindowCall) + num_ranks * ctypes.sizeof(RankCall), np.uint8)]
        self.size = self.parts[0].size

    def put(self, tensor: Tensor | None) -> int:
        """The place of a copy; 0 for none."""
        if tensor is None or tensor.numel() == 0:
            return 0
        self.parts.append(np.zeros(-self.size % 256, np.uint8))
        place = self.size + self.parts[-1].size
        self.parts.append(tensor.contiguous().flatten().view(torch.uint8).numpy())
        self.size = place + self.parts[-1].size
        return place


@dataclass(frozen=True)
class Outcome:
    """What the kernels left on one rank."""

    y: Tensor
    side: Tensor
    state: RankCall


def random_rows(case: Case, routing: reference.Routing, gen: torch.Generator) -> list[Tensor]:
    rows = [(3 * torch.randn(*shape, case.hidden, generator=gen)).to(case.dtype) for shape in routing.row_shape]
    for part in rows if case.special else []:
        flat = part.view(-1)
        if flat.numel():
            flat[::97], flat[5::1001], flat[7::2003] = -0.0, float("inf"), float("nan")
    return rows


def run(case: Case, folder: Path) -> tuple[list[Outcome], list[tuple[Tensor, Tensor]]]:
    """Run the kernels; returns what they and what the reference gave for each rank."""
    gen = torch.Generator().manual_seed(case.hidden)
    ids = [torch.randint(-1, case.experts, (size, case.top_k), generator=gen) for size in case.sizes]
    picks = [torch.rand(size, case.top_k, generator=gen) - 0.3 for size in case.sizes]
    tokens = [torch.zeros(size, 8) for size in case.sizes]
    sent = reference.dispatch(tokens, ids, picks, num_experts=case.experts, layout=case.layout, capacity=case.capacity)
    routing, max_tokens = sent[0].routing, max(case.sizes) + 2
    rows = random_rows(case, routing, gen)
    sides = [torch.randn(weights.shape, generator=gen) for weights in routing.weights]
    shapes = [(size, case.hidden)[2 - case.bias :] for size in case.sizes]
    dtype = case.bias_dtype or case.dtype
    biases = [torch.randn(shape, generator=gen).to(dtype) for shape in shapes] if case.bias else None
    want = reference.combine(rows, routing, weighted=case.weighted, sides=sides, biases=biases, wire=case.wire)
    send, recv = plans(case, routing, max_tokens)

    file, calls = File(case.ranks), (RankCall * case.ranks)()
    for rank, call in enumerate(calls):
        own, size = rows[rank].reshape(-1, case.hidden), case.sizes[rank]
        weights = routing.weights[rank] if case.weighted and case.layout != "rank_major" else None
        call.rows, call.weights, call.side = file.put(own), file.put(weights), file.put(sides[rank])
        call.send_plan, call.recv_plan = file.put(send[rank]), file.put(recv[rank])
        call.out = file.put(torch.full((size, case.hidden), float("nan"), dtype=case.dtype))
        call.side_out = file.put(torch.full((size, case.top_k), float("nan")))
        call.bias = file.put(biases[rank]) if biases else 0
        call.num_rows, call.row_bytes, call.num_tokens = len(own), own.shape[1] * own.element_size(), size
        call.bias_row_bytes = case.hidden * dtype.itemsize if case.bias == 2 else 0
        call.bias_is_fp32, call.print = dtype == torch.float32, PRINT
        call.is_in_heap = rank in case.heap and len(own) > 0
    for rank, name, value in case.faults:
        setattr(calls[rank], name, value)
    timeout_ns = 6_000_000_000 if case.faults else 100_000_000_000
    window = WindowCall(
        case.ranks,
        case.experts,
        case.top_k,
        case.blocks,
        max_tokens,
        case.landing_row_bytes,
        max(case.sizes),
        timeout_ns,
    )
    file.parts[0][:] = np.frombuffer(bytes(window) + bytes(calls), np.uint8)
    path = folder / "call"
    path.write_bytes(np.concatenate(file.parts).tobytes())
    built = program(config_of(case, has_push=True), config_of(case, has_push=not case.is_pulled))
    subprocess.run([str(built), str(path)], check=True, timeout=120)
    data = path.read_bytes()
    left = (RankCall * case.ranks).from_buffer_copy(data, ctypes.sizeof(WindowCall))

    def read(place: int, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        count = int(np.prod(shape))
        return (
            torch.frombuffer(bytearray(data), dtype=kind, count=count, offset=place).view(shape)
            if count
            else torch.zeros(shape, dtype=kind)
        )

    outcomes = [
        Outcome(
            read(state.out, (size, case.hidden), case.dtype),
            read(state.side_out, (size, case.top_k), torch.float32),
            state,
        )
        for state, size in zip(left, case.sizes, strict=True)
    ]
    return outcomes, want


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Any NaN equals any NaN."""
    whole = {2: torch.int16, 4: torch.int32}[want.element_size()]
    return bool(((got.view(whole) == want.contiguous().view(whole)) | (got.isnan() & want.isnan())).all())


CASES = {
    "pulled": Case(ranks=3, experts=6, sizes=(9, 0, 14), heap=(0, 2), blocks=2, bias=1),
    "pushed, wide rows": Case(
        hidden=7200, dtype=torch.float16, bias=2, bias_dtype=torch.float32, landing_row_bytes=14400
    ),
    "both, in passes, side": Case(heap=(1,), hidden=1032, dtype=torch.float32, side=True, bias=2),
    "fp8": Case(wire="fp8", hidden=400, special=True),
    "fp8 of fp32, side": Case(wire="fp8", hidden=272, dtype=torch.float32, side=True, blocks=2),
    "expert-major": Case(
        layout="expert_major",
        ranks=3,
        experts=6,
        sizes=(9, 0, 14),
        top_k=6,
        hidden=3600,
        bias=1,
        landing_row_bytes=7200,
    ),
    "expert-major, plain sums, capacity": Case(
        layout="expert_major", weighted=False, capacity=17, special=True, side=True
    ),
    "masked, fp8": Case(layout="masked", capacity=5, wire="fp8", dtype=torch.float16, hidden=272, side=True),
    "many picks": Case(layout="expert_major", top_k=70, sizes=(3, 5), dtype=torch.float32),
    "one rank": Case(layout="expert_major", ranks=1, sizes=(7,), blocks=2),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_the_references(name: str, tmp_path: Path) -> None:
    """Poisoned results, ranks without tokens, several operations where the landing is small."""
    case = CASES[name]
    outcomes, want = run(case, tmp_path)
    for rank, (got, (y, side)) in enumerate(zip(outcomes, want, strict=True)):
        assert got.state.error == 0, f"rank {rank}"
        assert same_bits(got.y, y), f"rank {rank}"
        assert not case.side or same_bits(got.side, side), f"rank {rank}"
        assert got.state.finished_sequence >= 1


FAULTS = {
    "another call": (((1, "print", 5),), MISMATCH, (0, 1, 2)),
    "dead": (((1, "is_absent", 1),), DEADLINE, (0, 2)),
    "half dead": (((1, "is_absent", 2),), DEADLINE, (0, 2)),
}


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_block_leaves_when_a_rank_fails(fault: str, layout: str, tmp_path: Path) -> None:
    """All threads end, what they loaded and stored is drained, and the reason names the rank."""
    faults, cause, told = FAULTS[fault]
    outcomes, _ = run(Case(layout=layout, ranks=3, experts=6, sizes=(9, 6, 14), blocks=2, faults=faults), tmp_path)
    for rank in told:
        assert outcomes[rank].state.error == cause
        assert outcomes[rank].state.finished_sequence == (1 if cause == MISMATCH else 0)
    assert outcomes[0].state.culprit == 1


def test_a_place_outside_of_the_heap_is_not_read(tmp_path: Path) -> None:
    """A peer that claims more rows than its heap can hold."""
    outcomes, _ = run(Case(heap=(1,), faults=((1, "claimed_rows", 1 << 40),)), tmp_path)
    assert outcomes[0].state.error == BAD_WORD
    assert outcomes[0].state.culprit == 1
