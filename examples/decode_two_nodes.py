"""Decoding with the ranks in two nodes: python examples/decode_two_nodes.py

Steps of examples/decode_graph.py for several batch sizes, from one ExpertParallel whose ranks are in two nodes and from
one without nodes that adds in the same order (`sum_domain`): their outputs must be the same in every bit. The example
prints the time of a step both ways; here both nodes are on this machine, so this is no time of a network. Both take the
kernels for large batches.
"""

import torch
from decode_graph import Batch, Decoder, microseconds
from options import in_and_without_nodes, isolation, parse, ranks_for_nodes

import weft


@torch.no_grad()
def measure(comm, options):
    """-> {tokens: (us in nodes, us without)}, and how many steps gave other bits."""
    ways = in_and_without_nodes(comm.num_ranks)
    decoders = [Decoder(comm, options, mode="throughput", **window) for window in ways]
    for decoder in decoders:  # the same experts
        decoder.up, decoder.down = decoders[0].up, decoders[0].down
    times, num_wrong = {}, 0
    for num_tokens in options.tokens:
        in_nodes, on_one = (Batch(decoder, num_tokens) for decoder in decoders)
        on_one.x, on_one.idx, on_one.weights = in_nodes.x, in_nodes.idx, in_nodes.weights
        for seed in range(options.steps):
            in_nodes.fill(seed)
            y = in_nodes.step().clone()
            num_wrong += not (torch.equal(y, on_one.step()) and bool(y.isfinite().all()))
        times[num_tokens] = [microseconds(batch.step, comm.device, calls=3) for batch in (in_nodes, on_one)]
    for decoder in decoders:
        decoder.ep.check()
        decoder.ep.close()
    return times, num_wrong


ON_GPU = {"ranks": ranks_for_nodes(), "steps": 8, "tokens": [1, 8, 32, 128]}
ON_GPU |= {"hidden": 4096, "width": 1024, "experts": 32, "top-k": 8}
ON_CPU = ON_GPU | {"ranks": 4, "steps": 3, "hidden": 256, "width": 128, "experts": 16, "tokens": [1, 8, 32]}


def main():
    """Start the ranks, print the slowest rank's times."""
    options = parse(__doc__, ON_GPU, ON_CPU, "Rows go over rings between the nodes, as over a network.")
    ranks = weft.spawn(
        measure, num_ranks=options.ranks, args=(options,), device=options.device, isolation=isolation(options)
    )
    for num_tokens in ranks[0][0]:
        in_nodes, on_one = (max(times[num_tokens][way] for times, _ in ranks) for way in range(2))
        print(f"{num_tokens:4} tokens: in two nodes {in_nodes:9.1f} us, without nodes {on_one:9.1f} us")
    num_wrong = sum(wrong for _, wrong in ranks)
    print(f"{options.steps} steps of each batch size on each rank: {num_wrong} differ")
    if num_wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
