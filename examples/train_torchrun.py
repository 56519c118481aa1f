"""The same under torchrun, one process a rank: torchrun --nproc-per-node 4 examples/train_torchrun.py"""

from moe_layer import train

import weft

with weft.Communicator.from_env() as comm:
    losses = train(comm)
    print(f"rank {comm.rank} of {comm.num_ranks}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
