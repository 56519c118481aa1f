"""Maps of experts over a communicator: who goes by which, who is handed one, and the change with which one begins."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft.call.expert_map import ExpertMap
from weft.call.window import Window
from weft.engine import Choice
from weft.errors import Error, InvalidArgument, InvalidState, PeerLost, rank_list
from weft.group.turns import Turns

if TYPE_CHECKING:
    from weft.call.experts import Experts

__all__ = ["Maps", "asked_contract", "key_of", "map_of"]

_LOOK_S = 0.01  # between two looks at what members say
_ASK_S = 1.0  # for one member to answer
_MOST_OFFERED = 4  # maps of proposals that a rank keeps for others


def asked_contract(native: Any, deadline_s: float, of: Sequence[int] = ()) -> dict[str, Any]:
    """What a member says of the group. One that has only just connected has nothing to say yet, and is asked again."""
    end = time.monotonic() + deadline_s
    while not (text := native.ask_contract(max(end - time.monotonic(), 0.001), of)):
        if time.monotonic() > end:
            raise InvalidState("no member has said what its group is")
        time.sleep(_LOOK_S)
    contract: dict[str, Any] = json.loads(text)
    return contract


class _Mapped(Protocol):
    """The calls of an ExpertParallel that goes by a map of experts."""

    closed: bool
    windows: list[Window]
    numbers: list[int]
    experts: Experts

    def install_map(self, expert_map: ExpertMap) -> None: ...


class Maps(Turns):
    """The part of a communicator that has the maps of its objects, and says what a newcomer asks for."""

    _choice: Choice
    _rank: int
    _active: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        # What a rank that joins needs to make its objects alone: each with its arguments, windows and numbers.
        self._objects: list[dict[str, Any]] = []
        self._mapped: weakref.WeakSet[_Mapped] = weakref.WeakSet()  # those that go by a map of experts
        self._has_maps_of_members = True  # not: a rank that has joined, before it has asked
        self._offered: list[ExpertMap] = []  # those that this rank has proposed, for whoever comes to their boundary

    def note_map(self, calls: _Mapped) -> None:
        """This object goes by another map: whoever joins is handed it."""
        self._mapped.add(calls)
        entry = self._object_of(calls)
        if entry is not None and calls.experts.map is not None:
            entry["map"] = calls.experts.map._replicas.tolist()
            self._publish_contract()

    def handed_map(self, serial: int, number: int) -> ExpertMap | None:
        """Of the object with this number in this window on a rank that has joined: what the members go by."""
        entry = next((each for each in self._objects if key_of(each) == (serial, number)), None)
        return map_of(entry)

    def _object_of(self, calls: _Mapped) -> dict[str, Any] | None:
        key = (calls.windows[0].serial, calls.numbers[0])
        return next((each for each in self._objects if key_of(each) == key), None)

    def _note_maps(self, has_maps: bool) -> None:
        """Whether this rank goes by the maps of the members: whoever asks it for them is told so."""
        self._has_maps_of_members = has_maps
        self._publish_contract()

    def _take_maps(self) -> None:
        """Of a rank that was taken in: a member that was there before hands over what is installed by now. Members
        can't install another one before this rank takes part. Nobody waits for a member that is stopped: with no answer
        the maps stay, and the next `recover` asks again."""
        others = [rank for rank in self._active if rank != self._rank]
        num_answers = 0
        for rank in others if self._mapped else ():
            if self._native.broken():
                return
            with contextlib.suppress(Error):
                contract = asked_contract(self._native, _ASK_S, [rank])
                num_answers += 1
                if contract["has_maps"]:
                    self._install_maps(contract)
                    break
        else:
            if self._mapped and num_answers < len(others):
                return
        self._note_maps(True)  # of the members, or, where none has them, of all: what each has

    def _offered_digest(self, expert_map: object, going: Sequence[int], *, together: bool) -> int:
        """Of a map that all objects of this communicator with logical experts may go by; from now on whoever asks this
        rank is handed it. 0: None.

        Raises:
            InvalidArgument: it is none of one of them, or there are none; or comes with together=False or from a rank
                that is to go.
        """
        if expert_map is None:
            return 0
        if not together or self._rank in going:
            raise InvalidArgument(
                f"expert_map with together={together}, without {rank_list(going)}; allowed is together=True, on a rank "
                f"that stays (this one is {self._rank})"
            )
        objects = [calls for calls in list(self._mapped) if not calls.closed]
        if not objects:
            raise InvalidArgument("expert_map is given, and no ExpertParallel here has num_logical_experts")
        for calls in objects:
            found = calls.experts.check(expert_map)
        self._offered = [*self._offered[1 - _MOST_OFFERED :], found]
        self._publish_contract()
        return found._digest

    def _begin_map(self, digest: int, *, is_needed: bool = True) -> None:
        """Of all that take part from this boundary on: what was proposed with the change. Not `is_needed`: of a
        recovery; what nobody has, nobody goes by.

        Raises:
            PeerLost: whoever has it is gone, and this rank goes by another one; `recover` brings it.
        """
        found = self._offered_map(self._offered, digest) or self._asked_map(digest)
        if found is None and not is_needed:
            return
        if found is None:
            self._note_maps(False)
            self._native.raise_if_broken()
            text = f"the map {digest:016x} that was proposed can't be had: who has proposed it does not answer"
            raise PeerLost((), f"boundary: {text}; call recover()")
        for calls in list(self._mapped):
            if not calls.closed:
                calls.install_map(calls.experts.check(found))
                self.note_map(calls)

    def _recover_maps(self, epoch: int) -> None:
        """Behind a recovery of a rank that was in `epoch`: what it was not told, and what has begun with a change that
        it had not come to."""
        if not self._has_maps_of_members:
            self._take_maps()
        digest = self._native.map_since(epoch) if self._mapped else 0
        if digest:
            self._begin_map(digest, is_needed=False)

    def _asked_map(self, digest: int) -> ExpertMap | None:
        for rank in self._active:
            if rank == self._rank:
                continue
            with contextlib.suppress(Error):
                contract = asked_contract(self._native, _ASK_S, [rank])
                theirs = [*map(map_of, contract["objects"]), *(map_of({"map": each}) for each in contract["maps"])]
                found = self._offered_map([each for each in theirs if each is not None], digest)
                if found is not None:
                    return found
        return None

    @staticmethod
    def _offered_map(maps: Sequence[ExpertMap], digest: int) -> ExpertMap | None:
        return next((each for each in maps if each._digest == digest), None)

    def _install_maps(self, contract: dict[str, Any]) -> None:
        by_key = {key_of(each): each for each in contract["objects"]}
        for calls in list(self._mapped):
            found = map_of(by_key.get((calls.windows[0].serial, calls.numbers[0])))
            if found is not None and not calls.closed and found != calls.experts.map:
                calls.install_map(found)
                self.note_map(calls)

    def _uncovered(self, active: tuple[int, ...]) -> tuple[int, ...]:
        """Logical experts of any object that none of these ranks has."""
        found: set[int] = set()
        for calls in list(self._mapped):
            if not calls.closed:
                found.update(calls.experts.uncovered(active))
        return tuple(sorted(found))

    def _publish_contract(self) -> None:
        contract = {
            "choice": asdict(self._choice), "objects": self._objects, "has_maps": self._has_maps_of_members,
            "maps": [each._replicas.tolist() for each in self._offered],
        }  # fmt: skip
        self._native.set_contract(json.dumps(contract))


def key_of(entry: dict[str, Any]) -> tuple[int, int]:
    """What tells an object of a contract from others."""
    return entry["serials"][0], entry["numbers"][0]


def map_of(entry: dict[str, Any] | None) -> ExpertMap | None:
    """Of an object of a contract."""
    if entry is None or "map" not in entry:
        return None
    return ExpertMap(torch.tensor(entry["map"], dtype=torch.int32, device="cpu"))
