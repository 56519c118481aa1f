"""The ranks of a group: one communicator for all buffers of this process on it, and small words between them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft import env
from weft.deep_ep.errors import NotSupported, refused
from weft.deep_ep.nodes import Nodes, nodes_of
from weft.engine import to_host
from weft.errors import InvalidArgument, InvalidState, Unsupported
from weft.quantized import Quantized

if TYPE_CHECKING:
    from weft.communicator import Communicator
    from weft.deep_ep.masks import Masks
    from weft.expert_parallel import ExpertParallel

__all__ = ["Ranks", "known_ranks", "options_of_environment", "ranks_of"]

_kept: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
_masked: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()  # of buffers with enable_shrink
_of_mpi: dict[int, Ranks] = {}  # by id of a communicator of MPI, which can't be referred to weakly; Ranks keep it
_of_comm: weakref.WeakKeyDictionary[Any, weakref.ref[Ranks]] = weakref.WeakKeyDictionary()  # Ranks keep their key
_LEAST_WORDS = 8
_DEADLINE_S = 100.0


def ranks_of(group: Any, comm: Any = None, *, can_mask: bool = False) -> Ranks:
    """Of a process group, of a `weft.Communicator` (which stays its owner's), or without a group of `comm`, which has
    Get_rank, Get_size and allgather as mpi4py's. Collective where it is new. `can_mask`: with masks; a communicator of
    its own.

    Raises:
        ValueError: neither `group` nor `comm` is given. InvalidArgument: `comm` lacks one of the three.
        NotSupported: masks on a GPU, of `comm`, or of a `weft.Communicator` without max_ranks.
    """
    if group is None and comm is None:
        raise ValueError("group is None; a torch.distributed process group is expected, or comm= of MPI")
    env.deep_ep()  # what is wrong there is refused before the ranks meet
    if group is None:
        if can_mask:
            raise _no_masks("ranks of MPI", "a torch.distributed group")
        return _ranks_of_mpi(comm)
    found = known_ranks(group, can_mask=can_mask)
    if found is None:
        found = Ranks(group, can_mask=can_mask)
        found.find_nodes(can_mask=can_mask)
        if found.is_owner:
            (_masked if can_mask else _kept)[group] = found
        else:
            _of_comm[group] = weakref.ref(found)
    if can_mask:
        found.allow_masks()
    found.num_users += 1
    return found


def known_ranks(group: Any, *, can_mask: bool = False) -> Ranks | None:
    """Of a group of which there is a buffer; local."""
    known = _of_comm.get(group)
    found = (_masked if can_mask else _kept).get(group) if known is None else known()
    return None if found is None or found.is_closed else found


def _no_masks(of: str, instead: str) -> NotSupported:
    return refused("Buffer(enable_shrink=True)", f"masks are not for {of}", f"use {instead}")


def _ranks_of_mpi(comm: Any) -> Ranks:
    missing = [name for name in ("Get_rank", "Get_size", "allgather") if not callable(getattr(comm, name, None))]
    if missing:
        raise InvalidArgument(f"comm is {type(comm)!r} without {missing[0]}; allowed is a communicator as mpi4py's")
    found = _of_mpi.get(id(comm))
    if found is None or found.is_closed:
        found = Ranks(comm)
        found.find_nodes()
        _of_mpi[id(comm)] = found
    found.num_users += 1
    return found


class Ranks:
    """A communicator, counted: closed with its last buffer, unless it is the caller's."""

    def __init__(self, group: Any, *, can_mask: bool = False, is_owner: bool | None = None) -> None:
        """`is_owner` of a `weft.Communicator` that is closed with the last buffer; None: it is not."""
        from weft.communicator import Communicator  # with all that a call needs

        self.num_users = 0
        self.source = group if hasattr(group, "Get_size") else None
        is_made = not isinstance(group, Communicator)
        self.is_owner = is_made if is_owner is None else is_owner
        self._mail: dict[int, ExpertParallel] = {}
        self.masks: Masks | None = None
        self.made: Any = None  # of all buffers, where ranks come and go
        self.comm = _connect(group, can_mask=can_mask) if is_made else group
        self.rank, self.num_ranks = self.comm.rank, self.comm.num_ranks
        self.device = self.comm.device
        self.nodes = Nodes(self.rank, self.num_ranks, self.num_ranks)

    def find_nodes(self, *, can_mask: bool = False) -> None:
        """Collective where the ranks are on several machines.

        Raises:
            NotSupported, InvalidArgument: as `nodes_of`; several nodes, with masks. What is left is closed.
        """
        try:
            self.nodes = nodes_of(self.comm, env.deep_ep().node_ranks)
            if can_mask:
                self._check_one_node()
        except BaseException:
            if self.is_owner:
                self.comm.close()
            raise

    def _check_one_node(self) -> None:
        if self.nodes.num_nodes > 1:
            raise _no_masks("groups of several nodes", "a group for each node")

    def allow_masks(self) -> Masks:
        """Of all buffers of this communicator that want them.

        Raises:
            NotSupported: nobody can be suspended here.
        """
        from weft.deep_ep.masks import Masks

        self._check_one_node()
        if not self.comm._native.is_open:
            raise _no_masks("a weft.Communicator without max_ranks", "one that was made with max_ranks=")
        if self.masks is None:
            self.masks = Masks(self.comm)
        return self.masks

    def window(self, **arguments: Any) -> ExpertParallel:
        """As `weft.ExpertParallel`, whose arguments it takes. Collective.

        Raises:
            NotSupported: the ranks are on several machines.
        """
        from weft.expert_parallel import ExpertParallel  # with all that a call needs

        try:
            return ExpertParallel(self.comm, **arguments)
        except Unsupported as error:
            if not self.comm.topology.scaleout:
                raise
            raise refused("a call between machines", "no rows cross them yet", "use ranks of one machine") from error

    @property
    def mail(self) -> dict[int, ExpertParallel]:
        """What words go by, by their number."""
        return self._mail

    @property
    def is_closed(self) -> bool:
        """Whether its last buffer is gone."""
        return self.comm._closed

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Around the rest of a buffer's constructor."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """A buffer is gone. Local, never waits."""
        self.num_users -= 1
        if self.num_users > 0:
            return
        if self.masks is not None:
            self.masks.close()
            self.masks = None
        with contextlib.suppress(InvalidState):  # inside a call of another thread: the end of the process closes it
            for each in self._mail.values():
                each.close()
            self._mail.clear()
            if self.is_owner:
                self.comm.close()
        if self.source is not None:
            _of_mpi.pop(id(self.source), None)

    def gather(self, words: Sequence[int], deadline_s: float | None = None) -> list[list[int]]:
        """Equally many int32 words of every rank, by rank. Collective; the host waits."""
        mine = torch.tensor([words], dtype=torch.int32, device=self.device)
        return [row[: len(words)] for row in to_host(self._told(mine, None, deadline_s)).tolist()]

    def gather_tensor(self, words: torch.Tensor, deadline_s: float | None = None) -> torch.Tensor:
        """int32 [n] of every rank -> [R, n]. Collective; the host waits."""
        return self._told(words.to(torch.int32)[None], None, deadline_s)[:, : words.numel()]

    def barrier(self, deadline_s: float | None = None) -> None:
        """Ranks meet on the current stream; on the cpu engine the host waits."""
        self._told(torch.zeros((1, 1), dtype=torch.int32, device=self.device), self.num_ranks, deadline_s)

    def _told(self, mine: torch.Tensor, capacity: int | None, deadline_s: float | None) -> torch.Tensor:
        num_words = max(_LEAST_WORDS, 1 << (mine.shape[1] - 1).bit_length())
        ep = self._mail.get(num_words)
        if ep is None:
            ep = self._mail[num_words] = self.window(
                num_experts=self.num_ranks, top_k=self.num_ranks, hidden=num_words, max_tokens_per_rank=1,
                heap_bytes=0, deadline_s=deadline_s or _DEADLINE_S, node_ranks=self.nodes.node_ranks,
            )  # fmt: skip
        row = torch.zeros((1, num_words), dtype=torch.int32, device=self.device)
        row[:, : mine.shape[1]] = mine
        everyone = torch.arange(self.num_ranks, dtype=torch.int64, device=self.device)[None]
        r = ep.dispatch(Quantized(row.view(torch.uint8)), everyone, capacity=capacity, deadline_s=deadline_s)
        rows: torch.Tensor = r.x.data  # of a Quantized
        return rows.view(torch.int32)


def options_of_environment() -> dict[str, Any]:
    """For constructors of a communicator. The process is bound as placement="process" does, unless WEFT_PLACEMENT says
    otherwise."""
    from weft.group.joining import CONNECT_TIMEOUT_S

    chosen = env.deep_ep()
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    placement = "auto" if env.set_among(["WEFT_PLACEMENT"]) else "process"
    return {"device": device, "placement": placement, "timeout_s": chosen.timeout_s or CONNECT_TIMEOUT_S}


def _connect(group: Any, *, can_mask: bool) -> Communicator:
    """Collective."""
    from weft.communicator import Communicator

    options = options_of_environment()
    if hasattr(group, "Get_size"):
        return Communicator.from_allgather(group.Get_rank(), group.Get_size(), group.allgather, **options)
    if not can_mask:
        return Communicator.from_process_group(group, **options)
    import torch.distributed as dist

    try:
        return Communicator.from_process_group(group, **options, max_ranks=dist.get_world_size(group))
    except Unsupported as error:
        raise _no_masks(str(error), "the cpu engine (WEFT_DEEP_EP_DEVICE=cpu) on one machine") from error
