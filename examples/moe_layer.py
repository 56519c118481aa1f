"""A mixture-of-experts layer on Weft, trained on four ranks of this machine: python examples/moe_layer.py

The experts are torch's grouped GEMM, which reads `offsets` as dispatch gives them, on the device: rows are not copied
or sorted again, and there is no loop over experts. Forward and backward run on CPUs and GPUs unchanged.
"""

import argparse

import torch
from torch.nn import functional

import weft

ALIGNMENT = 8  # grouped GEMMs of weight gradients want groups that start at multiples of 16 bytes


class Experts(torch.nn.Module):
    """`num_local` experts of two layers; rows come grouped by expert."""

    def __init__(self, num_local, hidden, width):
        super().__init__()
        self.up = torch.nn.Parameter((torch.randn(num_local, width, hidden) * hidden**-0.5).bfloat16())
        self.down = torch.nn.Parameter((torch.randn(num_local, hidden, width) * width**-0.5).bfloat16())

    def forward(self, rows, offsets):
        """rows [N, hidden]; expert i has rows offsets[i] to offsets[i + 1], padding rows of zeros included."""
        ends = offsets[1:]
        inner = functional.grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)
        return functional.grouped_mm(functional.silu(inner), self.down.transpose(-2, -1), offs=ends)


class MoE(torch.nn.Module):
    """Every rank holds `num_experts / num_ranks` experts and a copy of the gate. `options`: more of ExpertParallel."""

    def __init__(self, comm, *, hidden, width, num_experts, top_k, max_tokens, **options):
        super().__init__()
        self.ep = weft.ExpertParallel(
            comm, num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens_per_rank=max_tokens, **options
        )
        self.gate = torch.nn.Linear(hidden, num_experts).bfloat16()
        self.experts = Experts(num_experts // comm.num_ranks, hidden, width)

    def forward(self, x):
        """x [T, hidden] bf16, T may differ per rank -> [T, hidden]."""
        weights, idx = self.gate(x).float().softmax(-1).topk(self.ep.top_k)
        r = self.ep.dispatch(x, idx, weights, layout="expert_major", alignment=ALIGNMENT)
        return self.ep.combine(self.experts(r.x, r.offsets), r.handle)


def train(comm, steps=60):
    """Teaches the experts to return what they are given; -> losses. Each rank brings tokens of its own."""
    if comm.device.type == "cuda":
        torch.cuda.set_device(comm.device)
    torch.manual_seed(0)  # the same gate on every rank
    layer = MoE(comm, hidden=256, width=256, num_experts=16, top_k=2, max_tokens=128).to(comm.device)
    optimizer = torch.optim.Adam(layer.experts.parameters(), lr=3e-3)
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(comm.rank)).bfloat16().to(comm.device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (layer(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    print("Each rank's tokens go to the experts of all ranks, which learn to return them: the losses fall.", flush=True)
    for rank, losses in enumerate(weft.spawn(train, num_ranks=options.ranks, device=options.device)):
        print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
