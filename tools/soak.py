"""Random calls between GPUs, with copies hammering the same links, every word checked: python tools/soak.py

Each round draws a shape, a layout and some routings from its seed and makes some dozens of calls through the public
interface: dispatch (new and with a handle) and combine, with exact sizes or a capacity, on the caller's stream or their
own, in every dtype, FP8 too (made by the call or given), with bias and side values, from heap tensors and ordinary
ones, by the kernels for small batches and the others, in one launch or in two halves; on GPUs also batches of training.
Every call has data of its own and another routing than the one before. All results are compared where they lie with
what tools/soak_check.py works out from hashes, and overwritten before they are dropped. Then, for --graph-seconds, CUDA
graphs are replayed (tools/soak_graphs.py). At the end it prints one JSON object; `next_seed` continues where this run
stopped. A run begins by making sure that the comparison sees single wrong words.
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
from soak_check import (
    Compared,
    Form,
    Routing,
    Shape,
    Sum,
    planted_in,
    poison,
    poison_handle,
    routed,
    row_names,
    rows_back,
    side_of,
    side_sums,
    sums,
    values,
)
from soak_graphs import run_graphs
from soak_load import Pace, Traffic
from soak_rounds import DEADLINE_S, GRAPH_POOLS, Pool, Round, agree, compile_kernels, draw, pools_of
from torch import Tensor

import weft
from weft import reference
from weft.bench.apart import COMPILE_S, apart
from weft.bench.suite import machine_facts
from weft.verify.cases import dispatch_options, later_options

FEW_ROUNDS = 32  # whose kernels are compiled as ranks come to them, no others
NUM_ROUTINGS = 3  # of a round


class Soak:
    """One rank's rounds."""

    def __init__(self, comm: weft.Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options, self.device = comm, options, comm.device
        on_gpu = comm.device.type == "cuda"
        self.traffic = Traffic(comm.device) if on_gpu and options.traffic else None
        self.pace = Pace() if on_gpu and options.isolation == "thread" else None
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
        self.compared = Compared(comm.device)
        self.num_calls = 0

    def check_the_check(self) -> None:
        """Each flipped bit of a result must be counted, or a run would prove nothing. Collective."""
        drawn = dataclasses.replace(
            draw(0, self.comm.num_ranks, self.pools[:1]),
            tokens=(33,) * self.comm.num_ranks,
            alignment=1,
            quantize=None,
            absent=0.0,
            mode="throughput",
        )
        for layout, capacity in (("rank_major", None), ("expert_major", None), ("masked", 99)):
            case = self.case(dataclasses.replace(drawn, layout=layout, capacity=capacity))
            sent, routing = self.rows(case, 0), case.routings[0]
            received = self.dispatch(case, 0, sent)
            planted = planted_in(received, int(routing.filled[-1]))
            for expected in (0, len(planted)):
                self.compared = Compared(self.device)
                self.compared.routing(received, routing)
                self.compared.rows(received.x, routing, sent, case.form)
                if int(self.compared.wrong) != expected:
                    raise AssertionError(f"{int(self.compared.wrong)} wrong words seen of {expected}, {layout}")
                for part in planted:
                    part ^= 1
        self.compared, self.num_calls = Compared(self.device), 0

    def figures(self) -> dict[str, int]:
        """Of this rank, so far."""
        return {"calls": self.num_calls, "words": self.compared.num_words}

    def before_call(self) -> None:
        """Let the GPU keep up, keep copies going if there are to be any."""
        if self.pace is not None:
            self.pace.go_on()
        if self.traffic is not None:
            self.traffic.go_on()

    # ---- one round

    def run(self, chosen: Round) -> None:
        """All calls of a round; collective."""
        case = self.case(chosen)
        kept = self.dispatches(case)
        self.combines(case, kept)
        for received in kept.values():
            poison_handle(received.handle)

    def case(self, chosen: Round) -> Case:
        """A round with what follows from it on this rank."""
        pool, rank = chosen.pool, self.comm.rank
        shape = Shape(chosen.tokens, pool.experts, pool.top_k, chosen.layout, chosen.alignment, chosen.capacity)
        routings = [
            routed(shape, chosen.absent, chosen.seed * NUM_ROUTINGS + idx, rank, self.device)
            for idx in range(min(NUM_ROUTINGS, self.options.repeats))
        ]
        return Case(chosen, pool, self.objects[pool], shape.tokens_of(rank), routings)

    def rows(self, case: Case, number: int) -> Tensor:
        """What the tokens of all ranks are in a dispatch."""
        names = torch.arange(sum(case.chosen.tokens), device=self.device)
        return values(names, case.pool.hidden, seed_of(case.chosen, number, 0), case.pool.dtype)

    def dispatches(self, case: Case) -> dict[int, weft.Dispatched]:
        """Dispatch again and again, every third time with a handle -> the last result of each routing."""
        kept: dict[int, weft.Dispatched] = {}
        for number in range(self.options.repeats):
            is_again = number % 3 == 2
            idx = (number - (number + 1) // 3 - is_again) % NUM_ROUTINGS  # new ones in turn, again: the last but one
            old = None if is_again else kept.pop(idx, None)
            if old is not None:
                poison_handle(old.handle)
                del old  # the next may come to lie there
            sent = self.rows(case, number)
            received = self.dispatch(case, idx, sent, kept[idx].handle if is_again else None)
            if not is_again:
                kept[idx] = dataclasses.replace(
                    received, x=sent.new_empty((0, sent.shape[1]))
                )  # of which the handle is needed
                self.compared.routing(received, case.routings[idx])
            self.compared.rows(received.x, case.routings[idx], sent, case.form)
            poison(received.x)
        return kept

    def dispatch(self, case: Case, idx: int, sent: Tensor, handle: weft.Handle | None = None) -> weft.Dispatched:
        """One call, `idx`: its routing; copies go on beside it."""
        self.before_call()
        chosen, quantize = case.chosen, case.chosen.quantize
        x = sent[case.mine].clone()
        rows = weft.Quantized(*reference.quantize_fp8(x)) if quantize == "given" else x
        form: dict[str, Any] = {
            "quantize": None if quantize == "given" else quantize,
            "scale_layout": chosen.scale_layout if chosen.quantize else "row_major",
            "zero_holes": chosen.zero_holes,
        }
        if handle is not None:
            received = case.ep.dispatch(
                rows, handle=handle, **form, async_op=chosen.async_op, **later_options(chosen.mode)
            )
        else:
            received = case.ep.dispatch(
                rows,
                case.routings[idx].ids.to(getattr(torch, chosen.id_dtype)),
                case.routings[idx].weights,
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

    def combines(self, case: Case, kept: dict[int, weft.Dispatched]) -> None:
        """Combine again and again, every time with other data; every second result is new, the others in one tensor."""
        chosen, pool = case.chosen, case.pool
        how = Sum(self.comm.num_ranks, chosen.layout == "rank_major", chosen.weighted, chosen.wire)
        num_tokens = case.mine.stop - case.mine.start
        mine = torch.empty((num_tokens, pool.hidden), dtype=pool.dtype, device=self.device)
        for number in range(self.options.repeats):
            self.before_call()
            idx = number % len(kept)
            received, picks = kept[idx], case.routings[idx].picks
            seed = seed_of(chosen, number, 1)
            back = rows_back(picks, pool.hidden, seed, pool.dtype)
            bias = self.bias(case, number)
            output = self.output(case, idx, received, seed)
            out = mine if number % 2 else None
            poison(out)
            result = case.ep.combine(
                output,
                received.handle,
                weighted=chosen.weighted,
                side=side_of(output, pool.top_k, chosen.layout) if chosen.has_side else None,
                bias=bias,
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
            y = result[0] if isinstance(result, tuple) else result
            self.compared.count(y, sums(back, picks, how, bias))
            if chosen.has_side:
                self.compared.count(result[1], side_sums(back, picks, is_rank_major=how.is_rank_major))
                poison(result[1])
            poison(y)

    def output(self, case: Case, idx: int, received: weft.Dispatched, seed: int) -> Tensor:
        """What the experts of this rank give."""
        here, pool = case.routings[idx].here, case.pool
        names = row_names(torch.arange(len(here.row_token), device=self.device), self.comm.rank)
        rows = values(names, pool.hidden, seed, pool.dtype).view(*received.handle.rows_shape, pool.hidden)
        return case.ep.empty_output(received).copy_(rows) if case.chosen.in_heap else rows

    def bias(self, case: Case, number: int) -> Tensor | None:
        """What a combine adds last: float where the seed of the round is odd."""
        if case.chosen.bias is None:
            return None
        num_rows = 1 if case.chosen.bias == "row" else case.mine.stop - case.mine.start
        dtype = torch.float32 if case.chosen.seed % 2 else case.pool.dtype
        names = torch.arange(num_rows, device=self.device)
        rows = values(names, case.pool.hidden, seed_of(case.chosen, number, 2), dtype)
        return rows[0] if case.chosen.bias == "row" else rows

    def close(self) -> None:
        """Give everything back."""
        for ep in self.objects.values():
            ep.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # heaps of graphs do not come from it


@dataclass(frozen=True)
class Case:
    """A round with what was worked out for it."""

    chosen: Round
    pool: Pool
    ep: weft.ExpertParallel
    mine: slice  # this rank's tokens among all
    routings: list[Routing]

    @property
    def form(self) -> Form:
        """Of the rows of its dispatches."""
        return Form(self.chosen.quantize, zero_holes=self.chosen.zero_holes)


def seed_of(chosen: Round, number: int, part: int) -> int:
    """Of a call's data; `part`: 0 rows of a dispatch, 1 of a combine, 2 its bias."""
    return (chosen.seed * 4099 + number) * 3 + part


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
    result |= run_graphs(comm, options, soak.before_call, functools.partial(note, comm, options))
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
            before = int(soak.compared.wrong)
            soak.run(chosen)
            seed += 1
            if int(soak.compared.wrong) != before:  # goes on with the others until they agree to stop
                problems.append(
                    f"rank {soak.comm.rank}: {int(soak.compared.wrong) - before} words: {dataclasses.asdict(chosen)}"
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
    pools = pools_of("cuda") if options.rounds > FEW_ROUNDS else ()
    pools = tuple(dict.fromkeys((*pools, *(GRAPH_POOLS if options.graph_seconds else ()))))
    if pools:
        apart(compile_kernels, facts["arch"], options.ranks, pools, timeout_s=COMPILE_S)
    ranks = weft.spawn(
        run_rank, num_ranks=options.ranks, args=(options,), device=options.device, isolation=options.isolation
    )
    row: dict[str, Any] = {"kind": "soak", **{name: facts[name] for name in ("commit", "machine", "driver", "torch")}}
    row |= {"ranks": options.ranks, "engine": ranks[0]["engine"], "seed": options.seed}
    row |= {"next_seed": max(rank["next_seed"] for rank in ranks), "repeats": options.repeats}
    row |= {"rounds": row["next_seed"] - options.seed}
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
