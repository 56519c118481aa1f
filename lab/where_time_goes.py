"""Where the time of small batches goes on the GPU, and that of eager calls on the host, as JSON lines:

python lab/where_time_goes.py [RANKS] > gpu_where_time_goes.jsonl

GPU: kernels from copies of the headers that note the SM's clock at named places into shared memory, and add them up
behind their end, in CUDA graphs. Host: whole calls, and their native part.
docs/benchmarking.md explains the fields.
"""

import functools
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from compare_kernels import captured

import weft
import weft.engine
from weft.bench.apart import apart
from weft.bench.facts import machine_facts
from weft.bench.timing import replays_in_turn, time_calls
from weft.kernels import paths as kernel_paths

DISPATCH, COMBINE = "small/dispatch_entry.cuh", "small/combine_entry.cuh"
RECEIVE = "small/dispatch_receive.cuh"
FIRST, ZERO, END = "the kernel in front has ended", "flight begun: control words read", "end of the block"
NOTIFY_ROWS = """    if (tells(s_.lane)) {
      s_.peers().notify(Phase::kSend, s_.flight, s_.lane, static_cast<i32>(blockIdx.x));
    }
"""
SAY_EARLY = "      if (has_peer(flight)) peers.notify(Phase::kSend, flight, b_.lane, block);\n"
SAY_ALL = "    if (tells(flight)) peers.notify(Phase::kReduce, flight, b_.lane, block);\n"
RUN_COMBINE = (
    "  transport::with_route<kConfig.route>(args, [&] { SmallCombine<kConfig>(args).run(); }, !kConfig.receives);\n"
)
PLACES = {  # of an operation: header, statement, the place in front of it, the place behind it
    "dispatch": (
        (DISPATCH, "  if (threadIdx.x == 0) {  // behind it there is", FIRST, None),
        (DISPATCH, "    if constexpr (kConfig.sends && !kConfig.is_cached) {\n      if (blockIdx.x == 0)", ZERO, None),
        (DISPATCH, "        if (threadIdx.x == 0) send.tell_bad_ids();\n", "picks and weights stored (block 0)", None),
        (DISPATCH, "    ptx::bar_arrive(kStored, kWithOne);\n", "rows stored", None),
        (DISPATCH, NOTIFY_ROWS, None, "headers of rows released"),
        (RECEIVE, "    if (!has_all) shared_words().is_left = true;\n", "picks of all there, counted", None),
        (DISPATCH, "    ptx::bar_sync(kCountHeard, kWithOne);\n", "places found", "count headers heard"),
        (DISPATCH, "    ptx::bar_sync(kSendHeard, kWithOne);\n", "counts written", "headers of rows heard"),
        (DISPATCH, "  if (!state.flight.is_dead) SmallDispatch<kConfig>(state).run();\n", None, END),
    ),
    "combine": (
        (COMBINE, RUN_COMBINE, FIRST, END),
        (COMBINE, "      if (warp_ < kWorkers) send(flight, push);\n", ZERO, None),
        (COMBINE, SAY_EARLY, "early contributions stored", "their headers released"),
        (COMBINE, SAY_ALL, "all contributions stored", "all headers released"),
        (COMBINE, "      if (tell(flight, true, mine) != Verdict::kOk)", "early headers heard", None),
        (COMBINE, "    return tell(flight, false, mine) == Verdict::kOk;\n", "all headers heard", None),
    ),
}
BASES = {"dispatch": "small/dispatch_block.cuh", "combine": "small/combine_block.cuh"}  # that the others include
SLOTS, MOST_BLOCKS = 32, 128
HELPERS = """namespace weft::kernels {

__device__ inline u64* noted() { __shared__ u64 at[SLOTS]; return at; }
__device__ inline void note(i32 place) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) atomicMax(&noted()[place], ptx::cycles());
}
__device__ inline void begin_notes() {
  if (threadIdx.x < SLOTS) noted()[threadIdx.x] = threadIdx.x == 0 ? ptx::cycles() : 0;
}
__device__ inline void end_notes(i32 end) {
  note(end);
  __syncthreads();
  if (threadIdx.x >= SLOTS || noted()[threadIdx.x] == 0 || noted()[ZERO] == 0) return;
  const u64 at = noted()[threadIdx.x], zero = noted()[ZERO];
  u64* sums = reinterpret_cast<u64*>(ADDRESSull) + 2 * (blockIdx.x * SLOTS + threadIdx.x);
  atomicAdd(&sums[0], threadIdx.x == 0 ? zero - at : at - zero);
  atomicAdd(&sums[1], u64{1});
}
"""
HIDDEN, EXPERTS, TOP_K, MOST_TOKENS = 7168, 256, 8, 128
CALLS, SAMPLES, HOST_CALLS, HOST_ROUND = 10, 60, 400, 20
KEPT = []  # what windows use


def places_of(op):
    """Names by slot: FIRST is the first, END the last."""
    inside = [name for _, _, *around in PLACES[op] for name in around if name not in (None, FIRST, ZERO, END)]
    return [FIRST, ZERO, *inside, END]


def noting_headers(folder, op, address):
    """A copy of the headers whose kernels of `op` add up, of each block and place, cycles from ZERO and how many times,
    at an address of the GPU. Raises ValueError if a text is not there once.
    """
    places = places_of(op)
    kernels = Path(shutil.copytree(kernel_paths.compiler_paths()["include"], folder)) / "weft" / "kernels"
    notes = {None: "", FIRST: "begin_notes();\n", END: f"end_notes({places.index(END)});\n"}
    notes = {name: f"note({slot});\n" for slot, name in enumerate(places)} | notes
    helpers = HELPERS.replace("SLOTS", str(SLOTS)).replace("ZERO", str(places.index(ZERO)))
    changes = [(name, text, notes[before] + text + notes[behind]) for name, text, before, behind in PLACES[op]]
    changes.append((BASES[op], "namespace weft::kernels {\n", helpers.replace("ADDRESS", str(address))))
    for name, old, new in changes:
        text = (kernels / name).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is {text.count(old)} times in {name}")
        (kernels / name).write_text(text.replace(old, new))
    return folder


class Layer:
    """Calls of one shape with the default kernels, or with those of a folder of headers."""

    def __init__(self, comm, number, tokens, mode, headers=None):
        if headers is not None:
            paths = {**kernel_paths.compiler_paths(), "include": str(headers), "cache": ""}
            kernel_paths.compiler_paths = lambda cache=None: paths
            KEPT.append(dict(weft.engine._gpus))
            weft.engine._gpus.clear()
        generator = torch.Generator().manual_seed(comm.rank)
        self.x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().to(comm.device)
        self.ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.to(comm.device)
        self.weights = torch.rand(tokens, TOP_K, generator=generator).to(comm.device)
        self.ep = weft.ExpertParallel(
            comm,
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens_per_rank=max(tokens, MOST_TOKENS),
            deadline_s=20.0,
            heap_bytes=(64 + 2 * number << 20) if tokens <= MOST_TOKENS else None,  # none shares another's window
        )
        self.options = {"layout": "masked", "capacity": tokens * comm.num_ranks, "quantize": "fp8"}
        if mode == "throughput":
            self.options = {"layout": "rank_major", "capacity": tokens * comm.num_ranks}
        self.options |= {"mode": mode, "max_tokens": tokens}
        self.r = self.dispatch()
        self.y = torch.zeros(*self.r.handle.rows_shape, HIDDEN, dtype=torch.bfloat16, device=comm.device)

    def dispatch(self):
        """With a capacity."""
        return self.ep.dispatch(self.x, self.ids, self.weights, **self.options)

    def combine(self):
        """Of an ordinary tensor."""
        return self.ep.combine(self.y, self.r.handle, mode=self.options["mode"])

    def repeated_dispatch(self):
        """With the handle of another."""
        return self.ep.dispatch(self.x, handle=self.r.handle, mode=self.options["mode"])

    def async_combine(self):
        """On the stream of the window."""
        return self.ep.combine(self.y, self.r.handle, mode=self.options["mode"], async_op=True)

    def tracked_combine(self):
        """With gradients, whose backward never comes."""
        return self.ep.combine(self.y.requires_grad_(), self.r.handle, mode=self.options["mode"])


def on_the_gpu(comm, folder):
    """-> {(op, tokens): (us of a call, MHz, {place: us from ZERO of each block, NaN if it never is there})}."""
    found, kept, number = {}, [], 0
    for op in PLACES:
        sums = torch.zeros(MOST_BLOCKS, SLOTS, 2, dtype=torch.int64, device=comm.device)
        headers = noting_headers(Path(folder) / f"{comm.rank} {op}", op, sums.data_ptr())
        original = kernel_paths.compiler_paths
        for tokens in (MOST_TOKENS, 32, 8):
            layer = Layer(comm, number, tokens, "latency", headers)
            kernel_paths.compiler_paths, number = original, number + 1
            graph, result = captured(getattr(layer, op), CALLS)
            kept.append((layer, graph, result))
            clock_mhz = torch.cuda.clock_rate(comm.device)
            timed, meet = [(graph.replay, CALLS)], functools.partial(comm.meet, 60.0)
            (times,) = replays_in_turn(timed, samples=SAMPLES, meet=meet, begin=sums.zero_)
            call_us = statistics.median(times.gpu_us)
            blocks = sums[sums[:, 0, 1] > 0].double()
            means = (blocks[..., 0] / blocks[..., 1] / clock_mhz).T.tolist()
            found[op, tokens] = call_us, clock_mhz, dict(zip(places_of(op), means, strict=False))
    KEPT.append(dict(weft.engine._gpus))
    for layer, graph, _ in kept:
        layer.ep.check()
        graph.reset()
    return found


class Timed:
    """A native window that adds up the time in its calls."""

    def __init__(self, native):
        self.native, self.seconds = native, 0.0

    def __getattr__(self, name):
        found = getattr(self.native, name)
        if name not in ("dispatch_first", "dispatch_small", "dispatch_again", "combine_rows"):
            return found

        def timed(*args):
            begin = time.perf_counter()
            result = found(*args)
            self.seconds += time.perf_counter() - begin
            return result

        return timed


def host_us(comm, call):
    """Of a call: mean over calls, of which none finds HOST_ROUND others in front of it on the GPU."""
    options = {"iters": HOST_ROUND, "warmup": 0, "device": comm.device, "meet": lambda: None}
    rounds = [time_calls(call, **options) for _ in range(HOST_CALLS // HOST_ROUND)]
    return statistics.mean(us for times in rounds for us in times.host_us)


def on_the_host(comm):
    """-> {(mode, op): {part: us}}."""
    found = {}
    for number, (mode, tokens) in enumerate((("latency", MOST_TOKENS), ("throughput", 4096))):
        layer = Layer(comm, 40 + number, tokens, mode)
        for op in ("dispatch", "combine", "repeated_dispatch", "async_combine", "tracked_combine"):
            call = getattr(layer, op)
            for _ in range(HOST_ROUND):  # the first may compile
                call()
            whole_us = host_us(comm, call)
            window = layer.ep.calls.windows[0]
            window.native = timed = Timed(window.native)
            host_us(comm, call)
            native_us = timed.seconds / HOST_CALLS * 1e6
            window.native = timed.native
            found[mode, op] = {"host_us": whole_us, "native_us": native_us}
        layer.ep.check()
        layer.ep.close()
    return found


def summary(of_ranks):
    """Of the times of a place in each block of each rank: their mean, and the block where it is largest."""
    means = [statistics.mean(times) for times in zip(*of_ranks, strict=True)]
    there = [(each, block) for block, each in enumerate(means) if each == each]  # without NaN
    if not there:
        return None
    last_us, last = max(there)
    return {"mean_us": statistics.mean(each for each, _ in there), "last_us": last_us, "last_block": last}


def run_rank(comm, folder):
    """The host first: its kernels come from the cache."""
    torch.cuda.set_device(comm.device)
    host = on_the_host(comm)
    return host, on_the_gpu(comm, folder)


def main():
    """Run, print: of each figure the mean over ranks."""
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    print(json.dumps({"kind": "machine", **apart(machine_facts, "cuda")}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ranks = weft.spawn(run_rank, num_ranks=num_ranks, args=(folder,), device="cuda")
    for mode, op in ranks[0][0]:
        parts = {part: statistics.mean(host[mode, op][part] for host, _ in ranks) for part in ranks[0][0][mode, op]}
        print(json.dumps({"kind": "host", "ranks": num_ranks, "mode": mode, "op": op, **parts}))
    for op, tokens in ranks[0][1]:
        calls_us, clocks_mhz, places = zip(*(gpu[op, tokens] for _, gpu in ranks), strict=True)
        row = {"kind": "places", "ranks": num_ranks, "op": op, "tokens": tokens, "time_us": max(calls_us)}
        row |= {"clock_mhz": statistics.mean(clocks_mhz), "blocks": len(places[0][END])}
        summaries = {name: summary([of_rank[name] for of_rank in places]) for name in places[0]}
        row["places"] = [{"place": name, **found} for name, found in summaries.items() if found is not None]
        print(json.dumps(row))


if __name__ == "__main__":
    main()
