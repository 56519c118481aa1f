"""CUDA graphs of dispatch and combine, replayed with another routing each time, every word checked: for tools/soak.py.

A set has three graphs of different sizes on one ExpertParallel. A graph takes rows, ids and weights of its turn from
tables on the device, dispatches, combines what came, compares sums and counts with what tools/soak_check.py worked out,
adds up the words that differ, and advances its turn: the host only replays. Every EAGER_EVERY-th time it makes the same
calls itself, with the throughput kernels. On CPUs all of it runs eagerly.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from soak_check import Places, Shape, Sum, drawn_routing, num_different, places, sums, values
from soak_rounds import DEADLINE_S, POOLS, GraphSet, agree, draw_graphs
from torch import Tensor

import weft
from weft import reference
from weft.verify.cases import dispatch_options, later_options

BATCH = 600  # replays between two agreements
EAGER_EVERY = 59
THROUGHPUT = {"mode": "throughput"}


@dataclass(frozen=True)
class Tables:
    """Inputs and results of this rank for each turn; a dimension of turns goes before those of the call."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor
    sizes: Tensor  # counts, offsets and number of rows, as in a handle


class Graph:
    """Captured calls of one size."""

    def __init__(self, ep: weft.ExpertParallel, chosen: GraphSet, number: int, num_turns: int) -> None:
        self.ep, self.chosen, self.tokens = ep, chosen, chosen.tokens[number]
        self.options: dict[str, Any] = {
            "layout": chosen.layout,
            "alignment": chosen.alignment,
            "quantize": chosen.quantize,
            "scale_layout": chosen.scale_layout if chosen.quantize else "row_major",
            "capacity": self.capacity(),
            "max_tokens": max(self.tokens),
        }
        turns = [self.turn_of(chosen.seed * 8191 + number * num_turns + turn) for turn in range(num_turns)]
        self.tables = Tables(*(torch.stack(part) for part in zip(*turns, strict=True)))
        self.turn = torch.zeros(1, dtype=torch.int64, device=ep.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=ep.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.run: Callable[[], None] = self.step

    def capacity(self) -> int:
        """Of all that may come (masked: if no id repeats within a token), or of half of what comes on average."""
        picks = self.ep.num_ranks * max(self.tokens) * self.ep.top_k
        if self.chosen.is_tight:
            mean = picks // self.ep.num_ranks
            return (mean // self.ep.num_local_experts if self.chosen.layout == "masked" else mean // 2) + 1
        if self.chosen.layout == "expert_major":
            return picks + self.ep.num_local_experts * (self.chosen.alignment - 1)
        return picks // self.ep.top_k

    def turn_of(self, seed: int) -> tuple[Tensor, ...]:
        """The parts of Tables for one turn."""
        ep, chosen, tokens = self.ep, self.chosen, self.tokens
        ids, weights = drawn_routing(sum(tokens), ep.num_experts, ep.top_k, chosen.absent, seed, ep.device)
        shape = Shape(ep.num_ranks, ep.num_local_experts, chosen.layout, chosen.alignment, self.capacity())
        everywhere = [places(ids, weights, rank, shape, tokens) for rank in range(ep.num_ranks)]
        x = values(torch.arange(sum(tokens), device=ep.device), ep.hidden, seed, ep.dtype)
        outputs = through_experts(quantized(x, chosen.quantize), ep.dtype)
        ys = [
            torch.where((there.row_token < 0)[:, None], 0, outputs[there.row_token.clamp(min=0)])
            for there in everywhere
        ]
        rank = ep.comm.rank
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        y = sums(mine, everywhere, ys, Sum(chosen.layout == "rank_major", chosen.weighted, chosen.wire))
        return x[mine], ids[mine], weights[mine], y, sizes_of(everywhere[rank])

    def step(self, first: dict[str, Any] | None = None, later: dict[str, Any] | None = None) -> None:
        """The calls of this turn and their comparison; `first`, `later`: modes, None: those of the set."""
        first = dispatch_options(self.chosen.mode, has_capacity=True) if first is None else first
        later = later_options(self.chosen.mode) if later is None else later
        x, ids, weights, want, sizes = (
            getattr(self.tables, field.name).index_select(0, self.turn)[0] for field in dataclasses.fields(Tables)
        )
        r = self.ep.dispatch(x, ids, weights, **self.options, **first).wait()
        y: Any = self.ep.combine(
            through_experts(r.x, self.ep.dtype), r.handle, weighted=self.chosen.weighted, wire=self.chosen.wire, **later
        )
        y = y.wait() if isinstance(y, weft.Staged) else y
        self.wrong += num_different(y, want) + num_different(r.handle.sizes, sizes)
        self.turn.add_(1).remainder_(len(self.tables.x))

    def capture(self) -> None:
        """From now on `run` replays. Collective: ranks may be threads, and while one captures none may wait for the
        whole GPU, as `torch.cuda.graph` does.
        """
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.ep.device)
        torch.cuda.current_stream().synchronize()
        self.ep.comm.meet(DEADLINE_S)
        with torch.cuda.stream(stream):
            self.graph.capture_begin(capture_error_mode="thread_local")
            self.step()
            self.graph.capture_end()
        self.ep.comm.meet(DEADLINE_S)
        self.run = self.graph.replay

    def check_the_check(self) -> None:
        """A replay must count flipped bits of what is expected, or a run would prove nothing."""
        at, before = int(self.turn), int(self.wrong)
        planted = [self.tables.sizes[at, :1], self.tables.y.view(torch.uint8)[at, -1:, 0]]  # the latter: of a token
        for part in planted:
            part ^= 1
        self.run()
        for part in planted:
            part ^= 1
        num_planted = sum(len(part) for part in planted)
        if int(self.wrong) < before + num_planted:
            raise AssertionError(f"the comparison does not see a wrong word: {dataclasses.asdict(self.chosen)}")
        self.wrong -= num_planted


def quantized(x: Tensor, quantize: str | None) -> Tensor | weft.Quantized:
    """Rows as they arrive."""
    if quantize is None:
        return x
    return weft.Quantized(*reference.quantize_fp8(x, ue8m0=quantize == "fp8_ue8m0"))


def through_experts(rows: Tensor | weft.Quantized, dtype: torch.dtype) -> Tensor:
    """The experts return what they are given."""
    if isinstance(rows, Tensor):
        return rows
    assert rows.scales is not None  # noqa: S101  for mypy
    return reference.dequantize_fp8(rows.data, rows.scales).to(dtype)


def sizes_of(here: Places) -> Tensor:
    """int32, as `Handle.sizes`."""
    num_rows = here.counts.new_tensor([here.num_rows])
    return torch.cat([here.counts, here.offsets, num_rows]).to(torch.int32)


def run_set(
    comm: weft.Communicator, chosen: GraphSet, options: argparse.Namespace, ends: float, beside: Callable[[], None]
) -> tuple[int, int, bool]:
    """Replays until there are --set-replays -> (replays, words that differ, whether to stop: a rank has seen a wrong
    word, or the time is up). Collective.
    """
    pool = POOLS[chosen.pool]
    ep = weft.ExpertParallel(
        comm,
        num_experts=pool.experts * comm.num_ranks,
        top_k=pool.top_k,
        hidden=pool.hidden,
        max_tokens_per_rank=pool.max_tokens,
        heap_bytes=pool.heap_bytes,
        num_sms=pool.num_sms,
        deadline_s=DEADLINE_S,
        dtype=pool.dtype,
    )
    graphs = [Graph(ep, chosen, number, options.turns) for number in range(len(chosen.tokens))]
    for graph in graphs:
        graph.step()  # loads what capturing must not
        graph.step(THROUGHPUT, THROUGHPUT)
        if comm.engine == "nvlink":
            graph.capture()
        graph.check_the_check()
    order = random.Random(chosen.seed)
    num_replays, stop = 0, False
    while not stop and num_replays < options.set_replays:
        for number in range(min(BATCH, options.set_replays)):
            beside()
            graph = order.choice(graphs)
            if number % EAGER_EVERY == EAGER_EVERY - 1:
                graph.step(THROUGHPUT, THROUGHPUT)
            else:
                graph.run()
                num_replays += 1
        is_wrong = any(int(graph.wrong) for graph in graphs)  # waits for the replays
        stop = agree(ep, stop=is_wrong or time.monotonic() > ends)
    num_wrong = sum(int(graph.wrong) for graph in graphs)
    for graph in graphs:
        if graph.graph is not None:
            graph.graph.reset()
    ep.close()
    return num_replays, num_wrong, stop


def run_graphs(
    comm: weft.Communicator, options: argparse.Namespace, beside: Callable[[], None], note: Callable[..., None]
) -> dict[str, Any]:
    """Sets of graphs for --graph-seconds; `beside` is called before each replay, `note` after each set. Collective."""
    ends = time.monotonic() + options.graph_seconds
    seed, num_replays = options.seed, 0
    problems: list[str] = []
    stop = options.graph_seconds <= 0
    while not stop and seed - options.seed < options.graph_sets:
        chosen = draw_graphs(seed, comm.num_ranks)
        replays, num_wrong, stop = run_set(comm, chosen, options, ends, beside)
        seed, num_replays = seed + 1, num_replays + replays
        if num_wrong:
            problems.append(f"rank {comm.rank}: {num_wrong} words in graphs: {dataclasses.asdict(chosen)}")
        note(replays=num_replays, graph_sets=seed - options.seed, problems=problems)
    return {"replays": num_replays, "graph_sets": seed - options.seed, "problems": problems}
