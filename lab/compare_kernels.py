"""Times of kernels from several copies of the headers, for a choice between them, as JSON lines:

git archive HEAD~3 include | tar -x -C build
python lab/compare_kernels.py build/include include > gpu_kernels.jsonl

Calls of the public interface are captured in CUDA graphs, one for each copy, and replayed in turn, so that what drifts
falls on all. Ranks are processes with a GPU each, or, with --isolation thread, may share one: their rows then go
through its own memory, and times say nothing about links. docs/benchmarking.md explains the fields.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import weft
import weft.engine
from weft.bench.apart import apart
from weft.bench.facts import machine_facts
from weft.bench.timing import replays_in_turn
from weft.kernels import paths as kernel_paths

HIDDEN, EXPERTS, TOP_K, DEADLINE_S = 7168, 256, 8, 20.0
SAMPLES = 60
Case = dict[str, Any]
CASES: tuple[Case, ...] = (
    {"tokens": 4096, "layout": "rank_major", "quantize": None},
    {"tokens": 4096, "layout": "expert_major", "quantize": None},
    {"tokens": 4096, "layout": "expert_major", "quantize": "fp8"},
    {"tokens": 128, "layout": "masked", "quantize": "fp8"},
    {"tokens": 8, "layout": "masked", "quantize": "fp8"},
)
SMALL_TOKENS = 128  # and fewer: the kernels for small batches
PATHS = kernel_paths.compiler_paths()
Timed = tuple[torch.cuda.CUDAGraph, int, Any]  # calls in it, what it uses
KEPT: list[Any] = []  # what windows use


def use_headers(comm: weft.Communicator, folder: str, is_thread: bool) -> None:
    """Kernels compiled from now on are those of the folder. Collective among threads, who share what is set here."""
    if is_thread:
        comm.meet(DEADLINE_S)
    if not is_thread or comm.rank == 0:
        paths = {**PATHS, "include": folder, "cache": ""}
        kernel_paths.compiler_paths = lambda cache=None: paths
        KEPT.append(dict(weft.engine._gpus))
        weft.engine._gpus.clear()
    if is_thread:
        comm.meet(DEADLINE_S)


def captured(call: Callable[[], Any], num_calls: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """-> graph of so many calls, what must stay alive. As ranks may be threads, not by torch.cuda.graph, which waits
    for the whole GPU.
    """
    kept = call()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(num_calls):
            kept = None  # one result is alive at a time
            kept = call()
        graph.capture_end()
    return graph, (call, kept)


def graphs_of(comm: weft.Communicator, case: Case, number: int) -> tuple[weft.ExpertParallel, dict[str, Timed]]:
    """A window of its own -> {op: graph and what it uses}."""
    tokens, is_small = case["tokens"], case["tokens"] <= SMALL_TOKENS
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().to(comm.device)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.to(comm.device)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(comm.device)
    ep = weft.ExpertParallel(
        comm,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens_per_rank=tokens,
        deadline_s=DEADLINE_S,
        heap_bytes=(64 if is_small else 3500) + number << 20,  # windows of equal shape would be shared
    )
    # Balanced by expert, with some room; else all that may come.
    capacity = tokens * TOP_K * 115 // 100 if case["layout"] == "expert_major" else tokens * comm.num_ranks
    mode = "latency" if is_small else "throughput"
    options = {name: case[name] for name in ("layout", "quantize")} | {"capacity": capacity, "mode": mode}
    r = ep.dispatch(x, ids, weights, max_tokens=tokens, **options)
    y = torch.zeros(*r.handle.rows_shape, HIDDEN, dtype=torch.bfloat16, device=comm.device)
    num_calls = 10 if is_small else 4
    made = {
        "dispatch": captured(lambda: ep.dispatch(x, ids, weights, max_tokens=tokens, **options), num_calls),
        "combine": captured(lambda: ep.combine(y, r.handle, mode=mode), num_calls),
    }
    return ep, {op: (graph, num_calls, kept) for op, (graph, kept) in made.items()}


def times_in_turn(comm: weft.Communicator, graphs: Sequence[Timed]) -> list[list[float]]:
    """Of each graph: us of a call, by sample."""
    timed = [(graph.replay, num_calls) for graph, num_calls, _ in graphs]
    return [times.gpu_us for times in replays_in_turn(timed, samples=SAMPLES, meet=lambda: comm.meet(DEADLINE_S))]


def run_rank(
    comm: weft.Communicator, folders: Sequence[str], cases: Sequence[Case], is_thread: bool
) -> list[dict[str, list[list[float]]]]:
    """-> of each case {op: of each folder the us of each sample}."""
    torch.cuda.set_device(comm.device)
    found = []
    for case_number, case in enumerate(cases):
        made = []
        for number, folder in enumerate(folders):
            use_headers(comm, folder, is_thread)
            made.append(graphs_of(comm, case, case_number * len(folders) + number))
        found.append({op: times_in_turn(comm, [graphs[op] for _, graphs in made]) for op in ("dispatch", "combine")})
        comm.meet(DEADLINE_S)
        for ep, graphs in made:
            ep.check()
            for graph, *_ in graphs.values():
                graph.reset()
            ep.close()
    return found


def rows_of(case: Case, op: str, folders: Sequence[str], of_ranks: Sequence[list[list[float]]]) -> list[Any]:
    """A JSON object for each folder: of each sample the slowest rank, medians."""
    slowest = [[max(times) for times in zip(*of_folder, strict=True)] for of_folder in zip(*of_ranks, strict=True)]
    rows = []
    for folder, times in zip(folders, slowest, strict=True):
        more = statistics.median(mine - first for first, mine in zip(slowest[0], times, strict=True))
        row = {"kind": "kernels", "ranks": len(of_ranks), "op": op, **case, "headers": folder}
        rows.append({**row, "time_us": statistics.median(times), "more_us": more})
    return rows


def main() -> None:
    """Run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("headers", nargs="+", help="folders; the others are compared with the first")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--isolation", choices=("process", "thread"), default="process", help="of the ranks")
    options = parser.parse_args()
    folders = [str(Path(folder).resolve()) for folder in options.headers]
    for folder in folders:
        if not (Path(folder) / "weft" / "kernels").is_dir():
            parser.error(f"{folder} has no weft/kernels; a copy of the folder include is needed")
    print(json.dumps({"kind": "machine", **apart(machine_facts, "cuda")}), flush=True)
    ranks = weft.spawn(
        run_rank,
        num_ranks=options.ranks,
        args=(folders, CASES, options.isolation == "thread"),
        device="cuda",
        isolation=options.isolation,
    )
    for number, case in enumerate(CASES):
        for op in ("dispatch", "combine"):
            for row in rows_of(case, op, options.headers, [rank[number][op] for rank in ranks]):
                print(json.dumps({**row, "isolation": options.isolation}))


if __name__ == "__main__":
    main()
