"""Random calls between GPUs, with copies hammering the same links, every word checked: python tools/soak.py

Each round draws a shape and a layout from its seed and makes some dozens of calls through the public interface:
dispatch (new and with a handle) and combine, with exact sizes or a capacity, on the caller's stream or their own, in
every dtype, FP8 too (made by the call or given), with bias and side values, from heap tensors and ordinary ones, by
the kernels for small batches and the others, in one launch or in two halves; on GPUs also batches of training. All
results are compared where they lie with what tools/soak_check.py works out from hashes; every call has data of its
own. Then, for --graph-seconds, CUDA graphs are replayed (tools/soak_graphs.py). At the end it prints one JSON object;
`next_seed` continues where this run stopped. A run begins by making sure that the comparison sees a single wrong word.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from soak_check import Places, Shape, Sum, drawn_routing, num_different, places, poison, side_sums, sums, values
from soak_graphs import run_graphs
from soak_rounds import DEADLINE_S, Pool, Round, agree, compile_kernels, draw, pools_of
from torch import Tensor

import weft
from weft import reference
from weft.bench.apart import apart
from weft.bench.suite import machine_facts
from weft.verify.cases import dispatch_options, later_options

FEW_ROUNDS = 32  # whose kernels are compiled as ranks come to them, no others


class Traffic:
    """Copies to the GPUs of all peers on a stream of their own, kept going from call to call."""

    def __init__(self, device: torch.device, num_bytes: int = 16 << 20) -> None:
        self.stream = torch.cuda.Stream(device)
        others = [idx for idx in range(torch.cuda.device_count()) if idx != device.index]
        self.source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        self.targets = [torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", idx)) for idx in others]
        self.done = torch.cuda.Event()
        self.num_copies = 0

    def go_on(self) -> None:
        """Start the next copies if the last are through."""
        if not self.done.query():
            return
        with torch.cuda.stream(self.stream):
            for target in self.targets:
                target.copy_(self.source, non_blocking=True)
            self.done.record(self.stream)
        self.num_copies += len(self.targets)


class Soak:
    """One rank's rounds."""

    def __init__(self, comm: weft.Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options, self.device = comm, options, comm.device
        on_gpu = comm.device.type == "cuda"
        self.traffic = Traffic(comm.device) if on_gpu and options.traffic else None
        self.pools = pools_of(comm.device.type)
        self.objects = {
            pool: weft.ExpertParallel(
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
            for pool in self.pools
        }
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self.num_calls = self.num_words = 0

    # ---- comparing

    def compare(self, got: Tensor, want: Tensor) -> None:
        """Count words that differ; nothing waits."""
        self.wrong += num_different(got, want)
        self.num_words += got.numel()

    def check_the_check(self) -> None:
        """A flipped bit must be counted, or a run would prove nothing."""
        before = int(self.wrong)
        rows = values(torch.arange(5, device=self.device), 64, 1, torch.bfloat16)
        other = rows.clone()
        other.view(torch.int16)[3, 17] ^= 1
        self.compare(rows, other)
        self.compare(rows, rows.clone())
        if int(self.wrong) != before + 1:
            raise AssertionError("the comparison does not see a wrong word")
        self.wrong.zero_()
        self.num_words = 0

    def figures(self) -> dict[str, int]:
        """Of this rank, so far."""
        return {"calls": self.num_calls, "words": self.num_words}

    def copy_beside(self) -> None:
        """Keep copies going, if there are to be any."""
        if self.traffic is not None:
            self.traffic.go_on()

    # ---- one round

    def run(self, chosen: Round) -> None:
        """All calls of a round; collective."""
        pool, ep = chosen.pool, self.objects[chosen.pool]
        num_experts = pool.experts * self.comm.num_ranks
        ids, weights = drawn_routing(
            sum(chosen.tokens), num_experts, pool.top_k, chosen.absent, chosen.seed, self.device
        )
        start = [sum(chosen.tokens[:rank]) for rank in range(self.comm.num_ranks + 1)]
        mine = slice(start[self.comm.rank], start[self.comm.rank + 1])
        shape = Shape(self.comm.num_ranks, pool.experts, chosen.layout, chosen.alignment, chosen.capacity)
        everywhere = [places(ids, weights, rank, shape, chosen.tokens) for rank in range(self.comm.num_ranks)]
        case = Case(chosen, pool, ep, mine, ids, weights, everywhere)
        received = self.dispatches(case)
        self.combines(case, received)

    def dispatches(self, case: Case) -> weft.Dispatched:
        """Dispatch again and again, every time with other data: `scale` changes every row by a power of two."""
        here = case.everywhere[self.comm.rank]
        dtype, chosen = case.pool.dtype, case.chosen
        x = values(
            torch.arange(case.mine.start, case.mine.stop, device=self.device), case.pool.hidden, chosen.seed, dtype
        )
        named = here.row_token.clamp(min=0)
        want = values(named, case.pool.hidden, chosen.seed, dtype)
        holes = (here.row_token < 0)[:, None]
        handle: weft.Handle | None = None
        first: weft.Dispatched | None = None
        for number in range(self.options.repeats):
            scale = 2.0 ** (number % 5 - 2)
            received = self.dispatch(case, x * scale, handle if number % 3 == 2 else None)
            if number % 3 != 2:
                handle = received.handle
                self.check_routing(case, received, here)
            self.check_rows(case, received, torch.where(holes, 0, want * scale), here)
            if first is None and chosen.quantize is None:
                first = received
            else:
                poison(received.x)
        if first is None:
            first = self.dispatch(case, x, None, quantize=None)
        return first

    def dispatch(
        self, case: Case, x: Tensor, handle: weft.Handle | None, quantize: str | None = "as chosen"
    ) -> weft.Dispatched:
        """One call; copies go on beside it."""
        self.copy_beside()
        chosen = case.chosen
        quantize = chosen.quantize if quantize == "as chosen" else quantize
        rows = weft.Quantized(*reference.quantize_fp8(x)) if quantize == "given" else x
        quantize = None if quantize == "given" else quantize
        form = {
            "quantize": quantize,
            "scale_layout": chosen.scale_layout if quantize else "row_major",
            "zero_holes": chosen.zero_holes,
        }
        if handle is not None:
            received = case.ep.dispatch(
                rows, handle=handle, **form, async_op=chosen.async_op, **later_options(chosen.mode)
            )
        else:
            ids = case.ids[case.mine].to(getattr(torch, chosen.id_dtype))
            received = case.ep.dispatch(
                rows,
                ids,
                case.weights[case.mine],
                layout=chosen.layout,
                alignment=chosen.alignment,
                capacity=chosen.capacity,
                **form,
                async_op=chosen.async_op,
                **dispatch_options(chosen.mode, has_capacity=chosen.capacity is not None),
            )
        received.wait().event.wait()
        self.num_calls += 1
        return received

    def check_routing(self, case: Case, received: weft.Dispatched, here: Places) -> None:
        """Counts, ids and weights."""
        self.compare(received.num_tokens_per_expert, here.counts.to(torch.int32))
        self.compare(received.offsets, here.offsets.to(torch.int32))
        self.compare(received.num_rows, torch.tensor(here.num_rows, dtype=torch.int32, device=self.device))
        filled = self.filled(case, here)
        self.compare(filled(received.topk_weights), filled(here.row_weight.view(received.topk_weights.shape)))
        if received.topk_idx is not None and here.row_ids is not None:
            self.compare(filled(received.topk_idx), filled(here.row_ids.to(received.topk_idx.dtype)))

    def check_rows(self, case: Case, received: weft.Dispatched, want: Tensor, here: Places) -> None:
        """Rows that hold data, holes between groups included."""
        if isinstance(received.x, Tensor):
            filled = self.filled(case, here, holes=case.chosen.zero_holes)
            self.compare(filled(received.x), filled(want.view(received.x.shape)))
            return
        data, scales = reference.quantize_fp8(want, ue8m0=case.chosen.quantize == "fp8_ue8m0")
        mask = here.row_token >= 0  # what data and scales say in holes is not promised
        for got, expected in ((received.x.data, data), (received.x.scales, scales)):
            if got is None:
                raise AssertionError("no scales")
            got, columns = got[mask.view(got.shape[:-1])].contiguous(), expected.shape[-1]
            if expected.element_size() == 1:  # column-major UE8M0 comes in words of four
                got, expected = got.view(torch.uint8), expected.view(torch.uint8)
            self.compare(got[:, :columns], expected.reshape(-1, columns)[mask])

    def filled(self, case: Case, here: Places, *, holes: bool = True) -> Any:
        """Takes the rows whose content is promised: up to num_rows, in masked where picks lie; `holes`: those too."""
        if case.chosen.layout != "masked" and (holes or case.chosen.layout == "rank_major"):
            return lambda part: part[: here.num_rows]
        mask = here.row_token >= 0
        is_masked = case.chosen.layout == "masked"
        return lambda part: (part.reshape(len(mask), *part.shape[2:]) if is_masked else part)[mask]

    def combines(self, case: Case, received: weft.Dispatched) -> None:
        """Combine again and again, every time with other data."""
        chosen, hidden = case.chosen, case.pool.hidden
        ys = [
            values(
                torch.arange(len(there.row_token), device=self.device) + 7919 * rank,
                hidden,
                chosen.seed + 1,
                case.pool.dtype,
            )
            for rank, there in enumerate(case.everywhere)
        ]
        how = Sum(chosen.layout == "rank_major", chosen.weighted, chosen.wire)
        bias = self.bias(case)
        want = sums(case.mine, case.everywhere, ys, how, bias)
        sides = [y[:, : case.pool.top_k if how.is_rank_major else 1].to(torch.float32).squeeze(1) for y in ys]
        want_side = side_sums(case.mine, case.everywhere, sides)
        own = ys[self.comm.rank]
        row_shape = received.x.shape if isinstance(received.x, Tensor) else received.x.data.shape
        output = (
            case.ep.empty_output(received)
            if chosen.in_heap
            else torch.empty(row_shape, dtype=own.dtype, device=self.device)
        )
        side = sides[self.comm.rank].view(*row_shape[:-1], *sides[0].shape[1:])
        out = torch.empty_like(want)
        for number in range(self.options.repeats):
            self.copy_beside()
            scale = 2.0 ** (number % 5 - 2)
            output.copy_((own * scale).view(output.shape))
            poison(out)
            result = case.ep.combine(
                output,
                received.handle,
                weighted=chosen.weighted,
                side=side * scale if chosen.has_side else None,
                bias=None if bias is None else bias * scale,
                out=out,
                wire=chosen.wire,
                async_op=chosen.async_op,
                **later_options(chosen.mode),
            )
            if chosen.async_op:
                result[-1].wait()
            if isinstance(result, weft.Staged):
                result = result.wait()
            self.num_calls += 1
            self.compare(out, want * scale)
            if chosen.has_side:
                self.compare(result[1], want_side * scale)

    def bias(self, case: Case) -> Tensor | None:
        """What a round adds last: float where its seed is odd."""
        if case.chosen.bias is None:
            return None
        num_rows = 1 if case.chosen.bias == "row" else case.mine.stop - case.mine.start
        dtype = torch.float32 if case.chosen.seed % 2 else case.pool.dtype
        rows = values(torch.arange(num_rows, device=self.device), case.pool.hidden, case.chosen.seed + 2, dtype)
        return rows[0] if case.chosen.bias == "row" else rows

    def close(self) -> None:
        """Give everything back."""
        for ep in self.objects.values():
            ep.close()


@dataclass(frozen=True)
class Case:
    """A round with what was worked out for it."""

    chosen: Round
    pool: Pool
    ep: weft.ExpertParallel
    mine: slice  # this rank's tokens among all
    ids: Tensor
    weights: Tensor
    everywhere: list[Places]


def run_rank(comm: weft.Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds, and then graphs, until the time is up or a word is wrong. Every rank makes the same: they agree on it."""
    if comm.device.type == "cuda":
        torch.cuda.set_device(comm.device)
    start = time.monotonic()
    soak = Soak(comm, options)
    soak.check_the_check()
    problems, seed = run_rounds(soak)
    result = {**soak.figures(), "next_seed": seed, "engine": str(comm.engine)}
    soak.close()
    result |= run_graphs(comm, options, soak.copy_beside, functools.partial(note, comm, options))
    result["problems"] = problems + result["problems"]
    result["copies"] = 0 if soak.traffic is None else soak.traffic.num_copies
    return result | {"seconds": time.monotonic() - start}


def run_rounds(soak: Soak) -> tuple[list[str], int]:
    """-> what was wrong on this rank, and the seed of the next round. Collective."""
    problems: list[str] = []
    start, options, seed = time.monotonic(), soak.options, soak.options.seed
    noted = start
    while not problems and seed - options.seed < options.rounds:
        for chosen in batch(seed, soak, options):
            before = int(soak.wrong)
            soak.run(chosen)
            seed += 1
            if int(soak.wrong) != before:  # goes on with the others until they agree to stop
                problems.append(
                    f"rank {soak.comm.rank}: {int(soak.wrong) - before} words: {dataclasses.asdict(chosen)}"
                )
            if time.monotonic() - noted > 1:
                noted = time.monotonic()
                note(soak.comm, options, **soak.figures(), next_seed=seed, problems=problems)
        elapsed = time.monotonic() - start
        note(soak.comm, options, **soak.figures(), next_seed=seed, problems=problems)
        if agree(soak.objects[soak.pools[0]], stop=bool(problems) or elapsed > options.seconds):
            break
    return problems, seed


def note(comm: weft.Communicator, options: argparse.Namespace, **figures: Any) -> None:
    """Add a line about what rank 0 has done, its own words, to --progress: a run that is cut off was not in vain."""
    if options.progress and comm.rank == 0:
        with open(options.progress, "a", encoding="utf-8") as file:
            file.write(
                json.dumps({"kind": "soak_so_far", "ranks": comm.num_ranks, "seed": options.seed, **figures}) + "\n"
            )


def batch(seed: int, soak: Soak, options: argparse.Namespace) -> Iterator[Round]:
    """The next rounds between two agreements."""
    for number in range(seed, min(seed + 16, options.seed + options.rounds)):
        yield draw(number, soak.comm.num_ranks, soak.pools)


def main() -> int:
    """Start the ranks, add up what they counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--isolation", choices=("process", "thread"), default="process", help="of the ranks")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1 << 40, help="at most so many")
    parser.add_argument("--repeats", type=int, default=20, help="dispatches, and combines, of a round")
    parser.add_argument("--graph-seconds", type=float, default=0.0, help="then replay CUDA graphs for so long")
    parser.add_argument("--set-replays", type=int, default=100_000, help="of one set of graphs")
    parser.add_argument("--graph-sets", type=int, default=1 << 40, help="at most so many")
    parser.add_argument("--turns", type=int, default=32, help="routings of a graph, over and over")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--progress", metavar="FILE", help="add a JSON line every second or so")
    parser.add_argument("--no-traffic", dest="traffic", action="store_false", help="no copies beside the calls")
    options = parser.parse_args()
    facts = apart(machine_facts, options.device)
    if options.rounds > FEW_ROUNDS or options.graph_seconds:
        apart(compile_kernels, facts["arch"], options.ranks)
    ranks = weft.spawn(
        run_rank, num_ranks=options.ranks, args=(options,), device=options.device, isolation=options.isolation
    )
    row: dict[str, Any] = {"kind": "soak", **{name: facts[name] for name in ("commit", "machine", "driver", "torch")}}
    row |= {"ranks": options.ranks, "engine": ranks[0]["engine"], "seed": options.seed}
    row |= {"next_seed": max(rank["next_seed"] for rank in ranks), "repeats": options.repeats}
    row |= {"calls": min(rank["calls"] for rank in ranks), "words": sum(rank["words"] for rank in ranks)}
    row |= {"replays": min(rank["replays"] for rank in ranks), "graph_sets": max(rank["graph_sets"] for rank in ranks)}
    row["problems"] = [problem for rank in ranks for problem in rank["problems"]]
    row["seconds"] = max(rank["seconds"] for rank in ranks)
    num_copies = sum(rank["copies"] for rank in ranks)
    row["traffic"] = f"{num_copies} copies of 16 MiB between the GPUs" if num_copies else "none"
    print(json.dumps(row))
    return 1 if row["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
