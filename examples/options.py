"""Options of the examples: sizes of a real model on GPUs, small ones on CPUs."""

import argparse

import torch


def parse(description, on_gpu, on_cpu, note):
    """-> the options, among them `on_gpu`. Prints what the example shows, and on CPUs `note`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    for name, size in on_gpu.items():
        many = {"nargs": "+"} if isinstance(size, list) else {}
        parser.add_argument(f"--{name}", type=int, help=f"{size} on GPUs, {on_cpu[name]} on CPUs", **many)
    options = parser.parse_args()
    options.on_gpu = options.device != "cpu" and torch.cuda.device_count() > 0
    for name, size in (on_gpu if options.on_gpu else on_cpu).items():
        if getattr(options, name.replace("-", "_")) is None:
            setattr(options, name.replace("-", "_"), size)
    print(description.split(":")[0] + ".", flush=True)
    if not options.on_gpu:
        print(f"On CPUs, with small sizes. {note}", flush=True)
    return options


def isolation(options):
    """Of weft.spawn: ranks that share a GPU are threads, since as processes they would take turns."""
    return "thread" if options.on_gpu and torch.cuda.device_count() < options.ranks else "process"


def ranks_for_nodes():
    """-> how many for two nodes: one on each of several GPUs, four that share one."""
    num_gpus = torch.cuda.device_count()
    return 4 if num_gpus < 2 else min(num_gpus // 2 * 2, 4)


def in_and_without_nodes(num_ranks):
    """-> options of weft.ExpertParallel: ranks in two nodes, and on one that adds in the same order."""
    node_ranks = -(-num_ranks // 2)  # the second may have one fewer
    return {"node_ranks": node_ranks}, {"sum_domain": node_ranks}
