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


def nodes(comm, node_ranks):
    """-> options of weft.ExpertParallel: nodes of so many ranks; GPUs have none yet, but add as they would."""
    return {"node_ranks" if comm.engine == "cpu" else "sum_domain": node_ranks}
