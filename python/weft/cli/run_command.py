"""`weft run`: binds this process to the cores and memory of its rank, and becomes another program."""

from __future__ import annotations

from typing import Annotated

import typer

from weft import env
from weft.cli.output import EXIT_USAGE, command_output
from weft.errors import InvalidArgument
from weft.machine.placement import binding, local

_BIND_HELP = "Bind to the cores and the memory near the GPU of this rank, or to its share of the cores."
_RANK_HELP = "This rank among those of the machine; LOCAL_RANK without it."
_RANKS_HELP = "Ranks of this machine; LOCAL_WORLD_SIZE without it."
_COMMAND_HELP = "The program and its arguments, after --."


def run(
    command: Annotated[list[str], typer.Argument(help=_COMMAND_HELP)],
    bind: Annotated[bool, typer.Option("--bind/--no-bind", help=_BIND_HELP)] = True,
    local_rank: Annotated[int | None, typer.Option("--local-rank", metavar="N", min=0, help=_RANK_HELP)] = None,
    local_ranks: Annotated[int | None, typer.Option("--local-ranks", metavar="N", min=1, help=_RANKS_HELP)] = None,
) -> None:
    """Run a program bound to its rank's cores and memory, before CUDA starts in it."""
    with command_output(json_lines=False) as output:
        if bind:
            rank, ranks = env.local_rank()
            rank, ranks = rank if local_rank is None else local_rank, ranks if local_ranks is None else local_ranks
            if rank >= ranks:
                raise InvalidArgument(f"--local-rank is {rank}; allowed are 0 to --local-ranks - 1 = {ranks - 1}")
            placement = local.resolve_before_torch("process", local_rank=rank, num_local_ranks=ranks)
            applied = binding.bind(placement).placement.applied
            output.note(f"weft run: rank {rank} of {ranks}: {'; '.join(applied) or 'nothing to bind'}")
        try:
            env.run_bound(command, bound=bind)
        except OSError as error:
            output.error(error, text=f"{command[0]} can't be started: {error.strerror}")
            raise typer.Exit(EXIT_USAGE) from error
