"""Host time of eager calls in several source trees, as JSON lines; by hand, one GPU is enough:

git worktree add build/before 2d03153
python lab/host_time.py --tree before=build/before --tree after=. > gpu_host_time.jsonl

Trees take turns, each time in processes of their own that import its package; a tree without a native module is built
first. Five objects of a shape are alive, as in a model of five layers, and calls go to them in turn. A time is that
until the call returns; the GPU is waited for between rounds of calls, never in one. Calls have a capacity, so none
waits for counts. lab/README.md explains the fields.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS, ROUND = 5, 20  # objects; calls between two waits for the GPU
SHAPE = {"num_experts": 64, "top_k": 8, "hidden": 2048}
LARGE, SMALL = 512, 32  # tokens
OF_LARGE = {"mode": "throughput", "layout": "rank_major"}
BY_EXPERT = OF_LARGE | {"layout": "expert_major", "alignment": 16}
OF_SMALL = {"mode": "latency", "layout": "masked", "quantize": "fp8"}
# Of each case: tokens, options of dispatch, of combine; "handle": a repeated dispatch, "tracked": with gradients.
CASES = {
    "throughput": (LARGE, OF_LARGE, {}, ""),
    "latency": (SMALL, OF_SMALL, {}, ""),
    "handle": (LARGE, OF_LARGE, {}, "handle"),
    "async_op": (LARGE, OF_LARGE | {"async_op": True}, {"async_op": True}, ""),
    "gradients": (LARGE, BY_EXPERT, {}, "tracked"),
}


# ---- in a process that has the package of one tree, which may be an old one: of Weft only what it has always had


def measure(comm, num_calls):
    """-> {case: {op: median us}} of this rank."""
    import weft

    found = {}
    for name, (tokens, *_) in CASES.items():
        eps = [
            weft.ExpertParallel(comm, **SHAPE, max_tokens_per_rank=tokens, heap_bytes=1 << 30) for _ in range(LAYERS)
        ]
        times = {}
        for number in range(-ROUND, num_calls):  # the first compile, and learn
            if number % ROUND == 0:
                wait(comm)
                comm.meet(100.0)
            one_step(eps[number % LAYERS], name, times if number >= 0 else {})
        wait(comm)
        found[name] = {op: statistics.median(us) for op, us in times.items()}
        for ep in eps:
            ep.check()
            ep.close()
    return found


def one_step(ep, name, times):
    """A dispatch and its combine of a case, and with gradients their backward, noted in `times`."""
    import torch

    tokens, dispatch_options, combine_options, kind = CASES[name]
    x, ids, weights = inputs(ep, tokens)
    if dispatch_options["layout"] == "masked":
        capacity = tokens * ep.num_ranks
    else:
        capacity = tokens * ep.num_ranks * ep.top_k + dispatch_options.get("alignment", 1) * ep.num_experts
    options = dispatch_options | {"capacity": capacity}
    options["max_tokens"] = tokens
    given = x.requires_grad_(kind == "tracked")
    if kind == "handle":
        first = ep.dispatch(given, ids, weights, **options)
        r = timed(times, "dispatch", lambda: ep.dispatch(given, handle=first.handle, mode="throughput"))
    else:
        r = timed(times, "dispatch", lambda: ep.dispatch(given, ids, weights, **options))
    y = r.x if isinstance(r.x, torch.Tensor) else ep.__dict__.setdefault("outputs_of_lab", outputs(ep, r))
    mode = {"mode": dispatch_options["mode"]}
    total = timed(times, "combine", lambda: ep.combine(y, r.handle, **mode, **combine_options))
    if kind == "tracked":
        grad = torch.ones_like(total)
        timed(times, "backward", lambda: total.backward(grad))


def inputs(ep, tokens, made={}):  # noqa: B006
    """Of a shape, always the same tensors; x is a new view, for gradients."""
    import torch

    if tokens not in made:
        generator = torch.Generator().manual_seed(ep.comm.rank)
        x = torch.randn(tokens, ep.hidden, generator=generator).bfloat16()
        ids = torch.rand(tokens, ep.num_experts, generator=generator).topk(ep.top_k).indices
        weights = torch.rand(tokens, ep.top_k, generator=generator)
        made[tokens] = tuple(each.to(ep.device) for each in (x, ids, weights))
    x, ids, weights = made[tokens]
    return x.detach(), ids, weights


def outputs(ep, r):
    """What experts made of quantised rows."""
    import torch

    return torch.zeros(*r.handle.rows_shape, ep.hidden, dtype=torch.bfloat16, device=ep.device)


def timed(times, op, call):
    """The call's result; its us are noted."""
    begin = time.perf_counter()
    result = call()
    times.setdefault(op, []).append((time.perf_counter() - begin) * 1e6)
    return result


def wait(comm):
    """For the GPU."""
    if comm.device.type == "cuda":
        import torch

        torch.cuda.synchronize(comm.device)


def measure_here(options):
    """Print of each case and op the slowest rank, and which package was measured."""
    import weft

    ranks = weft.spawn(measure, options.ranks, (options.calls,), options.device)
    found = {name: {op: max(rank[name][op] for rank in ranks) for op in ranks[0][name]} for name in ranks[0]}
    print(json.dumps({"package": str(Path(weft.__file__).parent), "found": found}))


# ---- the parent, which imports none of them


def build(tree):
    """The native module beside the sources, if there is none."""
    if not [*(tree / "python" / "weft").glob("_native*.so")]:
        with tempfile.TemporaryDirectory() as folder:
            module = ["-S", tree, "-B", folder, "-G", "Ninja", f"-DWEFT_MODULE_DIR={tree}/python/weft"]
            for command in (["cmake", *module, f"-DPython_EXECUTABLE={sys.executable}"], ["cmake", "--build", folder]):
                subprocess.run(command, check=True, stdout=sys.stderr)


def measured(tree, options):
    """{case: {op: us}} of a tree, in processes of its own."""
    numbers = ["--ranks", str(options.ranks), "--calls", str(options.calls), "--device", options.device]
    command = [sys.executable, __file__, "--measure", *numbers]
    environment = {**os.environ, "PYTHONPATH": str(tree / "python")}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=options.limit
    )
    result = json.loads(done.stdout.splitlines()[-1])
    if Path(result["package"]) != tree / "python" / "weft":
        raise SystemExit(f"{result['package']} was measured in place of that of {tree}")
    return result["found"]


def tree_of(text):
    """`name=folder`."""
    name, folder = text.split("=", 1)
    return name, Path(folder).resolve()


def main():
    """Run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", default=[], type=tree_of, help="name=folder; several take turns")
    parser.add_argument("--ranks", type=int, default=1, help="processes, with a GPU each")
    parser.add_argument("--rounds", type=int, default=3, help="how often each tree has its turn")
    parser.add_argument("--calls", type=int, default=400, help="of each case in a turn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a turn of a tree")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure_here(options)
        return
    if not options.tree:
        parser.error("--tree is missing")
    for _, tree in options.tree:
        build(tree)
    turns = {name: [] for name, _ in options.tree}
    for _ in range(options.rounds):
        for name, tree in options.tree:
            turns[name].append(measured(tree, options))
    print(json.dumps({"kind": "machine", **machine()}))
    for name, rounds in turns.items():
        for case, ops in rounds[0].items():
            for op in ops:
                us = [each[case][op] for each in rounds]
                row = {"kind": "host_time", "tree": name, "ranks": options.ranks, "case": case, "op": op}
                print(json.dumps({**row, "host_us": statistics.median(us), "rounds_us": us}))


def machine():
    """As of the package beside this program, in a process of its own."""
    code = "import json; from weft.bench.facts import machine_facts; print(json.dumps(machine_facts('cuda')))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
