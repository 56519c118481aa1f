"""Ranks that join and leave a running group: docs/protocols/joining.md has the protocol."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from weft import _load
from weft.engine import Choice, look
from weft.errors import Error, InvalidArgument, InvalidState, PeerTimeout, Unsupported, rank_list
from weft.group import files
from weft.group.joining import CONNECT_TIMEOUT_S, device_of, positive_seconds
from weft.group.maps import asked_contract
from weft.group.membership import Change
from weft.group.recovering import Recovering
from weft.group.ticket import CHANGE_TIMEOUT_S, Ticket
from weft.group.wishes import checked_ranks, number_of
from weft.limits import MAX_SECONDS
from weft.machine.placement import local
from weft.machine.placement.model import Placement

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from weft.call.expert_map import ExpertMap

__all__ = ["Changes"]

_DECIDE_S = 1.0  # least time of a boundary in leave(): it takes back by itself, and early, what is not decided


class Changes(Recovering):
    """The part of a communicator by which ranks come and go."""

    _ticket: Ticket | None = None
    _num_boundaries = 0  # whose result this rank's caller has
    _last_map = 0, 0  # of the last change with one: its id, and the map's digest

    @classmethod
    def join(
        cls,
        address: str,
        *,
        slot: int | None = None,
        standby: bool = False,
        device: torch.device | str | int | None = None,
        placement: str | Placement = "auto",
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Self:
        """Become a rank of a running group that was made with `max_ranks`: any new process of its user on its machine.
        Nobody else is disturbed.

        Make the objects that the members have, with equal arguments and alone; until the group takes this rank in they
        work with it alone, so a first call can warm up. Then `ready()`, and `boundary()` until it returns a change.

        `address`: `comm.address` of any member. `slot`: the rank to become; None: the lowest free one. `standby`: a
        spare, for `recover(spares=)` of the others or a change that admits it: it makes its objects, and then calls
        `boundary()`, which says by itself that it is ready, again when the group has made its memory anew, and waits as
        long as the group lives. `device`: as in `from_process_group`. `timeout_s`: to connect to every rank.

        Raises:
            InvalidArgument: no address, or another group lives there; the slot is taken; `standby` is no bool;
                `placement`.
            InvalidState: this process is a rank of the group already.
            Unsupported: the group is on another machine, in another pid or network namespace, of another user, version
                of Weft or engine, or its Weft was built from other sources or has other Python files; both values are
                named.
            CapacityExceeded: no slot is free.
            PeerLost: nobody answers at the address. PeerTimeout: a rank did not within `timeout_s`.
        """
        wanted = local.check_placement(placement)
        deadline = time.monotonic() + positive_seconds("timeout_s", timeout_s)
        if not isinstance(address, str):
            raise InvalidArgument(f"address is {address!r}; allowed is a str, comm.address of a rank of the group")
        if slot is not None and (type(slot) is not int or slot < 0):
            raise InvalidArgument(f"slot is {slot!r}; allowed are None and ranks from 0")
        if not isinstance(standby, bool):
            raise InvalidArgument(f"standby is {standby!r}; allowed are True and False")
        where = device_of(device)
        native = _load.native()
        connected = native.Communicator.join(
            address, -1 if slot is None else slot, native.Listener(), max(deadline - time.monotonic(), 0.001)
        )
        try:
            contract = asked_contract(connected, max(deadline - time.monotonic(), 1.0))
            if (theirs := contract.get("files")) != files.digest():
                raise Unsupported(
                    "joining a group that runs other Python files of Weft",
                    f"files of SHA-256 {files.digest()} on this rank, which joins, and {theirs} in the group",
                    "the same files on all ranks",
                )
            choice = Choice(**contract["choice"])
            if choice.engine != "cpu" or look(where, "cpu").engine != "cpu":
                raise Unsupported(f"joining a group on the {choice.engine} engine", "newcomers", "the cpu engine")
            mine = local.resolve(wanted, local_rank=connected.rank, num_local_ranks=connected.num_ranks, device=where)
        except BaseException:
            connected.close()
            raise
        comm = cls(connected, where, f"join, slot {connected.rank}", choice, placement=mine)
        comm._stands_by = standby
        return comm

    # ---- what others need to know

    @property
    def address(self) -> str:
        """For `join`: where the doors of this group are. It holds no secret. Local.

        Raises:
            InvalidState: the group was not made with `max_ranks`, or it is closed.
        """
        self._raise_if_closed("address")
        return self._native.address()

    @property
    def is_member(self) -> bool:
        """False of a rank that has joined and was not taken in yet: its calls are with itself alone."""
        return not self._native.is_solo

    def ready(self, *, deadline_s: float = CHANGE_TIMEOUT_S) -> None:
        """Say to all members that this rank, which has joined, has made its objects: now a change may take it in.

        Raises:
            InvalidState: it is a member already; or members have objects that it has not made, whose windows are named.
            PeerTimeout: a member does not answer.
        """
        seconds = positive_seconds("deadline_s", deadline_s)
        with self.alone("ready"):
            self._native.ready(seconds)
            self._says_ready = True

    # ---- changes

    def propose(
        self,
        admit: Iterable[int] = (),
        remove: Iterable[int] = (),
        suspend: Iterable[int] = (),
        resume: Iterable[int] = (),
        *,
        expert_map: ExpertMap | None = None,
        together: bool = True,
        id: int | str | None = None,
        deadline_s: float = CHANGE_TIMEOUT_S,
    ) -> Ticket:
        """Want ranks to be taken in, all or none, and others let go. Local, returns at once; the members agree while
        they work, and carry it out together at a later `boundary()`, or never.

        `together=False`: ranks of `admit` and `resume` come in as they are ready, by several changes if need be, and
        those of `remove` and `suspend` go with the first of them. The ticket is "committed" when all are in; at
        `deadline_s` it is "withdrawn" and says who came in and who did not.

        `suspend`: active ranks that take no part from then on but keep memory, objects and connections, as a rank does
        that has joined; `resume`: such ranks, taken in again.

        `expert_map`: of all ExpertParallel objects of this communicator with num_logical_experts. They go by it from
        the boundary on that carries the change out, on all ranks; without ranks it is a change by itself. Its digest is
        decided with the change; ranks that were not given it ask one that was, at that boundary. Weights come before.

        On any member; on several of them with one `id`, and then it happens once. Until `deadline_s` it waits for ranks
        that are not there or not `ready()`, and is tried again where it was withdrawn. `Ticket.withdraw()` takes it
        back.

        Raises:
            InvalidArgument: `admit` or `resume` holds active ranks, or `remove` or `suspend` others; or none of the
                active ranks would be left; or `together` is no bool; or `expert_map` is none for one of the objects, or
                comes with together=False or from a rank that is to go.
            InvalidState: an earlier change of this rank is not decided; or the group was not made with `max_ranks`; or
                there were 2**15 changes on the same memory: `recover` on all ranks makes it anew.
        """
        seconds = positive_seconds("deadline_s", deadline_s)
        count = self._num_ranks
        resting = checked_ranks("suspend", suspend, count)
        coming = sorted({*checked_ranks("admit", admit, count), *checked_ranks("resume", resume, count)})
        going = sorted({*checked_ranks("remove", remove, count), *resting})
        if set(self._active) <= set(going):
            raise InvalidArgument(
                f"a change without {rank_list(going)} leaves none of the active ranks, of whom new ones learn where "
                "to begin"
            )
        if not isinstance(together, bool):
            raise InvalidArgument(f"together is {together!r}; allowed are True and False")
        number = number_of(id)
        if id is not None and not together:  # of another rank's wish some may be in
            coming = [rank for rank in coming if rank not in self._active]
        with self.alone("propose"):
            digest = self._offered_digest(expert_map, going, together=together)
            if self._ticket is not None:
                self._ticket._look()  # what became of it: from now on the native module tells of the next one
            if digest and (number, digest) == self._last_map:  # by the proposal of another rank
                return Ticket(self, number, ("committed", self._native.epoch, ""))
            self._native.propose(coming, going, resting, number, seconds, together, digest)
            self._ticket = Ticket(self, number)
        return self._ticket

    def boundary(self, deadline_s: float | None = None) -> Change | None:
        """A place between two steps: every active rank comes here equally often. Does what was decided for it, and says
        what changed; else None. Without a change due it waits for nobody. Where ranks have come here unequally often,
        `dispatch` and `combine` behind the next change raise `InvalidState` with both numbers, on all ranks; `recover`
        lets them count anew.

        A rank that has joined waits here until it is taken in; None: not before `deadline_s` (None: 100 s; with
        `standby` as long as the group lives).

        Interrupted, by Ctrl-C or what else a signal handler raises, it is to be called again: the boundary
        is not passed twice, and a change that was done is told and returned then. A listener that was told already is
        told again where the interruption came behind it.

        After a change handles of earlier dispatches are void; objects, connections and memory stay. A rank that is let
        go finds itself in `removed`: it calls `close()`.

        Raises:
            PeerLost, PeerTimeout, Aborted: the group is broken; `recover`. Of a rank that waits to be taken in:
                PeerLost, all members have ended or closed.
            Evicted: the others have gone on without this rank. ControlLost: no decision by the deadline.
            InvalidState: the group was not made with `max_ranks`; or inside another call; or a spare, or who was
                `ready()`, lacks objects that the group has made since, or that it has closed itself: it makes them,
                too, and comes here again.
            Unsupported: of a rank that waits to be taken in: a heap has grown more than 62 times, so it can't be mapped
                before the group's next `recover`.
        """
        if self._unsaid is not None:
            return self._hand_over_recovery()
        stands_by, native = self._stands_by, self._native
        if deadline_s is None:
            seconds = MAX_SECONDS if stands_by and not self.is_member else CHANGE_TIMEOUT_S
        else:
            seconds = positive_seconds("deadline_s", deadline_s)
        with self.alone("boundary"):
            if native.is_solo:
                self._say_maps()  # a recovery may take it in
            try:
                ended, done = native.boundary(seconds, stands_by or self._says_ready, self._num_boundaries)
                if done is not None:
                    self._begin_epoch()
            except BaseException:  # Ctrl-C may come behind the change: what was decided is done
                if native.epoch > self._map_epoch:
                    self._begin_epoch()
                raise
            if self._lags and (done is None or self._rank in done[5]):
                self._follow_maps()
            if done is None:
                self._num_boundaries = ended
                return None
        return self._hand_over(ended, done)

    def _hand_over(self, ended: int, done: tuple[Any, ...] | None) -> Change | None:
        """What a boundary has ended with, to the listeners and the caller."""
        known, self._num_boundaries = self._num_boundaries, ended
        if done is None:
            return None
        try:
            change = self._done(done)
            self._tell(change)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: the next call goes on here
            self._num_boundaries = known
            raise
        return change

    def _done(self, done: tuple[Any, ...]) -> Change:
        epoch, number, boundary, added, removed, active, digest, waited_us, installed_us = done
        if digest:
            self._last_map = number, digest
        return Change(
            epoch,
            tuple(active),
            (),
            (),
            id=number,
            added=tuple(added),
            removed=tuple(removed),
            boundary=boundary,
            map_digest=f"{digest:016x}" if digest else "",
            uncovered=self._uncovered(tuple(active)),
            timings_us={"waited": waited_us, "installed": installed_us},
        )

    def _is_kept(self) -> bool:
        """Whether a boundary has ended whose call was interrupted: the next call has its result."""
        return self._native.ended_boundary(self._num_boundaries)[0] != self._num_boundaries

    def _tell_kept(self) -> None:
        """Before a recovery, of such a boundary."""
        with self.alone("recover"):
            ended, done = self._native.ended_boundary(self._num_boundaries)
            if done is not None:
                self._begin_epoch()
        self._hand_over(ended, done)

    def leave(self, step: Callable[[], object] | None = None, *, deadline_s: float = CHANGE_TIMEOUT_S) -> Change:
        """Propose that this rank is let go, take part until then, and return; `close()` follows. `step`: this rank's
        part of what the others do between two boundaries; None: nothing.

        Raises:
            As `propose` and `boundary`, and what `step` raises; it is proposed no more then. PeerTimeout: it was not
                decided in time, or no other rank would be left; this rank is a member as before.
        """
        end = time.monotonic() + positive_seconds("deadline_s", deadline_s)
        if self._unsaid is not None:
            self._hand_over_recovery()
        done = self.boundary(deadline_s) if self._is_kept() else None
        if done is not None and self._rank in done.removed:
            return done
        ticket = self.propose(remove=[self._rank], deadline_s=deadline_s)
        try:
            while True:
                done = self.boundary(max(end - time.monotonic(), _DECIDE_S))
                if done is not None and self._rank in done.removed:
                    return done
                if ticket.state == "withdrawn":
                    raise PeerTimeout("leave", 0, (), f"rank {self._rank}: {ticket.reason}")
                if step is not None:
                    step()
        except BaseException:  # also of a step: it stays, unless that was decided
            with contextlib.suppress(Error):
                ticket.withdraw()
            raise

    def _raise_if_closed(self, what: str) -> None:
        if self._closed:
            raise InvalidState(f"{what}: the communicator is closed; make a new one")
