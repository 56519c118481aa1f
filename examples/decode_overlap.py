"""Decoding with two micro-batches, each on its way while the other computes: python examples/decode_overlap.py

Every micro-batch has a window of its own. `staged=True` sends and returns; `wait()` receives: two short kernels, and
nothing holds an SM in between. One way ("received later") launches both on the stream of the layers, the second when
the other micro-batch has computed. Another ("overlapped") launches both at once on a stream of the micro-batch's own:
rows are in their places earlier, but the kernel that receives waits for the peers beside what computes. The example
prints the times of some layers in CUDA graphs: attention, all that computes, and transfers alone, one call after the
other, and in these two ways; and the time in which the host starts such a graph. All must give the same bits. On CPUs a
call is over when it returns, and it shows.
"""

import contextlib
import statistics
import time

import torch
from moe_layer import ALIGNMENT, Experts
from options import parse
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


class Side:
    """A stream beside that of the layers, whose kernels go first where both have some. Nothing on a CPU."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.is_joined = True

    def behind(self):
        """A block whose calls run on the side, behind what the layers' stream has been given so far."""
        if self.stream is None:
            return contextlib.nullcontext()
        self.is_joined = False
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def join(self):
        """The layers' stream waits for the side, if there is something new."""
        if not self.is_joined:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.is_joined = True


class MicroBatch:
    """Sequences that decode together, one token of each at a time.

    No memory has a new user too early, though two streams use it: what the side reads is kept (`read`) until the
    layers' stream has joined; what the side has made goes before its next call, which comes behind that stream.
    """

    def __init__(self, layer, comm, options, window):
        self.layer, self.window, self.side = layer, window, Side(comm.device)
        tokens, device = options.tokens, comm.device
        idx, weights = weft.routing.uniform(
            tokens, options.experts, options.top_k, rank=comm.rank, num_ranks=comm.num_ranks, seed=window
        )
        self.idx, self.weights = idx.to(device), weights.to(device)
        cache = (2, tokens, options.kv_heads, options.context, options.head_dim)
        self.keys, self.values = torch.randn(cache, dtype=torch.bfloat16, device=device)
        self.tokens = torch.randn(tokens, options.hidden, dtype=torch.bfloat16, device=device)
        self.x = self.read = self.received = self.sums = None
        self.dispatch()
        self.rows, self.offsets = self.received.x, self.received.offsets  # for the time without transfers
        self.begin()

    def begin(self):
        """Back to the first layer."""
        self.x, self.read, self.received, self.sums = self.tokens, None, None, None

    def attend(self):
        """Attention with its residual."""
        self.x = self.x + self.layer.attention(self.x, self.keys, self.values)

    def dispatch(self):
        """Tokens to their experts."""
        self.received = self._dispatch(normed(self.tokens if self.x is None else self.x), staged=False)

    def work(self):
        """Experts, and sums back to their tokens."""
        r = self.received
        self.sums = self._combine(self.layer.experts(r.x, r.offsets), staged=False)

    def send_rows(self, *, is_beside):
        """The half of `dispatch` that sends; on the side the other, too."""
        self.read = normed(self.x)
        with self.side.behind() if is_beside else contextlib.nullcontext():
            self.received = self._dispatch(self.read, staged=True)
            if is_beside:
                self.received.wait()

    def send_sums(self, *, is_beside):
        """The rows are received when the experts begin; of the way back as of `dispatch`."""
        self.side.join()
        r = self.received.wait()
        self.read = self.layer.experts(r.x, r.offsets)
        with self.side.behind() if is_beside else contextlib.nullcontext():
            self.sums = self._combine(self.read, staged=True)
            if is_beside:
                self.sums.wait()

    def take_sums(self):
        """The experts' residual."""
        self.side.join()
        self.x = self.x + (self.sums.wait() if isinstance(self.sums, weft.Staged) else self.sums)
        self.read = self.received = self.sums = None

    def transfer(self):
        """A layer that only transfers: the rows of an earlier dispatch go back."""
        self.dispatch()
        self._combine(self.rows, staged=False)

    def _dispatch(self, rows, *, staged):
        options = self.layer.dispatch_options
        return self.layer.ep.dispatch(rows, self.idx, self.weights, **options, staged=staged, window=self.window)

    def _combine(self, rows, *, staged):
        handle = self.received.handle
        return self.layer.ep.combine(rows, handle, mode="latency", staged=staged, window=self.window)

    def compute(self):
        """A layer without transfers: rows are those of an earlier dispatch."""
        self.attend()
        self.x = self.x + self.layer.experts(self.rows, self.offsets)[: len(self.x)]


class Step:
    """A decoding step of both micro-batches through a number of layers, in several ways."""

    def __init__(self, comm, options):
        self.layer, self.num_layers = Layer(comm, options), options.layers
        self.batches = [MicroBatch(self.layer, comm, options, window) for window in range(2)]

    def begin(self):
        """Both at the first layer."""
        for batch in self.batches:
            batch.begin()

    def attention(self):
        """Nothing else."""
        self._each("attend")

    def computation(self):
        """No transfers."""
        self._each("compute")

    def transfers(self):
        """Nothing else."""
        self._each("transfer")

    def one_after_the_other(self):
        """Every call receives before anything else starts."""
        self._each("attend", "dispatch", "work", "take_sums")

    def _each(self, *parts):
        self.begin()
        for _ in range(self.num_layers):
            for batch in self.batches:
                for part in parts:
                    getattr(batch, part)()

    def received_later(self):
        """While one micro-batch computes, what the other has sent is on its way, and received behind that."""
        self._in_turn(is_beside=False)

    def overlapped(self):
        """While one micro-batch computes, what the other has sent is on its way, and received on the side."""
        self._in_turn(is_beside=True)

    def _in_turn(self, *, is_beside):
        self.begin()
        first, second = self.batches
        for number in range(self.num_layers):
            first.attend()  # beside the sums of the second
            first.send_rows(is_beside=is_beside)
            if number:
                second.take_sums()
            second.attend()  # beside the rows of the first
            second.send_rows(is_beside=is_beside)
            first.send_sums(is_beside=is_beside)  # its experts, beside the rows of the second
            second.send_sums(is_beside=is_beside)  # its experts, beside the sums of the first
            first.take_sums()
        second.take_sums()

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


def milliseconds(call, device, rounds=15, calls=5):
    """Of a call, back to back, on a GPU between two events of its stream; and of the host until it returns: medians."""
    times, host = [], []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device.type == "cuda" else (None, None)
        call()  # what follows is queued behind it
        if begin is not None:
            begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        host.append((time.perf_counter() - start) / calls * 1e3)
        if end is not None:
            end.record()
            end.synchronize()
        times.append(host[-1] if end is None else begin.elapsed_time(end) / calls)
    return statistics.median(times[2:]), statistics.median(host[2:])


@torch.no_grad()
def measure(comm, options):
    """-> (time, the host's part) of each way on this rank, and whether all with transfers gave the same bits."""
    torch.manual_seed(comm.rank)
    step = Step(comm, options)
    overlaps = (step.received_later, step.overlapped)
    ways = (step.attention, step.computation, step.transfers, step.one_after_the_other, *overlaps)
    times, results, graphs = {}, {}, []
    for way in ways:
        run, graph = captured(way, comm.device)
        times[way.__name__] = milliseconds(run, comm.device, rounds=15 if options.on_gpu else 2)
        results[way.__name__] = [x.clone() for x in step.results()]
        graphs.append(graph)
    pairs = [zip(results["one_after_the_other"], results[way.__name__], strict=True) for way in overlaps]
    same = all(torch.equal(one, other) and bool(one.isfinite().all()) for pair in pairs for one, other in pair)
    step.layer.ep.check()  # what replays could not raise
    for graph in filter(None, graphs):
        graph.reset()
    step.layer.ep.close()
    return times, same


ON_GPU = {"ranks": 4, "layers": 4, "tokens": 128, "hidden": 7168, "width": 1024, "experts": 64, "top-k": 8}
ON_GPU |= {"heads": 32, "kv-heads": 4, "head-dim": 128, "context": 2048}
ON_CPU = ON_GPU | {"layers": 2, "tokens": 16, "hidden": 256, "width": 128, "experts": 16}
ON_CPU |= {"heads": 8, "kv-heads": 2, "head-dim": 32, "context": 128}


def main():
    """Start the ranks, print the slowest rank's times."""
    options = parse(__doc__, ON_GPU, ON_CPU, "CPUs have no graphs, and nothing overlaps there.")
    ranks = weft.spawn(measure, num_ranks=options.ranks, args=(options,), device=options.device)
    slowest = {name: max(times[name][0] for times, _ in ranks) for name in ranks[0][0]}
    for name, time_ms in slowest.items():
        host_ms = max(times[name][1] for times, _ in ranks)
        print(f"{name.replace('_', ' '):20} {time_ms:8.3f} ms, the host {host_ms:.3f} ms")
    before = slowest["one_after_the_other"]
    transfers = before - slowest["computation"]
    for name in ("received_later", "overlapped") if options.on_gpu else ():
        saved = before - slowest[name]
        share = f"{saved / transfers:.0%} of the {transfers:.3f} ms of transfers"
        print(f"{name.replace('_', ' ')}: saves {saved:.3f} of {before:.3f} ms: {share}")
    if not all(same for _, same in ranks):
        raise SystemExit("the ways gave different results")


if __name__ == "__main__":
    main()
