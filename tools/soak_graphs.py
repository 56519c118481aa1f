"""CUDA graphs of dispatch and combine, replayed with another routing each time, every word checked: for tools/soak.py.

A set has three graphs of different sizes on one ExpertParallel. A graph takes rows, ids and weights of its turn from
tables on the device, dispatches, combines what came, perhaps dispatches again with the handle and combines, compares
sums, side values, counts, weights and ids with what tools/soak_check.py worked out, adds up the words that differ,
overwrites all results, and advances its turn: the host only replays. Experts multiply rows by a number of their place,
so that one in a wrong place is seen in the sums. Every EAGER_EVERY-th time the host makes the same calls itself, with
the throughput kernels. On CPUs all of it runs eagerly.
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
from soak_check import (
    Shape,
    Sum,
    num_different,
    poison,
    poison_handle,
    routed,
    side_of,
    side_sums,
    sums,
    values,
)
from soak_rounds import DEADLINE_S, GRAPH_POOLS, GraphSet, agree, draw_graphs
from torch import Tensor

import weft
from weft import reference
from weft.verify.cases import dispatch_options, later_options

BATCH = 600  # replays between two agreements
EAGER_EVERY = 59
THROUGHPUT = {"mode": "throughput"}


@dataclass(frozen=True)
class Tables:
    """Inputs and results of this rank for each turn, a dimension before those of a call. D: dispatches of a replay."""

    x: Tensor  # [D, T, H]
    ids: Tensor
    weights: Tensor
    bias: Tensor  # [1, H], [T, H], or nothing
    y: Tensor  # [D, T, H]
    side: Tensor  # [D, T, K]
    sizes: Tensor  # counts, offsets and number of rows, as in a handle
    row_weight: Tensor
    row_ids: Tensor  # rank_major, else nothing
    promised: Tensor  # bool, of each row: its weight and ids are


class Graph:
    """Captured calls of one size."""

    def __init__(self, ep: weft.ExpertParallel, chosen: GraphSet, number: int, num_turns: int) -> None:
        self.ep, self.chosen, self.tokens = ep, chosen, chosen.tokens[number]
        self.form: dict[str, Any] = {
            "quantize": None if chosen.quantize == "given" else chosen.quantize,
            "scale_layout": chosen.scale_layout if chosen.quantize else "row_major",
        }
        self.options: dict[str, Any] = {
            "layout": chosen.layout,
            "alignment": chosen.alignment,
            "capacity": self.capacity(),
            "max_tokens": max(self.tokens),
        }
        turns = [self.turn_of(chosen.seed * 8191 + number * num_turns + turn) for turn in range(num_turns)]
        parts = {field.name: [getattr(turn, field.name) for turn in turns] for field in dataclasses.fields(Tables)}
        self.tables = Tables(**{name: torch.stack(part) for name, part in parts.items()})
        rows = torch.arange(self.tables.promised.shape[1], device=ep.device)
        self.factors = factors(rows, ep.dtype)
        self.turn = torch.zeros(1, dtype=torch.int64, device=ep.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=ep.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.run: Callable[[], None] = self.step

    def capacity(self) -> int:
        """Of all that may come, or of half of what comes on average; masked: of several times as much, or of that."""
        picks = self.ep.num_ranks * max(self.tokens) * self.ep.top_k
        mean = picks // self.ep.num_ranks
        if self.chosen.layout == "masked":
            mean //= self.ep.num_local_experts
            return mean + 1 if self.chosen.is_tight else min(picks // self.ep.top_k, 4 * mean + 32)
        if self.chosen.is_tight:
            return mean // 2 + 1
        if self.chosen.layout == "expert_major":
            return picks + self.ep.num_local_experts * (self.chosen.alignment - 1)
        return picks // self.ep.top_k

    def turn_of(self, seed: int) -> Tables:
        """One turn, without the dimension of turns."""
        ep, chosen, rank = self.ep, self.chosen, self.ep.comm.rank
        shape = Shape(
            self.tokens, ep.num_local_experts, ep.top_k, chosen.layout, chosen.alignment, self.options["capacity"]
        )
        routing = routed(shape, chosen.absent, seed, rank, ep.device)
        here, names = routing.here, torch.arange(sum(self.tokens), device=ep.device)
        mine = names[shape.tokens_of(rank)]
        biased = {None: mine[:0], "row": torch.arange(1, device=ep.device), "full": mine}[chosen.bias]
        bias = values(biased, ep.hidden, 3 * seed + 2, torch.float32 if chosen.seed % 2 else ep.dtype)
        xs = [values(mine, ep.hidden, 3 * seed + number, ep.dtype) for number in range(chosen.num_dispatches)]
        outputs = [through_experts(quantized(x, chosen.quantize), ep.dtype)[:, None] for x in xs]
        backs = [output * factors(routing.picks.row, ep.dtype)[..., None] for output in outputs]
        is_rank_major = chosen.layout == "rank_major"
        how = Sum(ep.num_ranks, is_rank_major, chosen.weighted, chosen.wire)
        if chosen.layout == "masked":
            promised = here.row_token >= 0
        else:
            promised = torch.arange(len(here.row_token), device=ep.device) < here.num_rows
        return Tables(
            x=torch.stack(xs),
            ids=routing.ids.to(getattr(torch, chosen.id_dtype)),
            weights=routing.weights,
            bias=bias,
            y=torch.stack([sums(back, routing.picks, how, bias if chosen.bias else None) for back in backs]),
            side=torch.stack([side_sums(back, routing.picks, is_rank_major=is_rank_major) for back in backs]),
            sizes=routing.sizes,
            row_weight=here.row_weight,
            row_ids=mine[:0] if here.row_ids is None else here.row_ids.to(getattr(torch, chosen.id_dtype)),
            promised=promised,
        )

    def step(self, first: dict[str, Any] | None = None, later: dict[str, Any] | None = None) -> None:
        """The calls of this turn and their comparison; `first`, `later`: modes, None: those of the set."""
        first = dispatch_options(self.chosen.mode, has_capacity=True) if first is None else first
        later = later_options(self.chosen.mode) if later is None else later
        names = [field.name for field in dataclasses.fields(Tables)]
        now = Tables(**{name: getattr(self.tables, name).index_select(0, self.turn)[0] for name in names})
        handle: weft.Handle | None = None
        for number, x in enumerate(now.x):
            rows = weft.Quantized(*reference.quantize_fp8(x)) if self.chosen.quantize == "given" else x
            if handle is None:
                r = self.ep.dispatch(rows, now.ids, now.weights, **self.options, **self.form, **first).wait()
            else:
                r = self.ep.dispatch(rows, handle=handle, **self.form, **later).wait()
            handle = r.handle
            self.combine(r, now, number, later)
            poison(r.x)
        self.check_routing(r, now)
        poison_handle(r.handle)
        self.turn.add_(1).remainder_(len(self.tables.x))

    def combine(self, r: weft.Dispatched, now: Tables, number: int, later: dict[str, Any]) -> None:
        """What came back to its owners, behind dispatch `number`."""
        chosen = self.chosen
        rows = through_experts(r.x, self.ep.dtype)
        output = self.ep.empty_output(r) if chosen.in_heap else torch.empty_like(rows)
        torch.mul(rows, self.factors.view(*rows.shape[:-1], 1), out=output)
        y: Any = self.ep.combine(
            output,
            r.handle,
            weighted=chosen.weighted,
            side=side_of(output, self.ep.top_k, chosen.layout) if chosen.has_side else None,
            bias={None: None, "row": now.bias[:1].view(-1), "full": now.bias}[chosen.bias],
            wire=chosen.wire,
            **later,
        )
        y = y.wait() if isinstance(y, weft.Staged) else y
        parts = zip(y if chosen.has_side else (y,), (now.y[number], now.side[number]), strict=False)
        for got, want in parts:
            self.wrong += num_different(got, want)
            poison(got)

    def check_routing(self, r: weft.Dispatched, now: Tables) -> None:
        """Counts, weights and ids of all dispatches."""
        promised = now.promised[:, None] if now.row_weight.dim() == 2 else now.promised
        given = torch.cat((r.num_tokens_per_expert, r.offsets, r.num_rows.view(1)))  # the caller's copy
        self.wrong += num_different(given, now.sizes)
        self.wrong += num_different(r.handle.sizes, now.sizes)  # what later calls read
        self.wrong += num_different(r.topk_weights.view(now.row_weight.shape), now.row_weight, promised)
        if r.topk_idx is not None:
            self.wrong += num_different(r.topk_idx, now.row_ids, promised)

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
        at, before, tables = int(self.turn), int(self.wrong), self.tables
        planted = [tables.sizes[at, :1]]
        planted += [tables.y.view(torch.uint8)[at, number, -1:, 0] for number in range(self.chosen.num_dispatches)]
        if self.chosen.has_side:
            planted += [tables.side.view(torch.int32)[at, -1, -1:, 0]]
        named = tables.promised[at].nonzero()[-1:, 0]  # the last row with a weight, if any
        rows = slice(int(named), int(named) + 1) if len(named) else slice(0)
        for part in (tables.row_weight.view(torch.int32), tables.row_ids):
            planted += [part[at, rows].view(-1)[-1:]]
        for part in planted:
            part ^= 1
        self.run()
        for part in planted:
            part ^= 1
        num_planted = sum(len(part) for part in planted) + len(planted[0])  # sizes are compared twice
        if int(self.wrong) - before < num_planted:
            raise AssertionError(f"the comparison does not see a wrong word: {dataclasses.asdict(self.chosen)}")
        self.wrong -= num_planted


def quantized(x: Tensor, quantize: str | None) -> Tensor | weft.Quantized:
    """Rows as they arrive."""
    if quantize is None:
        return x
    return weft.Quantized(*reference.quantize_fp8(x, ue8m0=quantize == "fp8_ue8m0", pow2=quantize == "fp8_pow2"))


def through_experts(rows: Tensor | weft.Quantized, dtype: torch.dtype) -> Tensor:
    """The experts return what they are given."""
    if isinstance(rows, Tensor):
        return rows
    assert rows.scales is not None  # noqa: S101  for mypy
    return reference.dequantize_fp8(rows.data, rows.scales).to(dtype)


def factors(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What experts multiply the rows in these places by: a power of two, so that it is exact."""
    return (1 << (rows & 3)).to(dtype)


def run_set(
    comm: weft.Communicator, chosen: GraphSet, options: argparse.Namespace, ends: float, beside: Callable[[], None]
) -> tuple[int, int, bool]:
    """Replays until there are --set-replays -> (replays, words that differ, whether to stop: a rank has seen a wrong
    word, or the time is up). Collective.
    """
    pool = GRAPH_POOLS[chosen.pool]
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
