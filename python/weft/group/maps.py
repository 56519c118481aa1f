"""Maps of experts over a communicator: who goes by which, who is handed one, and the change with which one begins."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from weft.call.expert_map import ExpertMap
from weft.call.window import Window
from weft.engine import Choice
from weft.errors import Error, InvalidArgument, InvalidState, PeerLost, rank_list
from weft.group import files
from weft.group.turns import Turns

if TYPE_CHECKING:
    from weft.call.experts import Experts

__all__ = ["Maps", "asked_contract", "key_of", "map_of"]

_Found = TypeVar("_Found")

_LOOK_S = 0.01  # between two looks at what members say
_ASK_S = 1.0  # for one member to answer, at a time
_ASK_ALL_S = 5.0  # for one that has what is asked for
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
        self._offered: list[ExpertMap] = []  # those that this rank has proposed, for whoever comes to their boundary
        self._map_epoch = 0  # up to which the maps of this rank are right; 0: of a rank that is alone
        self._num_set = 0  # set_expert_map in that epoch
        self._lags = False  # behind a change of the membership, until the maps are those of its epoch

    def note_map(self, calls: _Mapped, *, is_set: bool = False) -> None:
        """This object goes by another map: whoever joins is handed it. `is_set`: by set_expert_map on all ranks."""
        self._mapped.add(calls)
        self._num_set += is_set
        entry = next((each for each in self._objects if key_of(each) == _key(calls)), None)
        if entry is not None and calls.experts.map is not None:
            entry["map"] = calls.experts.map._replicas.tolist()
            self._publish_contract()

    def handed_map(self, serial: int, number: int) -> ExpertMap | None:
        """Of the object with this number in this window on a rank that has joined: what the members go by."""
        entry = next((each for each in self._objects if key_of(each) == (serial, number)), None)
        return map_of(entry)

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
        objects = self._living()
        if not objects:
            raise InvalidArgument("expert_map is given, and no ExpertParallel here has num_logical_experts")
        for calls in objects:
            found = calls.experts.check(expert_map)
        self._offered = [*self._offered[1 - _MOST_OFFERED :], found]
        self._publish_contract()
        return found._digest

    def _say_maps(self) -> None:
        """Before a call that may recover: all that take part in that are told which maps this rank has."""
        objects = [
            [_key(calls), calls.experts.map._digest, calls.experts.map._replicas.tolist()]
            for calls in self._living()
            if calls.experts.map is not None
        ]
        offered = [[each._digest, each._replicas.tolist()] for each in self._offered]
        said = {"at": [self._map_epoch, self._num_set], "objects": objects, "offered": offered}
        self._native.set_meeting_text(json.dumps(said).encode())

    def _forget_maps(self) -> None:
        self._map_epoch = self._num_set = 0
        self._publish_contract()

    def _follow_maps(self) -> None:
        """Behind a change of the membership that this rank is in: go by the maps of its epoch, as all do.

        Raises:
            PeerLost: who has them is gone, or does not answer; `recover` brings them.
        """
        epoch = self._native.epoch
        met, texts = self._native.meeting_texts()
        if met > self._map_epoch:
            self._settle_maps(met, [json.loads(texts[rank]) for rank in sorted(texts)])
        if self._living():
            if self._map_epoch < epoch - 1 and not self._take_maps(epoch - 1):
                return  # broken: the next call says so
            hashes = self._native.map_hashes(epoch, epoch) if self._map_epoch < epoch else []
            if any(hashes):
                self._begin_map(hashes[0])
        if epoch > self._map_epoch:
            self._map_epoch, self._num_set = epoch, 0
        self._lags = False
        self._publish_contract()

    def _settle_maps(self, epoch: int, told: list[dict[str, Any]]) -> None:
        """Behind a recovery, by what its ranks have told each other, which is the same on all: the newest map of each
        object, and over these the newest one that was decided since and that one of them has. What none of them has,
        nobody goes by."""
        newest: dict[tuple[int, int], tuple[list[int], list[list[int]]]] = {}
        had: dict[int, list[list[int]]] = {}
        for each in told:
            had.update(each["offered"])
            for key, digest, replicas in each["objects"]:
                had[digest] = replicas
                if tuple(key) not in newest or newest[tuple(key)][0] < each["at"]:
                    newest[tuple(key)] = each["at"], replicas
        for calls in self._living():
            if _key(calls) in newest:
                self._install(calls, _map_from(newest[_key(calls)][1]))
        since = max(each["at"][0] for each in told)
        begun = next((digest for digest in self._native.map_hashes(since + 1, epoch) if digest in had), None)
        if begun is not None:
            self._install_where_it_fits(_map_from(had[begun]))
        self._map_epoch, self._num_set = epoch, 0

    def _take_maps(self, epoch: int) -> bool:
        """Of a rank that was taken in behind this epoch: what was installed in it. Members can't install another one
        before this rank takes part. False: broken."""

        def look(contract: dict[str, Any]) -> dict[str, Any] | None:
            return contract if contract["map_epoch"] >= epoch else None

        contract = self._asked(look)
        if contract is None:
            if self._native.broken():
                return False
            raise PeerLost((), "boundary: no member has said which maps of experts there are; call recover()")
        by_key = {key_of(each): each for each in contract["objects"]}
        for calls in self._living():
            found = map_of(by_key.get(_key(calls)))
            if found is not None:
                self._install(calls, found)
        return True

    def _begin_map(self, digest: int) -> None:
        """What was proposed with a change, at its boundary."""

        def look(contract: dict[str, Any]) -> ExpertMap | None:
            theirs = [*map(map_of, contract["objects"]), *map(_map_from, contract["maps"])]
            return next((each for each in theirs if each is not None and each._digest == digest), None)

        found = next((each for each in self._offered if each._digest == digest), None) or self._asked(look)
        if found is None:
            self._native.raise_if_broken()
            text = f"the map {digest:016x} that was proposed can't be had: who has proposed it does not answer"
            raise PeerLost((), f"boundary: {text}; call recover()")
        self._install_where_it_fits(found)

    def _asked(self, look: Callable[[dict[str, Any]], _Found | None]) -> _Found | None:
        """What the first of the other active ranks has that has it; None: all have answered, or the group is broken, or
        the time is over. One that does not answer holds up nobody for long."""
        end = time.monotonic() + _ASK_ALL_S
        waited = [rank for rank in self._active if rank != self._rank]
        while waited and not self._native.broken() and time.monotonic() < end:
            for rank in list(waited):
                try:
                    contract = asked_contract(self._native, _ASK_S, [rank])
                except PeerLost:
                    waited.remove(rank)
                except Error:
                    continue
                else:
                    found = look(contract)
                    if found is not None:
                        return found
                    waited.remove(rank)
            time.sleep(_LOOK_S)
        return None

    def _living(self) -> list[_Mapped]:
        return [calls for calls in list(self._mapped) if not calls.closed]

    def _install(self, calls: _Mapped, expert_map: ExpertMap) -> None:
        if expert_map != calls.experts.map:
            calls.install_map(expert_map)
            self.note_map(calls)

    def _install_where_it_fits(self, expert_map: ExpertMap) -> None:
        """One that was made since it was proposed may have other experts: that one keeps its own, on all ranks."""
        for calls in self._living():
            with contextlib.suppress(InvalidArgument):
                self._install(calls, calls.experts.check(expert_map))

    def _uncovered(self, active: tuple[int, ...]) -> tuple[int, ...]:
        """Logical experts of any object that none of these ranks has."""
        found: set[int] = set()
        for calls in self._living():
            found.update(calls.experts.uncovered(active))
        return tuple(sorted(found))

    def _made(self) -> dict[str, Any]:
        """Of windows, which this part knows nothing of."""
        return {}

    def _publish_contract(self) -> None:
        contract = {
            "choice": asdict(self._choice), "objects": self._objects, "map_epoch": self._map_epoch,
            "maps": [each._replicas.tolist() for each in self._offered],
            "files": files.digest() if self._native.is_open else "", **self._made(),
        }  # fmt: skip
        self._native.set_contract(json.dumps(contract))


def key_of(entry: dict[str, Any]) -> tuple[int, int]:
    """What tells an object of a contract from others."""
    return entry["serials"][0], entry["numbers"][0]


def map_of(entry: dict[str, Any] | None) -> ExpertMap | None:
    """Of an object of a contract."""
    if entry is None or "map" not in entry:
        return None
    return _map_from(entry["map"])


def _map_from(replicas: list[list[int]]) -> ExpertMap:
    return ExpertMap(torch.tensor(replicas, dtype=torch.int32, device="cpu"))


def _key(calls: _Mapped) -> tuple[int, int]:
    return calls.windows[0].serial, calls.numbers[0]
