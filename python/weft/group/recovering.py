"""What a recovery of a group is followed by on this rank, and who is told of changes."""

from __future__ import annotations

from collections.abc import Callable

from weft.errors import InvalidArgument
from weft.group.joining import Joining
from weft.group.membership import Change

__all__ = ["Recovering"]


class Recovering(Joining):
    """The part of a communicator by which it goes on in a new epoch."""

    # Who was active before a recovery that was interrupted behind its new epoch: nobody was told of it yet.
    _unsaid: tuple[int, ...] | None = None

    def on_change(self, fn: Callable[[Change], object]) -> None:
        """Call `fn(change)` after each change of the membership, in the thread that is inside `boundary`, `recover` or
        `rebuild`; what it raises is raised there.

        Raises:
            InvalidArgument: `fn` can't be called.
        """
        if not callable(fn):
            raise InvalidArgument(f"fn is {fn!r}; allowed is a function of a weft.Change")
        self._listeners.append(fn)

    def _tell(self, change: Change) -> None:
        for listener in list(self._listeners):
            listener(change)

    def _begin_epoch(self) -> None:
        self._active = tuple(self._native.active_ranks)
        self._binding.apply()  # to threads that the change has started
        self._num_compared = 0  # the native module adds the epoch to the tag: ranks count alike again
        self._lags = not self._native.is_solo
        if not self._lags:  # suspended: what it installs from now on is its own business
            self._forget_maps()

    def _recover(self, what: str, recover: Callable[[], None]) -> None:
        """`recover` in the native module, and what follows from it. Ctrl-C may come behind the new epoch, which the
        others have begun: then the next call goes on from there, if nobody has been lost since."""
        with self.alone(what):
            if self._unsaid is not None and not self._native.broken():
                return
            epoch = self._native.epoch
            try:
                self._unsaid = self._active if self._unsaid is None else self._unsaid
                self._say_maps()
                recover()
                self._begin_epoch()
                self._follow_maps()
            except Exception:
                self._unsaid = None
                raise
            except BaseException:
                if self._native.epoch == epoch:
                    self._unsaid = None
                else:
                    self._begin_epoch()
                raise

    def _hand_over_recovery(self) -> Change:
        """What a recovery has ended with, to the listeners and the caller."""
        before, self._unsaid = self._unsaid or (), None
        try:
            with self.alone("recover"):
                if self._lags:
                    self._follow_maps()
                gone = {rank for rank, _, _ in self._native.detections()}
            left_out = [rank for rank in before if rank not in self._active]
            change = Change(
                self._native.epoch,
                self._active,
                tuple(rank for rank in left_out if rank in gone),
                tuple(rank for rank in left_out if rank not in gone),
                added=tuple(rank for rank in self._active if rank not in before),
                uncovered=self._uncovered(self._active),
            )
            self._tell(change)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: the next call goes on here
            self._unsaid = before
            raise
        return change
