"""The same under torchrun, one process a rank: torchrun --nproc-per-node 4 examples/train_torchrun.py"""

from moe_layer import train

import weft

with weft.Communicator.from_env() as comm:
    if comm.rank == 0:
        print(
            "Each rank's tokens go to the experts of all ranks, which learn to return them: the losses fall.",
            flush=True,
        )
    losses = train(comm)
    line = f"rank {comm.rank} of {comm.num_ranks}: loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    print(line + "\n", end="", flush=True)  # in one piece: the ranks share the terminal
