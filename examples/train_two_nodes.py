"""A mixture-of-experts layer, trained with its ranks in two nodes: python examples/train_two_nodes.py

A row crosses to the other node once, however many of its experts are there, and goes on to them inside the node. Going
back, each node adds what its ranks made of a token, and one sum crosses. Here both nodes are on this machine: ranks are
processes, or threads where they share a GPU; there an SM of each rank is the network. The same layer is trained without
nodes, too, with sums in the same order (`sum_domain`): its losses must be the same in every bit.
"""

import torch
from moe_layer import MoE
from options import in_and_without_nodes, isolation, parse, ranks_for_nodes

import weft


def train(comm, options, window):
    """-> losses. The layer learns to return what it is given; each rank brings tokens of its own."""
    layer = MoE(
        comm,
        hidden=options.hidden,
        width=options.width,
        num_experts=options.experts,
        top_k=options.top_k,
        max_tokens=options.tokens,
        **window,
    )
    generator = torch.Generator().manual_seed(comm.rank)  # ranks that are threads share torch's own
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    x = torch.randn(options.tokens, options.hidden, generator=generator).bfloat16().to(comm.device)
    layer.to(comm.device)
    optimizer = torch.optim.Adam(layer.experts.parameters(), lr=3e-3)
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = (layer(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    layer.ep.close()
    return losses


def both(comm, options):
    """-> losses in nodes, and without."""
    return [train(comm, options, window) for window in in_and_without_nodes(comm.num_ranks)]


ON_GPU = {"ranks": ranks_for_nodes(), "steps": 60, "tokens": 512, "hidden": 1024, "width": 1024}
ON_GPU |= {"experts": 16, "top-k": 4}
ON_CPU = ON_GPU | {"ranks": 4, "tokens": 128, "hidden": 256, "width": 256}


def main():
    """Start the ranks, print their losses."""
    options = parse(__doc__, ON_GPU, ON_CPU, "Rows go over rings between the nodes, as over a network.")
    found = weft.spawn(
        both, num_ranks=options.ranks, args=(options,), device=options.device, isolation=isolation(options)
    )
    for rank, (losses, _) in enumerate(found):
        print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    num_wrong = sum(in_nodes != on_one for in_nodes, on_one in found)
    print(f"Ranks whose losses differ from those without nodes: {num_wrong}")
    if num_wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
