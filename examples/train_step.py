"""Where the time of a training step goes: torchrun --nproc-per-node 2 examples/train_step.py [--device cuda]

One MoE layer with expert parallelism, forward and backward: dispatch (expert_major), three grouped GEMMs with SwiGLU, a
weighted combine. Prints the step's time, that of the experts alone on the same rows, and what is left of it: the
communication that a step pays for. Without torchrun: one rank. On GPUs the GEMMs are torch's grouped ones.
"""

import argparse
import json
import statistics
import time

import torch

import weft


class Experts(torch.nn.Module):
    """This rank's experts, SwiGLU: hidden -> 2 x width -> hidden."""

    def __init__(self, num_local, hidden, width, device, dtype):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.up = torch.nn.Parameter(torch.randn(num_local, hidden, 2 * width, **options) * hidden**-0.5)
        self.down = torch.nn.Parameter(torch.randn(num_local, width, hidden, **options) * width**-0.5)

    def forward(self, x, offsets):
        """x [N, hidden], group e of the rows at offsets[e] .. offsets[e + 1]."""
        gate, value = grouped_matmul(x, self.up, offsets).chunk(2, dim=-1)
        return grouped_matmul(torch.nn.functional.silu(gate) * value, self.down, offsets)


def grouped_matmul(x, weights, offsets):
    """Rows of each group times its matrix; one kernel on GPUs."""
    if x.is_cuda:
        return torch._grouped_mm(x, weights, offs=offsets[1:].to(torch.int32))
    bounds = offsets.tolist()
    parts = [x[begin:end] @ weight for begin, end, weight in zip(bounds, bounds[1:], weights, strict=False)]
    return torch.cat(parts)


def milliseconds(call, device, rounds, warmup=2):
    """The median time of a call; on GPUs by events."""
    times = []
    for _ in range(warmup + rounds):
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[warmup:])


def measure(comm, options):
    """-> milliseconds of the parts on this rank."""
    device, dtype = comm.device, torch.bfloat16
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ep = weft.ExpertParallel(
        comm,
        num_experts=options.experts,
        top_k=options.top_k,
        hidden=options.hidden,
        max_tokens_per_rank=options.tokens,
        num_sms=options.num_sms,
    )
    experts = Experts(options.experts // comm.num_ranks, options.hidden, options.width, device, dtype)
    idx, weights = weft.routing.uniform(
        options.tokens, options.experts, options.top_k, rank=comm.rank, num_ranks=comm.num_ranks
    )
    idx, weights = idx.to(device), weights.to(device).requires_grad_()
    x = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype)
    kept = ep.dispatch(x.detach(), idx, weights.detach(), layout="expert_major", alignment=options.alignment)
    rows, offsets = kept.x.clone().requires_grad_(), kept.offsets.clone()
    grad_rows = torch.randn_like(rows)
    handle = kept.handle
    del kept

    def step():
        r = ep.dispatch(x, idx, weights, layout="expert_major", alignment=options.alignment)
        ep.combine(experts(r.x, r.offsets), r.handle).backward(grad)

    def experts_alone():
        experts(rows, offsets).backward(grad_rows)

    def dispatch():
        ep.dispatch(x.detach(), idx, weights.detach(), layout="expert_major", alignment=options.alignment)

    def combine():
        ep.combine(rows.detach(), handle)

    parts = {"step": step, "experts": experts_alone, "dispatch": dispatch, "combine": combine}
    found = {}
    for name, call in parts.items():
        found[name] = milliseconds(call, device, options.rounds)
        for parameter in (x, weights, rows, *experts.parameters()):
            parameter.grad = None
    ep.check()
    return found


def main():
    """Print a table, or a JSON object of each rank with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--alignment", type=int, default=16)
    parser.add_argument("--num-sms", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with weft.Communicator.from_env(device=options.device) as comm:
        found = measure(comm, options)
        shape = {name: getattr(options, name) for name in ("tokens", "hidden", "width", "experts", "top_k")}
        if options.json:
            print(json.dumps({"kind": "train_step", "rank": comm.rank, **shape, "ms": found}), flush=True)
        elif comm.rank == 0:
            print("Where the time of a training step goes: medians on rank 0, forward and backward.")
            print(f"{comm.num_ranks} ranks on the {comm.engine} engine, {shape}")
            for name, value in found.items():
                print(f"{name:10} {value:9.3f} ms")
            print(f"{'beside':10} {found['step'] - found['experts']:9.3f} ms: the step without its experts")


if __name__ == "__main__":
    main()
