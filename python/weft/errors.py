"""Every error Weft raises, and how codes of the native module become them.

All of them derive from `Error` (a RuntimeError), name what was asked for, what was found and the way out, and can be
pickled, so that `weft.spawn` can bring them from a rank to its parent. This module imports neither torch nor the
native module.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "Aborted",
    "CapacityExceeded",
    "CompileError",
    "ControlLost",
    "CudaError",
    "Error",
    "Evicted",
    "InternalError",
    "InvalidArgument",
    "InvalidState",
    "PeerLost",
    "PeerTimeout",
    "Unsupported",
]


class Error(RuntimeError):
    """Base of every error of Weft."""

    _is_of_all = False  # every rank raises it for the same call


class InvalidArgument(Error, ValueError):
    """An argument was refused before anything was sent: the call may be repeated with a right one while the peers wait.

    The text names the argument, the value given and what is allowed.
    """


class InvalidState(Error):
    """The object can't do this now: it is closed, busy in another thread, used in a forked child, or the handle is
    another one's."""


class Unsupported(Error):
    """A feature this engine or machine does not have.

    Attributes: `feature` asked for, `have` what is there, `need` what it would take; all texts.
    """

    def __init__(self, feature: str, have: str = "", need: str = "", text: str = "") -> None:
        self.feature, self.have, self.need = feature, have, need
        self.text = text or f"{feature} is not supported"
        if have and not text:
            self.text += f": have {have}"
        if need and not text:
            self.text += f"{',' if have else ':'} need {need}"
        super().__init__(self.text)

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, str, str, str]]:
        return type(self), (self.feature, self.have, self.need, self.text)


class CapacityExceeded(Error):
    """Picks beyond `capacity` were dropped on this rank since the last `check()`; or a limit of the system is reached
    (memory, descriptors, threads), which the text names. Attribute: `num_dropped`, 0 for such a limit."""

    def __init__(self, num_dropped: int, text: str = "") -> None:
        self.num_dropped = num_dropped
        self.text = text or (
            f"{num_dropped} picks were dropped on this rank because their rows lay beyond capacity; combine treated "
            "them as absent. Raise capacity, or leave it out for exact sizes"
        )
        super().__init__(self.text)

    def __reduce__(self) -> tuple[type[CapacityExceeded], tuple[int, str]]:
        return type(self), (self.num_dropped, self.text)


class PeerTimeout(Error):
    """Peers did not take part before the deadline; they may only be late. The communicator is broken on every rank
    until `rebuild`.

    Attributes: `op` the operation, `seq` its sequence on the window, `peers` the late ranks.
    """

    def __init__(self, op: str, seq: int, peers: Sequence[int], text: str = "") -> None:
        self.op, self.seq, self.peers = op, seq, tuple(peers)
        self.text = text or (
            f"{op or 'operation'} {seq}: no answer from {rank_list(self.peers)} before the deadline. They are late or "
            "call something else; raise deadline_s if this is expected, else comm.rebuild(ranks) goes on without them"
        )
        super().__init__(self.text)

    def __reduce__(self) -> tuple[type[PeerTimeout], tuple[str, int, tuple[int, ...], str]]:
        return type(self), (self.op, self.seq, self.peers, self.text)


class PeerLost(Error):
    """Ranks died or left. The communicator is broken on every rank until `comm.rebuild(ranks left)`. Attribute:
    `ranks` lost."""

    def __init__(self, ranks: Sequence[int], text: str = "") -> None:
        self.ranks = tuple(ranks)
        self.text = (
            text
            or f"lost {rank_list(self.ranks)}; comm.rebuild(ranks left) goes on without "
            f"{'it' if len(self.ranks) == 1 else 'them'}"
        )
        super().__init__(self.text)

    def __reduce__(self) -> tuple[type[PeerLost], tuple[tuple[int, ...], str]]:
        return type(self), (self.ranks, self.text)


class Aborted(Error):
    """A rank ended the waits of all by `comm.abort(reason)`. The communicator is broken on every rank until
    `comm.rebuild(ranks)`.

    Attributes: `reason` as it was given (one line, cut to 200 bytes), `rank` that called it, -1 if not known.
    """

    def __init__(self, reason: str = "", rank: int = -1, text: str = "") -> None:
        self.reason, self.rank = reason, rank
        self.text = text or (
            f"{f'rank {rank}' if rank >= 0 else 'a rank'} aborted{f': {reason}' if reason else ''}; "
            "comm.rebuild(ranks) goes on"
        )
        super().__init__(self.text)

    def __reduce__(self) -> tuple[type[Aborted], tuple[str, int, str]]:
        return type(self), (self.reason, self.rank, self.text)


class Evicted(Error):
    """The others have gone on without this rank: it is no member any more, and all its calls raise this. Close the
    communicator. Attribute: `epoch` that was decided without it."""

    def __init__(self, epoch: int = 0, text: str = "") -> None:
        self.epoch = epoch
        self.text = text or f"epoch {epoch} was decided without this rank; close() the communicator"
        super().__init__(self.text)

    def __reduce__(self) -> tuple[type[Evicted], tuple[int, str]]:
        return type(self), (self.epoch, self.text)


class ControlLost(Error):
    """The store in which ranks of several machines decide who belongs to the group did not answer: nothing was decided
    by this rank, and no membership changes until it answers. `rebuild` or `recover` may be called again; `close`
    works."""


class CompileError(Error):
    """A kernel could not be compiled."""


class CudaError(Error):
    """The CUDA driver refused a call."""


class InternalError(Error):
    """A broken promise inside Weft: please report it with its text."""


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1`: the words used in every text."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


def from_native(code: int, text: str, op: str = "", seq: int = 0, peers: Sequence[int] = (), reason: str = "") -> Error:
    """The exception of a native error code (src/base/status.h, `ErrorCode`). Unknown codes are internal errors."""
    if code == 3:
        return Unsupported(text, text=text)  # native texts are whole sentences
    if code == 4:
        full = CapacityExceeded(0, text)
        full._is_of_all = bool(op)
        return full
    if code == 5:
        return PeerTimeout(op, seq, peers, text)
    if code == 6:
        return PeerLost(peers, text)
    if code == 10:
        return Aborted(reason, peers[0] if peers else -1, text)
    if code == 11:
        return Evicted(seq, text)
    plain: dict[int, type[Error]] = {
        1: InvalidArgument,
        2: InvalidState,
        7: CompileError,
        8: CudaError,
        9: InternalError,
        12: ControlLost,
    }
    error = plain.get(code, InternalError)(text)
    error._is_of_all = bool(op)  # what an operation found; before it there is none
    return error
