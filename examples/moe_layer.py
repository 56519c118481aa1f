"""A mixture-of-experts layer on Weft, trained on four ranks of this machine: python examples/moe_layer.py"""

import torch

import weft


class MoE(torch.nn.Module):
    """Every rank holds `num_experts / num_ranks` experts and a copy of the gate."""

    def __init__(self, comm, *, hidden, num_experts, top_k, max_tokens):
        super().__init__()
        self.ep = weft.ExpertParallel(
            comm, num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens_per_rank=max_tokens
        )
        self.gate = torch.nn.Linear(hidden, num_experts).bfloat16()
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(hidden, hidden).bfloat16() for _ in range(num_experts // comm.num_ranks)
        )

    def forward(self, x):
        """x [T, hidden] bf16, T may differ per rank -> [T, hidden]."""
        weights, idx = self.gate(x).float().softmax(-1).topk(self.ep.top_k)
        r = self.ep.dispatch(x, idx, weights, layout="expert_major")
        rows = r.x.split(r.num_tokens_per_expert.tolist())
        y = [expert(piece) for expert, piece in zip(self.experts, rows, strict=True)]
        return self.ep.combine(torch.cat(y), r.handle)


def train(comm, steps=50):
    """Teaches the experts to return what they are given; -> losses. Each rank brings tokens of its own."""
    torch.manual_seed(0)  # the same gate on every rank
    layer = MoE(comm, hidden=256, num_experts=16, top_k=2, max_tokens=128)
    optimizer = torch.optim.Adam(layer.experts.parameters(), lr=3e-3)
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (layer(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for rank, losses in enumerate(weft.spawn(train, num_ranks=4)):
        print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
