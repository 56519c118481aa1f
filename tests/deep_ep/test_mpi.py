"""Guards against ranks of MPI that do not find each other, or that keep a communicator after the last buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep_cases as cases
import weft
from weft import deep_ep
from weft.deep_ep import ranks


class Comm:
    """As mpi4py's, of a group of torch; it can't be referred to weakly."""

    __slots__ = ()

    def Get_rank(self) -> int:  # as MPI has it
        return dist.get_rank()

    def Get_size(self) -> int:
        return dist.get_world_size()

    def allgather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(found, value)
        return found


def ranks_of_mpi(comm: weft.Communicator, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, comm.num_ranks), rank=comm.rank, world_size=2)
    given, rank, mpi = cases.make(2), comm.rank, Comm()
    x, ids, weights = given.xs[rank], given.ids[rank], given.weights[rank]
    buffers = [deep_ep.Buffer(None, comm=mpi, explicitly_destroy=True) for _ in range(2)]
    assert buffers[0].comm is buffers[1].comm
    assert (buffers[0].rank, buffers[0].group_size, buffers[0].group) == (rank, 2, None)
    dist.destroy_process_group()  # not used afterwards
    for buffer in buffers:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, given.num_experts)
        recv, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights,
        )  # fmt: skip
        wanted = (in_rank.sum(1)[:, None] * x.float()).bfloat16()
        assert torch.equal(buffer.combine(recv, handle)[0], wanted)
        buffer.destroy()
    assert ranks._of_mpi == {}


def test_ranks_of_mpi(tmp_path: Any) -> None:
    weft.spawn(ranks_of_mpi, 2, (str(tmp_path / "store"),), device="cpu")


WRONG: list[tuple[tuple[Any, ...], str]] = [
    ((0, 0, bytes), "num_ranks is 0"),
    ((2, 2, bytes), "rank is 2"),
    ((-1, 2, bytes), "rank is -1"),
    ((True, 2, bytes), "rank is True"),
    ((0, 1, 7), "allgather is 7"),
    ((0, 1, lambda mine: [mine, mine]), "endpoints of 1 ranks"),
    ((0, 1, lambda mine: ["text"]), "endpoints of 1 ranks"),
    ((0, 1, lambda mine: [mine[1:]]), "endpoints of 1 ranks"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_what_gathers_wrongly_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(weft.InvalidArgument, match=text):
        weft.Communicator.from_allgather(*arguments)


def test_what_fails_to_gather_says_why() -> None:
    def fail(mine: bytes) -> list[bytes]:
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        weft.Communicator.from_allgather(0, 1, fail)
    with weft.Communicator.from_allgather(0, 1, lambda mine: [mine]) as comm:
        assert (comm.rank, comm.num_ranks) == (0, 1)
