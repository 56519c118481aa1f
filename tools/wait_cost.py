"""What bounded waits and wait statistics cost small batches: python tools/wait_cost.py [RANKS] > gpu_wait_cost.jsonl

Dispatch (masked, BF16 to FP8) and combine of T = 128, 32 and 8 tokens a rank are captured in CUDA graphs with the
kernels as they are, and with kernels from changed copies of the headers: without the abort poll and the deadline, and
without the statistics. Graphs of all kinds are replayed in turn, so that what drifts falls on all. Prints JSON lines:
`time_us` is the median of the slowest rank, `saved_us` that of its differences from the kernels as they are. Needs a
GPU for each rank, 4 unless said.
"""

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import weft
import weft.gpu
from weft import kernel_paths
from weft.bench.apart import apart
from weft.bench.suite import machine_facts

AS_THEY_ARE = "as they are"
LOOK_AGAIN = "return PauseResult::kLookAgain;\n"
CHANGES = {  # of the kernels: file, and texts with what takes their place
    AS_THEY_ARE: None,
    "no abort poll, no deadline": (
        "weft/sync/block_wait.cuh",
        {
            f"    if (++num_turns_ % kLooks != 0 || ns_since_start() < quiet_ns_) {LOOK_AGAIN}": (
                f"    ++num_turns_;\n    {LOOK_AGAIN}"
            )
        },
    ),
    "no wait statistics": (
        "weft/transport/nvlink.cuh",
        {
            "blockIdx.x == 0 ? &view.words()->waited_ns[peer] : nullptr": "nullptr",
            "&view.host->timeout_ns, blockIdx.x == 0);": "&view.host->timeout_ns, false);",
        },
    ),
}
HIDDEN, EXPERTS, TOP_K, MOST_TOKENS = 7168, 256, 8, 128
CALLS, REPLAYS, SAMPLES, LEFT_OUT = 10, 5, 60, 5
KEPT = []  # what windows use


def copy_of_headers(folder, change):
    """Into `folder`; -> it. Raises ValueError if the text is not there once."""
    shutil.copytree(kernel_paths.compiler_paths()["include"], folder)
    if change is not None:
        name, places = change
        text = (folder / name).read_text()
        for old, new in places.items():
            if text.count(old) != 1:
                raise ValueError(f"{old!r} is {text.count(old)} times in {name}")
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


def captured(call):
    """CALLS of it in a graph -> (graph, what must stay alive: inputs too)."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            kept = None  # one result is alive at a time
            kept = call()
    return graph, (call, kept)


def calls_of(comm, headers, number, tokens):
    """A window of its own with kernels from `headers` -> {op: graph and results}."""
    paths = {**kernel_paths.compiler_paths(), "include": str(headers), "cache": ""}
    kernel_paths.compiler_paths = lambda cache=None: paths
    KEPT.append(dict(weft.gpu._gpus))
    weft.gpu._gpus.clear()
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().to(comm.device)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.to(comm.device)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(comm.device)
    ep = weft.ExpertParallel(
        comm,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens_per_rank=MOST_TOKENS,
        deadline_s=20.0,
        heap_bytes=(64 + 2 * number) << 20,  # windows of equal shape would be shared
    )
    options = {"layout": "masked", "capacity": tokens * comm.num_ranks, "quantize": "fp8"}
    options |= {"max_tokens": tokens, "mode": "latency"}
    r = ep.dispatch(x, ids, weights, **options)
    y = torch.zeros(*r.handle.rows_shape, HIDDEN, dtype=torch.bfloat16, device=comm.device)
    made = {
        "dispatch": captured(lambda: ep.dispatch(x, ids, weights, **options)),
        "combine": captured(lambda: ep.combine(y, r.handle, mode="latency")),
    }
    return ep, made


def run_rank(comm, folders):
    """-> {(op, tokens, kernels): us of each sample}."""
    torch.cuda.set_device(comm.device)
    number, found, kept = 0, {}, []
    for tokens in (MOST_TOKENS, 32, 8):
        graphs = {}
        for kernels, folder in folders.items():
            ep, graphs[kernels] = calls_of(comm, folder, number, tokens)
            kept.append((ep, graphs[kernels]))
            number += 1
        for op in ("dispatch", "combine"):
            events = {kernels: [] for kernels in graphs}
            torch.cuda.synchronize()
            comm.meet(60.0)
            for _ in range(SAMPLES + LEFT_OUT):
                for kernels, made in graphs.items():
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(REPLAYS):
                        made[op][0].replay()
                    end.record()
                    events[kernels].append((begin, end))
            torch.cuda.synchronize()
            for kernels, pairs in events.items():
                each = 1e3 / (CALLS * REPLAYS)
                found[op, tokens, kernels] = [a.elapsed_time(b) * each for a, b in pairs[LEFT_OUT:]]
    comm.meet(60.0)
    for ep, made in kept:
        ep.check()
        for graph, _ in made.values():
            graph.reset()
    return found


def main():
    """Run, print."""
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    print(json.dumps({"kind": "machine", **apart(machine_facts, "cuda")}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folders = {
            kernels: copy_of_headers(Path(folder) / str(number), change)
            for number, (kernels, change) in enumerate(CHANGES.items())
        }
        ranks = weft.spawn(run_rank, num_ranks=num_ranks, args=(folders,), device="cuda")
    slowest = {key: [max(times) for times in zip(*(rank[key] for rank in ranks), strict=True)] for key in ranks[0]}
    for (op, tokens, kernels), times in slowest.items():
        usual = slowest[op, tokens, AS_THEY_ARE]
        saved = statistics.median(as_is - without for as_is, without in zip(usual, times, strict=True))
        row = {"kind": "cost", "ranks": num_ranks, "op": op, "tokens": tokens, "kernels": kernels}
        print(json.dumps({**row, "time_us": statistics.median(times), "saved_us": saved}))


if __name__ == "__main__":
    main()
