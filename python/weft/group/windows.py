"""Windows that objects of a communicator share: made together by all ranks, found again by their shape."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import _load, env
from weft.call.streams import WindowStreams
from weft.call.window import Window, WindowSpec, released_on_error
from weft.engine import driver_gpu
from weft.errors import Error, InvalidArgument, InvalidState, PeerLost, Unsupported, rank_list
from weft.group.maps import Maps, asked_contract, key_of
from weft.scaleout import network

__all__ = ["Windows"]

_SOLO_EPOCH = 1  # of a rank that no change has taken in; one that was suspended is in a later epoch
_LOOK_S = 0.01  # between two looks at what members have made
_COMPARE_TAG = 1 << 22  # exchange tags of constructors: this plus their number; all below 1 << 24


class Windows(Maps):
    """The part of a communicator that has its windows."""

    device: torch.device
    _stands_by = False  # joined as a spare
    _says_ready = False  # by itself from then on, as a spare does

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[WindowSpec, Window] = {}
        self._all_windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self._num_compared = 0
        self._newest_window = 0

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
            serials = [
                -1 if window is None or window.closed or window.native.is_retired else window.serial for window in kept
            ]
            told = tell() if self._rank == self._active[0] else None
            objects = [0 if window is None else window.next_object for window in kept]
            message = {"what": what, "arguments": arguments, "serials": serials, "objects": objects, "told": told}
            paths, refused, said = self._network_of(specs)
            answers = self._exchange_json({**message, **said}, deadline_s)
            _compare(answers)
            _raise_refusal(refused, answers)
            _compare_field("WEFT_NETWORK", {rank: answer["network"] for rank, answer in answers.items()})
            shared = [list({answer["serials"][idx] for answer in answers.values()}) for idx in range(len(specs))]
            windows: list[Window] = []
            with released_on_error(windows):
                for spec, mine, found in zip(specs, kept, shared, strict=True):
                    window = (
                        mine
                        if mine is not None and len(found) == 1 and found[0] >= 0
                        else self._new_window(spec, deadline_s, paths=paths)
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

    def _raise_if_outside(self, what: str, instead: str) -> None:
        """Of a call that all members make: a rank that is none would do its part alone.

        Raises:
            InvalidState: it has joined and was not taken in yet, or is suspended.
        """
        if self._native.is_solo:
            state = "has joined and was not taken in yet" if self._native.epoch == _SOLO_EPOCH else "is suspended"
            raise InvalidState(
                f"{what}: rank {self._rank} {state}, and {what} is collective among the members. {instead}: go on to "
                f"boundary(), and call {what} with the members when a change has taken this rank in"
            )

    def _made(self) -> dict[str, Any]:
        """For whoever joins: the newest window ever made here, and of those that are left which object comes next."""
        nexts = [(window.serial, window.next_object) for window in list(self._all_windows) if not window.closed]
        return {"newest": self._newest_window, "next": nexts}

    def _note_object(
        self, what: str, arguments: dict[str, Any], windows: list[Window], numbers: list[int], told: dict[str, Any]
    ) -> None:
        if not self._native.is_open:
            return
        serials = [window.serial for window in windows]
        values = json.loads(json.dumps(arguments))
        self._objects.append({"what": what, "arguments": values, "serials": serials, "numbers": numbers, "told": told})
        self._publish_contract()

    def note_closed_object(self, serial: int, number: int) -> None:
        """The object with this number in this window is closed: nobody who joins makes it any more."""
        kept = [each for each in self._objects if key_of(each) != (serial, number)]
        if len(kept) < len(self._objects) and not self._closed:
            self._objects = kept
            self._publish_contract()
            if self._native.is_solo and self._native.epoch != _SOLO_EPOCH:
                self._says_ready = True  # a suspended rank was: `boundary` finds what it lacks now

    def _adopted_windows(
        self, what: str, arguments: dict[str, Any], specs: Sequence[WindowSpec], deadline_s: float
    ) -> tuple[list[Window], list[int], dict[str, Any]]:
        """Of a rank that has joined: those of the members' first object with equal arguments, the name among them, that
        it has not made yet. Not collective. Waits while members are about to make it, a spare also for their beginning.

        Raises:
            InvalidArgument: there is none; names the first argument that differs, and both values.
            InvalidState: the members have no object that this rank has not made; of a spare, not by the deadline.
        """
        made = [key_of(each) for each in self._objects]
        end = time.monotonic() + deadline_s
        while True:
            members = self._contracts_of_members(end)
            found_by = [{key_of(each) for each in said["objects"] if each["what"] == what} for said in members]
            everywhere, anywhere = set.intersection(*found_by), set.union(*found_by).difference(made)
            left = [each for each in members[0]["objects"] if key_of(each) in everywhere.difference(made)]
            is_coming = self._stands_by or any(_is_to_make(said, key) for said in members for key in anywhere)
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
            namesakes = [each for each in left if each["arguments"].get("name") == values.get("name")]
            theirs = (namesakes or left)[0]["arguments"]
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
                window = mine if is_known and mine is not None else self._new_window(spec, _left(end), serial)
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

    def _contracts_of_members(self, end: float) -> list[dict[str, Any]]:
        """What each member says that it has made."""
        found: list[dict[str, Any]] = []
        for rank in self._native.members():
            with contextlib.suppress(PeerLost):
                found.append(asked_contract(self._native, _left(end), [rank]))
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

    def _new_window(self, spec: WindowSpec, deadline_s: float, number: int = 0, paths: Any = None) -> Window:
        """`number`: of a window that the members have; 0: all make a new one together. `paths`: of the network."""
        shape: dict[str, Any] = {
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "max_tokens": spec.max_tokens,
            "heap_bytes": spec.heap_bytes,
            "timeout_s": deadline_s,
        }
        if self._choice.engine == "nvlink":
            shape |= {"landing_row_bytes": spec.landing_row_bytes, "num_blocks": self._choice.max_num_sms}
            shape |= {"small_tokens": spec.small_tokens, "node_ranks": spec.node_ranks}
            native = self._gpu_window(shape, spec, paths)
            window = Window(native, native.id, spec.max_tokens, WindowStreams(self.device))
        else:
            shape |= {"max_row_bytes": spec.max_row_bytes, "most_heap_bytes": spec.most_heap_bytes}
            shape["node_ranks"] = spec.node_ranks
            native = _load.native().CpuWindow(self._native, number=number, **shape)
            window = Window(native, native.id, spec.max_tokens)
        self._windows[spec] = window
        self._all_windows.add(window)
        self._newest_window = max(self._newest_window, window.serial)
        return window

    def _gpu_window(self, shape: dict[str, Any], spec: WindowSpec, paths: Any) -> Any:
        gpu, make = driver_gpu(self.device.index), _load.native().GpuWindow
        if paths is None or not self._has_nodes(spec):
            return make(self._native, gpu, **shape)
        with network.variables():
            return make(self._native, gpu, nccl=paths, traffic_class=spec.traffic_class, **shape)

    def _has_nodes(self, spec: WindowSpec) -> bool:
        return 0 < spec.node_ranks < self._native.num_ranks

    def _network_of(self, specs: Sequence[WindowSpec]) -> tuple[Any, Error | None, dict[str, str | None]]:
        """Where NCCL is, if it leads between nodes; why this rank has no network; and what the others hear of it."""
        if self._choice.engine != "nvlink" or not any(map(self._has_nodes, specs)):
            return None, None, {"network": None, "refused": None}
        try:
            word = env.network()
        except Error as error:
            return None, error, {"network": None, "refused": str(error)}
        try:
            return network.paths() if word == "nccl" else None, None, {"network": word, "refused": None}
        except Error as error:
            return None, error, {"network": word, "refused": str(error)}

    def _network_text(self) -> str:
        """What leads between the nodes of its windows; "": nothing that has a name."""
        natives = [window.native for window in self._all_windows if not window.closed]
        return next((text for native in natives if (text := getattr(native, "network", ""))), "")


def _is_to_make(said: dict[str, Any], key: tuple[int, int]) -> bool:
    """Whether a member that others have this object before is about to make it; not: it has closed it."""
    serial, number = key
    return serial > said["newest"] or any(serial == window and number >= end for window, end in said["next"])


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _raise_refusal(mine: Error | None, answers: dict[int, dict[str, Any]]) -> None:
    """All ranks raise if one of them has no network."""
    if mine is not None:
        raise mine
    refusals = {rank: answer["refused"] for rank, answer in answers.items() if answer["refused"] is not None}
    for rank, text in refusals.items():
        raise Unsupported(
            "a network between nodes", f"an error on rank {rank} ({text})", "the same network on all ranks"
        )


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
