"""Decoding with two micro-batches, each on its way while the other computes: python examples/decode_overlap.py

Every micro-batch has a window of its own. `staged=True` sends and returns; nothing of the call is on the GPU until
`wait()` receives. So the attention of one micro-batch runs while the rows or sums of the other travel, on one stream.
The example prints the time of some layers without the transfers, with one call after the other, and with overlap, on
GPUs in CUDA graphs. Both ways must give the same bits. On CPUs the halves of a call overlap nothing, and it shows.
"""

import argparse
import statistics
import time

import torch
from moe_layer import ALIGNMENT, Experts
from torch.nn import functional

import weft


class Layer:
    """Attention over a KV cache and experts; both micro-batches pass it."""

    def __init__(self, comm, options):
        self.kv_heads, self.head_dim, hidden = options.kv_heads, options.head_dim, options.hidden
        self.ep = weft.ExpertParallel(
            comm,
            num_experts=options.experts,
            top_k=options.top_k,
            hidden=hidden,
            max_tokens_per_rank=options.tokens,
            num_windows=2,
        )
        num_local, columns = options.experts // comm.num_ranks, options.heads * options.head_dim
        picks = comm.num_ranks * options.tokens * options.top_k
        self.dispatch_options = {
            "layout": "expert_major",
            "alignment": ALIGNMENT,
            "capacity": picks + num_local * (ALIGNMENT - 1),  # nothing is dropped
            "mode": "latency",
        }
        with torch.device(comm.device):
            self.to_query = (torch.randn(hidden, columns) * hidden**-0.5).bfloat16()
            self.from_heads = (torch.randn(columns, hidden) * columns**-0.5).bfloat16()
            self.experts = Experts(num_local, hidden, options.width)

    def attention(self, x, keys, values):
        """x [T, H], one new token of each sequence; keys and values [T, heads, context, head_dim] -> [T, H]."""
        query = (normed(x) @ self.to_query).view(len(x), self.kv_heads, -1, self.head_dim)  # heads of a group: as rows
        return functional.scaled_dot_product_attention(query, keys, values).reshape(len(x), -1) @ self.from_heads


class MicroBatch:
    """Sequences that decode together, one token of each at a time."""

    def __init__(self, layer, comm, options, window):
        self.layer, self.window = layer, window
        tokens, device = options.tokens, comm.device
        idx, weights = weft.routing.uniform(
            tokens, options.experts, options.top_k, rank=comm.rank, num_ranks=comm.num_ranks, seed=window
        )
        self.idx, self.weights = idx.to(device), weights.to(device)
        cache = (2, tokens, options.kv_heads, options.context, options.head_dim)
        self.keys, self.values = torch.randn(cache, dtype=torch.bfloat16, device=device)
        self.tokens = torch.randn(tokens, options.hidden, dtype=torch.bfloat16, device=device)
        self.x = self.received = self.sums = None
        self.send_rows(staged=False)
        self.rows, self.offsets = self.received.x, self.received.offsets  # for the time without transfers
        self.begin()

    def begin(self):
        """Back to the first layer."""
        self.x, self.received, self.sums = self.tokens, None, None

    def attend(self):
        """Attention with its residual."""
        self.x = self.x + self.layer.attention(self.x, self.keys, self.values)

    def send_rows(self, *, staged):
        """Tokens to their experts; staged: on their way when it returns."""
        x = self.tokens if self.x is None else self.x
        self.received = self.layer.ep.dispatch(
            normed(x), self.idx, self.weights, **self.layer.dispatch_options, staged=staged, window=self.window
        )

    def send_sums(self, *, staged):
        """Receive rows if they are on their way, let the experts work, send what they say."""
        r = self.received.wait()
        y = self.layer.experts(r.x, r.offsets)
        self.sums = self.layer.ep.combine(y, r.handle, mode="latency", staged=staged, window=self.window)
        self.received = None

    def receive_sums(self):
        """The experts' residual."""
        self.x = self.x + (self.sums.wait() if isinstance(self.sums, weft.Staged) else self.sums)
        self.sums = None

    def compute(self):
        """A layer without transfers: rows are those of an earlier dispatch."""
        self.attend()
        self.x = self.x + self.layer.experts(self.rows, self.offsets)[: len(self.x)]


class Step:
    """A decoding step of both micro-batches through a number of layers, in three ways."""

    def __init__(self, comm, options):
        self.layer, self.num_layers = Layer(comm, options), options.layers
        self.batches = [MicroBatch(self.layer, comm, options, window) for window in range(2)]

    def begin(self):
        """Both at the first layer."""
        for batch in self.batches:
            batch.begin()

    def compute_alone(self):
        """No transfers."""
        self.begin()
        for _ in range(self.num_layers):
            for batch in self.batches:
                batch.compute()

    def one_after_the_other(self):
        """Every call receives before anything else starts."""
        self.begin()
        for _ in range(self.num_layers):
            for batch in self.batches:
                batch.attend()
                batch.send_rows(staged=False)
                batch.send_sums(staged=False)
                batch.receive_sums()

    def overlapped(self):
        """While one micro-batch computes, what the other has sent is on its way."""
        self.begin()
        first, second = self.batches
        for number in range(self.num_layers):
            first.attend()  # beside the sums of the second
            first.send_rows(staged=True)
            if number:
                second.receive_sums()
            second.attend()  # beside the rows of the first
            second.send_rows(staged=True)
            first.send_sums(staged=True)  # its experts, beside the rows of the second
            second.send_sums(staged=True)  # its experts, beside the sums of the first
            first.receive_sums()
        second.receive_sums()

    def results(self):
        """x of both."""
        return [batch.x for batch in self.batches]


def normed(x):
    """RMS norm over the hidden dimension."""
    return functional.rms_norm(x, x.shape[-1:])


def captured(call, device):
    """The call as a CUDA graph -> (what runs it, the graph); on a CPU the call itself."""
    call()
    if device.type != "cuda":
        return call, None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use their GPUs meanwhile
        call()
    return graph.replay, graph


def milliseconds(call, device, rounds=15):
    """Of a call: the median, on a GPU between two events of its stream."""
    times = []
    for _ in range(rounds + 2):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


@torch.no_grad()
def measure(comm, options):
    """-> the times on this rank, and whether both ways gave the same bits."""
    torch.manual_seed(comm.rank)
    step = Step(comm, options)
    ways = (step.compute_alone, step.one_after_the_other, step.overlapped)
    times, results, graphs = {}, {}, []
    for way in ways:
        run, graph = captured(way, comm.device)
        times[way.__name__] = milliseconds(run, comm.device)
        results[way.__name__] = [x.clone() for x in step.results()]
        graphs.append(graph)
    ways = zip(results["one_after_the_other"], results["overlapped"], strict=True)
    same = all(torch.equal(first, second) and bool(first.isfinite().all()) for first, second in ways)
    step.layer.ep.check()  # what replays could not raise
    for graph in filter(None, graphs):
        graph.reset()
    step.layer.ep.close()
    return times, same


def main():
    """Start the ranks, print the slowest rank's times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    numbers = {"ranks": 4, "layers": 4, "tokens": 128, "hidden": 7168, "width": 1024, "experts": 64, "top-k": 8}
    numbers |= {"heads": 32, "kv-heads": 4, "head-dim": 128, "context": 2048}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    ranks = weft.spawn(measure, num_ranks=options.ranks, args=(options,), device=options.device)
    slowest = {name: max(times[name] for times, _ in ranks) for name in ranks[0][0]}
    for name, time_ms in slowest.items():
        print(f"{name.replace('_', ' '):20} {time_ms:8.3f} ms")
    one_after_the_other = slowest["one_after_the_other"]
    transfers, saved = one_after_the_other - slowest["compute_alone"], one_after_the_other - slowest["overlapped"]
    print(f"overlap saves {saved:.3f} of {one_after_the_other:.3f} ms, in which transfers take {transfers:.3f} ms")
    if not all(same for _, same in ranks):
        raise SystemExit("the two ways gave different results")


if __name__ == "__main__":
    main()
