"""Windows that objects of a communicator share: made together by all ranks, found again by their shape."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft import _load
from weft.call.expert_map import ExpertMap
from weft.call.streams import WindowStreams
from weft.call.window import Window, WindowSpec, released_on_error
from weft.engine import Choice, driver_gpu
from weft.errors import Error, InvalidArgument, InvalidState, PeerLost, rank_list
from weft.group.turns import Turns

if TYPE_CHECKING:
    from weft.call.experts import Experts

__all__ = ["Windows"]

_LOOK_S = 0.01  # between two looks at what members have made
_ASK_S = 1.0  # for one member to answer
_COMPARE_TAG = 1 << 22  # exchange tags of constructors: this plus their number; all below 1 << 24


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


class Windows(Turns):
    """The part of a communicator that has its windows."""

    device: torch.device
    _choice: Choice
    _rank: int
    _active: tuple[int, ...]
    _stands_by = False  # joined as a spare

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[WindowSpec, Window] = {}
        self._all_windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self._num_compared = 0
        # What a rank that joins needs to make its objects alone: each with its arguments, windows and numbers.
        self._objects: list[dict[str, Any]] = []
        self._mapped: weakref.WeakSet[_Mapped] = weakref.WeakSet()  # those that go by a map of experts
        self._has_maps_of_members = True  # not: a rank that has joined, before it has asked

    def open_windows(
        self,
        what: str,
        arguments: dict[str, Any],
        specs: Sequence[WindowSpec],
        deadline_s: float,
        tell: Callable[[], dict[str, Any]],
    ) -> tuple[list[Window], list[int], dict[str, Any]]:
        """Compare the arguments of a constructor over all ranks, then share or make its windows, and number the object
        in each. Collective.

        A window is shared only if every rank still has it: closing is local, so ranks may differ in what they have. A
        constructor may also have failed on some ranks: the largest number that a rank proposes is free on all.
        What the first active rank has to `tell` is handed to all.

        Raises:
            InvalidArgument: on every rank, naming the first argument that differs, its values and their ranks.
        """
        with self.telling_peers():
            alone = self.alone(what)
            self._native.check_one_machine(what)
        if self._native.is_solo:
            with alone:
                return self._adopted_windows(what, arguments, specs, deadline_s)
        with alone:
            kept = [self._windows.get(spec) for spec in specs]
            serials = [-1 if window is None or window.closed else window.serial for window in kept]
            told = tell() if self._rank == self._active[0] else None
            objects = [0 if window is None else window.next_object for window in kept]
            message = {"what": what, "arguments": arguments, "serials": serials, "objects": objects, "told": told}
            answers = self._exchange_json(message, deadline_s)
            _compare(answers)
            shared = [list({answer["serials"][idx] for answer in answers.values()}) for idx in range(len(specs))]
            windows: list[Window] = []
            with released_on_error(windows):
                for spec, mine, found in zip(specs, kept, shared, strict=True):
                    window = (
                        mine
                        if mine is not None and len(found) == 1 and found[0] >= 0
                        else self._new_window(spec, deadline_s)
                    )
                    window.num_users += 1
                    windows.append(window)
                numbers = [
                    max(answer["objects"][idx] for answer in answers.values()) if window is kept[idx] else 0
                    for idx, window in enumerate(windows)
                ]
                for window, number in zip(windows, numbers, strict=True):
                    window.next_object = number + 1
            everywhere = answers[self._active[0]]["told"]
            self._note_object(what, arguments, windows, numbers, everywhere)
            return windows, numbers, everywhere

    def _note_object(
        self, what: str, arguments: dict[str, Any], windows: list[Window], numbers: list[int], told: dict[str, Any]
    ) -> None:
        if not self._native.is_open:
            return
        serials = [window.serial for window in windows]
        values = json.loads(json.dumps(arguments))
        self._objects.append({"what": what, "arguments": values, "serials": serials, "numbers": numbers, "told": told})
        self._publish_contract()

    def note_map(self, calls: _Mapped) -> None:
        """This object goes by another map: whoever joins is handed it."""
        self._mapped.add(calls)
        entry = self._object_of(calls)
        if entry is not None and calls.experts.map is not None:
            entry["map"] = calls.experts.map._replicas.tolist()
            self._publish_contract()

    def handed_map(self, serial: int, number: int) -> ExpertMap | None:
        """Of the object with this number in this window on a rank that has joined: what the members go by."""
        entry = next((each for each in self._objects if _key(each) == (serial, number)), None)
        return _map_of(entry)

    def _object_of(self, calls: _Mapped) -> dict[str, Any] | None:
        key = (calls.windows[0].serial, calls.numbers[0])
        return next((each for each in self._objects if _key(each) == key), None)

    def _note_maps(self, has_maps: bool) -> None:
        """Whether this rank goes by the maps of the members: whoever asks it for them is told so."""
        self._has_maps_of_members = has_maps
        self._publish_contract()

    def _take_maps(self) -> None:
        """Of a rank that was taken in: a member that was there before hands over what is installed by now. Members
        can't install another one before this rank takes part. Nobody waits for a member that is stopped: with no answer
        the maps stay, and the next `recover` asks again."""
        others = [rank for rank in self._active if rank != self._rank]
        for rank in others if self._mapped else ():
            if self._native.broken():
                return
            with contextlib.suppress(Error):
                contract = asked_contract(self._native, _ASK_S, [rank])
                if contract["has_maps"]:
                    self._install_maps(contract)
                    break
        else:
            if others and self._mapped:
                return
        self._note_maps(True)

    def _install_maps(self, contract: dict[str, Any]) -> None:
        by_key = {_key(each): each for each in contract["objects"]}
        for calls in list(self._mapped):
            found = _map_of(by_key.get((calls.windows[0].serial, calls.numbers[0])))
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

    def note_closed_object(self, serial: int, number: int) -> None:
        """The object with this number in this window is closed: nobody who joins makes it any more."""
        kept = [each for each in self._objects if _key(each) != (serial, number)]
        if len(kept) < len(self._objects) and not self._closed:
            self._objects = kept
            self._publish_contract()

    def _publish_contract(self) -> None:
        contract = {"choice": asdict(self._choice), "objects": self._objects, "has_maps": self._has_maps_of_members}
        self._native.set_contract(json.dumps(contract))

    def _adopted_windows(
        self, what: str, arguments: dict[str, Any], specs: Sequence[WindowSpec], deadline_s: float
    ) -> tuple[list[Window], list[int], dict[str, Any]]:
        """Of a rank that has joined: those of the members' object with equal arguments that it has not made yet. Not
        collective. Waits while members are about to make it, a spare also for their beginning.

        Raises:
            InvalidArgument: there is none; names the first argument that differs, and both values.
            InvalidState: the members have no object that this rank has not made; of a spare, not by the deadline.
        """
        made = [_key(each) for each in self._objects]
        end = time.monotonic() + deadline_s
        while True:
            of_members = self._objects_of_members(deadline_s)
            found_by = [{_key(each) for each in objects if each["what"] == what} for objects in of_members]
            # On some members only: the others are about to have made it, or these to have closed it.
            everywhere, anywhere = set.intersection(*found_by), set.union(*found_by)
            left = [each for each in of_members[0] if _key(each) in everywhere.difference(made)]
            is_coming = self._stands_by or bool(anywhere - everywhere)
            if left or not is_coming or time.monotonic() > end:
                break
            time.sleep(_LOOK_S)
        if not left:
            raise InvalidState(
                f"{what}: the group has no object of this kind that this rank has not made; members make objects "
                "first, and a rank that joins makes the same"
            )
        values = json.loads(json.dumps(arguments))
        found = next((each for each in left if each["arguments"] == values), None)
        if found is None:
            theirs = left[0]["arguments"]
            name = next(name for name in values if values[name] != theirs.get(name))
            raise InvalidArgument(
                f"{name} is {values[name]} on this rank, which joins, and {theirs.get(name)} in the group. It must be "
                "equal on all ranks"
            )
        windows: list[Window] = []
        with released_on_error(windows):
            for spec, serial in zip(specs, found["serials"], strict=True):
                mine = self._windows.get(spec)
                is_known = mine is not None and not mine.closed and mine.serial == serial
                window = mine if is_known and mine is not None else self._new_window(spec, deadline_s, serial)
                window.num_users += 1
                windows.append(window)
        numbers: list[int] = found["numbers"]
        for window, number in zip(windows, numbers, strict=True):
            window.next_object = max(window.next_object, number + 1)
        told: dict[str, Any] = found["told"]
        self._note_object(what, arguments, windows, numbers, told)
        if "map" in found:
            self._objects[-1]["map"] = found["map"]
        return windows, numbers, told

    def _objects_of_members(self, deadline_s: float) -> list[list[dict[str, Any]]]:
        """What each member says that it has made."""
        found: list[list[dict[str, Any]]] = []
        for rank in self._native.members():
            with contextlib.suppress(PeerLost):
                found.append(asked_contract(self._native, deadline_s, [rank])["objects"])
        if not found:
            raise PeerLost((), "no member of the group answers any more")
        return found

    def compare(self, what: str, arguments: dict[str, Any], deadline_s: float) -> None:
        """Whether all ranks call the same with equal arguments. Collective, inside a turn.

        Raises:
            InvalidArgument: on every rank, naming the first argument that differs, its values and their ranks.
        """
        _compare(self._exchange_json({"what": what, "arguments": arguments}, deadline_s))

    def _told(
        self, what: str, value: Any, deadline_s: float, arguments: dict[str, Any] | None = None
    ) -> dict[int, Any]:
        """What each active rank says in a call that all make, with equal `arguments`. Collective, inside a turn."""
        answers = self._exchange_json({"what": what, "arguments": arguments or {}, "value": value}, deadline_s)
        _compare(answers)
        return {rank: answer["value"] for rank, answer in answers.items()}

    def _exchange_json(self, message: dict[str, Any], deadline_s: float) -> dict[int, dict[str, Any]]:
        payloads = self._exchange_bytes(json.dumps(message).encode(), deadline_s)
        others = [rank for rank, payload in payloads.items() if not payload.startswith(b"{")]
        if others:
            raise InvalidArgument(f"{message['what']}: {rank_list(others)} made another call meanwhile, such as gather")
        return {rank: json.loads(payload) for rank, payload in payloads.items()}

    def _exchange_bytes(self, payload: bytes, deadline_s: float) -> dict[int, bytes]:
        """By active rank. Collective, inside a turn; every rank makes these in the same order."""
        self._native.raise_if_broken()
        tag = _COMPARE_TAG + self._num_compared
        self._num_compared += 1
        payloads = self._native.exchange(tag, payload, deadline_s)
        return {rank: payloads[rank] for rank in self._active}

    def _new_window(self, spec: WindowSpec, deadline_s: float, number: int = 0) -> Window:
        """`number`: of a window that the members have; 0: all make a new one together."""
        shape: dict[str, Any] = {
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "max_tokens": spec.max_tokens,
            "heap_bytes": spec.heap_bytes,
            "timeout_s": deadline_s,
        }
        if self._choice.engine == "nvlink":
            shape |= {"landing_row_bytes": spec.landing_row_bytes, "num_blocks": self._choice.max_num_sms}
            shape["small_tokens"] = spec.small_tokens
            native = _load.native().GpuWindow(self._native, driver_gpu(self.device.index), **shape)
            window = Window(native, native.id, spec.max_tokens, WindowStreams(self.device))
        else:
            shape |= {"max_row_bytes": spec.max_row_bytes, "most_heap_bytes": spec.most_heap_bytes}
            shape["node_ranks"] = spec.node_ranks
            native = _load.native().CpuWindow(self._native, number=number, **shape)
            window = Window(native, native.id, spec.max_tokens)
        self._windows[spec] = window
        self._all_windows.add(window)
        return window


def _key(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["serials"][0], entry["numbers"][0]


def _map_of(entry: dict[str, Any] | None) -> ExpertMap | None:
    if entry is None or "map" not in entry:
        return None
    return ExpertMap(torch.tensor(entry["map"], dtype=torch.int32, device="cpu"))


def _compare(answers: dict[int, dict[str, Any]]) -> None:
    """All ranks see the same answers, so all raise the same error."""
    _compare_field("call", {rank: answer["what"] for rank, answer in answers.items()})
    names = next(iter(answers.values()))["arguments"]
    for name in names:
        _compare_field(name, {rank: answer["arguments"].get(name) for rank, answer in answers.items()})


def _compare_field(name: str, values: dict[int, Any]) -> None:
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    if len(by_value) > 1:
        found = "; ".join(f"{value} on {rank_list(ranks)}" for value, ranks in by_value.items())
        raise InvalidArgument(f"{name} differs between ranks: {found}. It must be equal on all ranks")
