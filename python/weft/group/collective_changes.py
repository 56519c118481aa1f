"""A change of the membership that all active ranks ask for: they come out of it at one boundary."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from weft.errors import Error, InvalidArgument, PeerTimeout
from weft.group.changes import Changes
from weft.group.joining import positive_seconds
from weft.group.membership import Change
from weft.group.ticket import CHANGE_TIMEOUT_S, Ticket
from weft.group.wishes import checked_ranks, left_of, number_of

if TYPE_CHECKING:
    from weft.call.expert_map import ExpertMap

__all__ = ["CollectiveChanges"]

_LOOK_S = 0.002  # between two looks at what is decided
_DECIDE_S = 10.0  # behind the deadline of a change, for its withdrawal
_TURN_S = 0.0002  # between two looks at how far others are
_WANTS_NOTHING, _NOBODY_WANTS = 1, 2  # stages of a rank


class CollectiveChanges(Changes):
    """The part of a communicator by which its ranks change the membership in one call."""

    _changes = 0, 0  # the last call of `change`: in which epoch it began, and which one of that

    def change(
        self,
        admit: Iterable[int] = (),
        remove: Iterable[int] = (),
        suspend: Iterable[int] = (),
        resume: Iterable[int] = (),
        *,
        expert_map: ExpertMap | None = None,
        deadline_s: float = CHANGE_TIMEOUT_S,
    ) -> Change:
        """`propose` and the boundaries up to it, for who has no loop of steps. Collective among the active ranks, like
        `rebuild`: it waits until all of them have called it, and have come to the same boundary. They may want
        different changes, which are carried out one after the other.

        Changes that were decided or proposed before are carried out on the way, at their boundaries; `on_change` tells
        of them, and of those of other ranks. If one of these has done all that is wanted, or has let this rank go, it
        is returned.

        Raises:
            As `propose` and `boundary`. PeerTimeout: somebody was not ready by the deadline; nothing has changed.
        """
        wanted = {
            "admit": sorted(admit), "remove": sorted(remove), "suspend": sorted(suspend), "resume": sorted(resume)
        }  # fmt: skip
        end = time.monotonic() + positive_seconds("deadline_s", deadline_s)
        if self._unsaid is not None:
            self._hand_over_recovery()
        last: Change | None = self.boundary(deadline_s) if self._is_kept() else None
        epoch = self._native.epoch - (last is not None)  # in which the others have called it
        name = f"change {epoch} {list(wanted.values())} {expert_map and expert_map.digest}"
        if last is not None and (self._rank not in last.active or last.id == number_of(name)):
            return last
        for which, ranks in wanted.items():
            checked_ranks(which, ranks, self._num_ranks)
        call = epoch, self._changes[1] + 1 if self._changes[0] == epoch else 1
        others = [rank for rank in self._active if rank != self._rank]
        outcome: Change | Error
        try:
            try:
                outcome = self._own_change(wanted, expert_map, name, last, end)
            except (InvalidArgument, PeerTimeout) as error:  # the others may want something all the same
                if not self._native.is_open or self._native.is_solo or self._native.broken():
                    raise
                outcome = error
            self._changes = call
            after = self._wait_for_others(call, others, end)
        except Error:
            raise
        except BaseException:  # Ctrl-C: nobody waits for this rank
            if self._native.is_open and not self._closed:
                self._show_stages(call)
            raise
        if isinstance(outcome, Error):
            raise outcome
        return outcome if after is None or self._rank in after.active else after

    def _show_stages(self, call: tuple[int, int]) -> None:
        for stage in (_WANTS_NOTHING, _NOBODY_WANTS):
            self._native.show_stage(*call, stage)

    def _wait_for_others(self, call: tuple[int, int], others: list[int], end: float) -> Change | None:
        """Until nobody wants anything of this collective change, and this rank has come as far as any other; the last
        change that was done here. docs/protocols/membership.md has the stages."""
        last: Change | None = None
        stage = 0
        while not self._native.is_solo and self._rank in self._active:
            waited = [rank for rank in others if rank in self._active]
            found = self._native.stages(*call, waited)
            is_next = stage < _NOBODY_WANTS and all(each >= stage for each, _ in found)
            if is_next:
                stage += 1
                self._native.show_stage(*call, stage)
                continue
            newest = max([self._native.epoch, *(each for _, each in found)])
            are_at_end = all(each == _NOBODY_WANTS for each, _ in found)
            if are_at_end and self._native.epoch == newest:
                return last
            if self._native.broken() or time.monotonic() > end:
                return last
            has_closed = any(each == 0 for each, _ in found)  # behind the change that has let it go
            if (stage < _NOBODY_WANTS or are_at_end or has_closed) and self._is_change_due():
                last = self.boundary(max(end - time.monotonic(), 0.001)) or last
            else:
                time.sleep(_TURN_S)
        self._show_stages(call)
        return last

    def _own_change(
        self,
        wanted: dict[str, list[int]],
        expert_map: ExpertMap | None,
        name: str,
        last: Change | None,
        end: float,
    ) -> Change:
        """What this rank wants, and what is carried out before."""
        ticket: Ticket | None = None
        try:
            while True:
                left_s = max(end - time.monotonic(), 0.001)
                if ticket is None and not self._is_undecided():
                    if last is not None:
                        wanted = left_of(wanted, self._active)
                    if last is not None and expert_map is None and not any(wanted.values()):
                        return last
                    ticket = self.propose(*wanted.values(), expert_map=expert_map, id=name, deadline_s=left_s)
                state, _, reason = self._native.await_change(_LOOK_S)
                if self._is_change_due():
                    last = self.boundary(left_s) or last
                    if last is not None and (last.id == number_of(name) or self._rank not in last.active):
                        return last
                elif ticket is not None and state == "committed" and last is not None:
                    return last
                elif (ticket is not None and state == "withdrawn") or time.monotonic() > end + _DECIDE_S:
                    text = f"rank {self._rank}: the change was not decided: {reason or state}"
                    raise PeerTimeout("change", 0, (), text)
                self._native.raise_if_broken()
        except BaseException:
            if ticket is not None and not self._closed:
                ticket.withdraw()
            raise

    def _is_change_due(self) -> bool:
        """Whether a decision waits for a boundary of this rank, or for its `recover`."""
        epoch = self._native.epoch
        return bool(self._native.map_hashes(epoch + 1, epoch + 1))

    def _is_undecided(self) -> bool:
        """An earlier proposal of this rank."""
        return self._ticket is not None and self._ticket.state in ("preparing", "proposed")
