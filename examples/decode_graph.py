"""Decoding steps in CUDA graphs, one for each batch size: python examples/decode_graph.py

A step dispatches the batch, runs the experts as one batched matrix product over [L, C, H], and combines. It is captured
once for each number of tokens; all graphs share one ExpertParallel. Before each replay the batch and its routing are
overwritten where they lie. After each replay the same step runs eagerly on the same inputs, and must give the same
bits. The example prints the time of a step both ways. On CPUs both are the ordinary call.
"""

import statistics
import time

import torch
from options import parse
from torch.nn import functional

import weft


class Decoder:
    """A layer's experts, and the window that all batch sizes share. `mode`: of all calls; `window`: more options of
    ExpertParallel."""

    def __init__(self, comm, options, mode="latency", **window):
        self.comm, self.options, self.mode = comm, options, mode
        self.num_local = options.experts // comm.num_ranks
        self.ep = weft.ExpertParallel(
            comm,
            num_experts=options.experts,
            top_k=options.top_k,
            hidden=options.hidden,
            max_tokens_per_rank=max(options.tokens),
            **window,
        )
        with torch.device(comm.device):
            up = torch.randn(self.num_local, options.hidden, options.width) * options.hidden**-0.5
            down = torch.randn(self.num_local, options.width, options.hidden) * options.width**-0.5
        self.up, self.down = up.bfloat16(), down.bfloat16()

    def experts(self, rows):
        """[L, C, H] -> [L, C, H]; what lies behind an expert's rows is undefined and stays there."""
        return functional.silu(rows @ self.up) @ self.down

    def call_options(self, num_tokens):
        """Of a dispatch of so many tokens a rank: equal on all ranks."""
        tokens = self.comm.num_ranks * num_tokens
        mean = -(-tokens * self.options.top_k // self.options.experts)
        return {"layout": "masked", "capacity": min(tokens, 4 * mean + 8), "max_tokens": num_tokens, "mode": self.mode}


class Batch:
    """So many tokens a rank; x, ids and weights keep their places."""

    def __init__(self, decoder, num_tokens):
        self.decoder, self.num_tokens = decoder, num_tokens
        self.call_options = decoder.call_options(num_tokens)
        hidden, top_k, device = decoder.options.hidden, decoder.options.top_k, decoder.comm.device
        self.x = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device=device)
        self.idx = torch.zeros(num_tokens, top_k, dtype=torch.int64, device=device)
        self.weights = torch.zeros(num_tokens, top_k, device=device)
        self.y = self.graph = None

    def fill(self, seed):
        """Other tokens with another routing."""
        comm, options = self.decoder.comm, self.decoder.options
        idx, weights = weft.routing.uniform(
            self.num_tokens, options.experts, options.top_k, rank=comm.rank, num_ranks=comm.num_ranks, seed=seed
        )
        self.idx.copy_(idx)
        self.weights.copy_(weights)
        self.x.normal_()

    def step(self):
        """-> y [T, H]."""
        ep = self.decoder.ep
        r = ep.dispatch(self.x, self.idx, self.weights, **self.call_options)
        return ep.combine(self.decoder.experts(r.x), r.handle, mode=self.decoder.mode)

    def capture(self):
        """Nothing runs; warmup() and one step have prepared what capturing must not."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.y = self.step()

    def replay(self):
        """The captured step; on a CPU the step."""
        if self.graph is None:
            self.y = self.step()
        else:
            self.graph.replay()
        return self.y


def microseconds(call, device, calls, rounds=5):
    """Of a call: the median over rounds of calls back to back."""
    times = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / calls * 1e3)
        else:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[1:])


@torch.no_grad()
def measure(comm, options):
    """-> {tokens: (us of a replay, us of an eager step)}, and how many replays gave other bits than the eager step."""
    torch.manual_seed(comm.rank)
    decoder = Decoder(comm, options)
    batches = [Batch(decoder, num_tokens) for num_tokens in options.tokens]
    for batch in batches:
        decoder.ep.warmup(**batch.call_options)
        batch.fill(seed=0)
        batch.step()
        if comm.device.type == "cuda":
            batch.capture()
    num_wrong = 0
    for number in range(options.replays):
        batch = batches[number % len(batches)]
        batch.fill(seed=1 + number)
        captured = batch.replay().clone()
        eager = batch.step()
        num_wrong += not (torch.equal(captured, eager) and bool(eager.isfinite().all()))
    calls = 20 if options.on_gpu else 3
    times = {
        batch.num_tokens: tuple(microseconds(call, comm.device, calls) for call in (batch.replay, batch.step))
        for batch in batches
    }
    decoder.ep.check()  # what replays could not raise: dropped picks, bad ids, a lost peer
    for batch in batches:
        if batch.graph is not None:
            batch.graph.reset()
    decoder.ep.close()
    return times, num_wrong


# tokens: batch sizes, one graph each
ON_GPU = {"ranks": 4, "replays": 40, "tokens": [1, 8, 32, 128]}
ON_GPU |= {"hidden": 7168, "width": 1024, "experts": 64, "top-k": 8}
ON_CPU = ON_GPU | {"replays": 9, "hidden": 256, "width": 128, "experts": 16, "tokens": [1, 8, 32]}


def main():
    """Start the ranks, print the slowest rank's times."""
    options = parse(__doc__, ON_GPU, ON_CPU, "CPUs have no graphs: every step runs eagerly.")
    ranks = weft.spawn(measure, num_ranks=options.ranks, args=(options,), device=options.device)
    for num_tokens in ranks[0][0]:
        replay, eager = (max(times[num_tokens][way] for times, _ in ranks) for way in range(2))
        replayed = f"replayed {replay:9.1f} us, " if options.on_gpu else ""
        print(f"{num_tokens:4} tokens: {replayed}eager {eager:9.1f} us")
    num_wrong = sum(wrong for _, wrong in ranks)
    steps = "replays" if options.on_gpu else "repeated steps"
    print(f"{options.replays} {steps} with changing routing on each rank: {num_wrong} differ from the eager step")
    if num_wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
