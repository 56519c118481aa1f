"""Serving while ranks come and go: python examples/elastic_serving.py

A decode loop grows from two ranks to four, loses one of them by kill -9, goes on with a spare in its place, and shrinks
to two again. Each change moves the experts to whoever is there, and every token of every step is compared with what its
experts make of it. Printed is how long the loop stood still around each change: the time from the end of one step to
that of the next, less the median of all steps. Ranks are processes on CPUs, where the group can grow so far.
"""

import argparse
import os
import signal
import statistics
import time

import torch

import weft

TOP_K, HIDDEN, TOKENS, EXPERTS = 2, 64, 32, 12
FOUNDERS, GROWN, VICTIM, SPARE = (0, 1), (2, 3), 3, 4
GROWS, DIES, SHRINKS, ENDS = range(4)  # what the loop is on its way to


def weights_of(expert):
    """[H, H], as a checkpoint would have them."""
    draw = torch.Generator().manual_seed(expert)
    return torch.randn((HIDDEN, HIDDEN), generator=draw) * HIDDEN**-0.5


class Layer:
    """Experts of one layer, on whichever ranks there are; two of them have room for all."""

    def __init__(self, comm):
        self.comm = comm
        self.ep = weft.ExpertParallel(
            comm,
            num_logical_experts=EXPERTS,
            min_ranks=len(FOUNDERS),
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens_per_rank=TOKENS,
            dtype=torch.float32,
        )
        self.all_weights = torch.stack([weights_of(expert) for expert in range(EXPERTS)])  # to compare with
        self.load(self.ep.expert_map)

    def load(self, expert_map):
        """The weights of the experts that the map has on this rank."""
        first = self.comm.rank * self.ep.num_local_experts
        self.weights = torch.zeros((self.ep.num_local_experts, HIDDEN, HIDDEN))
        for expert, (place,) in enumerate(expert_map.replicas.tolist()):
            if 0 <= place - first < self.ep.num_local_experts:
                self.weights[place - first] = weights_of(expert)

    def spread(self, change):
        """The experts anew over the ranks that are there; the weights are in place before the map counts."""
        expert_map = weft.ExpertMap.spread(EXPERTS, self.ep.num_experts, self.ep.num_ranks, change.active)
        self.load(expert_map)
        self.ep.set_expert_map(expert_map)

    def step(self, number):
        """One token of each sequence of this rank."""
        draw = torch.Generator().manual_seed(1000 * number + self.comm.rank)
        x = torch.randn((TOKENS, HIDDEN), generator=draw)
        weights, idx = torch.randn((TOKENS, EXPERTS), generator=draw).softmax(-1).topk(TOP_K)
        r = self.ep.dispatch(x, idx, weights, layout="expert_major")
        rows = torch.empty_like(r.x)
        for expert, (begin, end) in enumerate(zip(r.offsets[:-1].tolist(), r.offsets[1:].tolist(), strict=True)):
            torch.mm(r.x[begin:end], self.weights[expert], out=rows[begin:end])
        y = self.ep.combine(rows, r.handle)
        wanted = (torch.einsum("th,tkhi->tki", x, self.all_weights[idx]) * weights[..., None]).sum(1)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


class Clock:
    """Times from the end of one step to that of the next, and what happened in between."""

    def __init__(self):
        self.last, self.gaps, self.stops, self.event = time.perf_counter(), [], [], None

    def tick(self):
        """A step has ended."""
        now = time.perf_counter()
        gap, self.last = now - self.last, now
        if self.event is None:
            self.gaps.append(gap)
        else:
            self.stops.append((self.event, gap))
        self.event = None

    def pauses(self):
        """-> (what, milliseconds) for each change, and the median step."""
        median = statistics.median(self.gaps)
        return [(what, (gap - median) * 1e3) for what, gap in self.stops], median * 1e3


def go_on(comm, goal, count, steps):
    """What this rank does for the next change: on an orchestrator's wish, or by accident."""
    if goal == GROWS and comm.rank == 0 and count == steps:
        comm.propose(admit=GROWN)
    if goal == DIES and count >= steps:
        knows_spare = SPARE in comm.membership.standby
        if all(said == b"1" for said in comm.gather(b"1" if knows_spare else b"0").values()) and comm.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
    if goal == SHRINKS and comm.rank == 0 and count == steps:
        comm.propose(remove=[rank for rank in comm.active_ranks if rank not in FOUNDERS])


def serve(comm, steps):
    """The life of a rank -> pauses, the median step and the number of steps that it saw."""
    layer, clock, num_steps, count = Layer(comm), Clock(), 0, 0
    change = None if comm.is_member else comm.boundary()  # a spare waits here until it is needed
    goal = GROWS
    while goal != ENDS or count < steps:
        try:
            if change is None:
                change = comm.boundary()
            if change is not None:
                if comm.rank in change.removed:
                    break
                goal = DIES if VICTIM in change.active else SHRINKS if SPARE in change.active else ENDS
                there = ", ".join(map(str, change.active))
                clock.event = f"{'kill -9' if change.lost else 'a change'}, then ranks {there}"
                layer.spread(change)
                change, count = None, 0
            layer.step(count)
            clock.tick()
            count, num_steps = count + 1, num_steps + 1
            go_on(comm, goal, count, steps)
        except (weft.PeerLost, weft.PeerTimeout) as error:
            change = comm.recover(getattr(error, "peers", ()))  # the spare takes the place of who was lost
    return *clock.pauses(), num_steps


def main():
    """Start two ranks and three spares, and print what rank 0 saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="CPUs, whatever it says.")
    parser.add_argument("--ranks", type=int, default=4, help="4, whatever it says.")
    parser.add_argument("--steps", type=int, default=40, help="Between two changes, at least.")
    options = parser.parse_args()
    print(__doc__.split(":")[0] + ".", flush=True)
    ranks = weft.spawn(serve, len(FOUNDERS), (options.steps,), "cpu", standby=3, on_failure="return")
    failed = {rank: each for rank, each in enumerate(ranks) if isinstance(each, BaseException)}
    if list(failed) != [VICTIM] or not isinstance(failed[VICTIM], weft.PeerLost):
        raise SystemExit(f"failed: {failed}")
    pauses, median_ms, num_steps = ranks[0]
    print(f"ranks 0, 1 begin; a step takes {median_ms:.2f} ms")
    for what, pause_ms in pauses:
        print(f"{what}: paused {pause_ms:.1f} ms")
    print(f"{num_steps} steps of rank 0 with {TOKENS} tokens each, all as their experts make them")


if __name__ == "__main__":
    main()
