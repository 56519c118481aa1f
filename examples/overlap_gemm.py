"""Dispatch beside a GEMM that does not wait for it: python examples/overlap_gemm.py [--device cuda]

Layers have work that needs none of the tokens on their way: a shared expert, or the attention of another microbatch.
With `async_op=True` dispatch runs on a stream of its own, on as many SMs as it is allowed, and the GEMM has the
others. The example prints the time of each alone, of one after the other, and of both at once. A capacity keeps the
host from waiting for counts. On CPUs a call is complete when it returns: nothing overlaps, and the times show that.
"""

import statistics
import time

import torch
from options import parse

import weft


class Layer:
    """Tokens to dispatch, and a shared expert that every token passes."""

    def __init__(self, comm, options):
        tokens, hidden, experts = options.tokens, options.hidden, options.experts
        self.device, dtype = comm.device, torch.bfloat16
        self.ep = weft.ExpertParallel(
            comm, num_experts=experts, top_k=options.top_k, hidden=hidden, max_tokens_per_rank=tokens
        )
        idx, weights = weft.routing.uniform(tokens, experts, options.top_k, rank=comm.rank, num_ranks=comm.num_ranks)
        self.idx, self.weights = idx.to(self.device), weights.to(self.device)
        self.x = torch.randn(tokens, hidden, dtype=dtype, device=self.device)
        self.shared = torch.randn(hidden, options.width, dtype=dtype, device=self.device) * hidden**-0.5
        self.capacity, self.num_sms = comm.num_ranks * tokens, options.num_sms
        self.received = self.y = None

    def dispatch(self, async_op=False):
        """Tokens to the ranks of their experts; with async_op it goes on while this stream does something else."""
        self.received = None  # one result is alive at a time
        self.received = self.ep.dispatch(
            self.x, self.idx, self.weights, capacity=self.capacity, num_sms=self.num_sms, async_op=async_op
        )

    def gemm(self):
        """The shared expert."""
        self.y = self.x @ self.shared

    def one_after_the_other(self):
        """Without overlap."""
        self.dispatch()
        self.gemm()

    def at_once(self):
        """With overlap: what comes next on this stream sees the rows and y."""
        self.dispatch(async_op=True)
        self.gemm()
        self.received.event.wait()


def milliseconds(call, device, rounds=5, calls=10):
    """Of a call: the median over rounds of calls back to back."""
    on_gpu = device.type == "cuda"
    times = []
    for _ in range(rounds + 1):
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times[1:])


def measure(comm, options):
    """-> the four times on this rank, and whether both ways gave the same bits."""
    if comm.device.type == "cuda":
        torch.cuda.set_device(comm.device)
    layer = Layer(comm, options)
    calls = (layer.dispatch, layer.gemm, layer.one_after_the_other, layer.at_once)
    times = {call.__name__: milliseconds(call, comm.device) for call in calls}
    results = []
    for call in (layer.one_after_the_other, layer.at_once):
        call()
        num_rows = int(layer.received.num_rows)
        results.append((layer.received.x[:num_rows].clone(), layer.y.clone()))
    same = all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    layer.received = None
    layer.ep.close()
    return times, same


ON_GPU = {"ranks": 4, "tokens": 4096, "hidden": 7168, "width": 4096, "experts": 256, "top-k": 8, "num-sms": 16}
ON_CPU = ON_GPU | {"tokens": 256, "hidden": 512, "width": 256, "experts": 32}


def main():
    """Start the ranks, print the slowest rank's times."""
    options = parse(__doc__, ON_GPU, ON_CPU, "A call is over when it returns there, so nothing overlaps.")
    ranks = weft.spawn(measure, num_ranks=options.ranks, args=(options,), device=options.device)
    slowest = {name: max(times[name] for times, _ in ranks) for name in ranks[0][0]}
    for name, time_ms in slowest.items():
        print(f"{name.replace('_', ' '):20} {time_ms:8.3f} ms")
    both, hidden = slowest["one_after_the_other"], slowest["one_after_the_other"] - slowest["at_once"]
    share = hidden / min(slowest["dispatch"], slowest["gemm"])
    if options.on_gpu:
        print(f"overlap saves {hidden:.3f} of {both:.3f} ms: {share:.0%} of the shorter of the two is hidden")
    if not all(same for _, same in ranks):
        raise SystemExit("the two ways gave different results")


if __name__ == "__main__":
    main()
