"""Guards against a newcomer that is not what the group is made of and comes in all the same, and against one that
disturbs the members. What no newcomer of this Weft says is said at their doors in the raw protocol."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import os
import pathlib
import socket
import struct
import time
from typing import Any

import pytest
import torch
from joining_cases import LONG_S, Outer, checked_step, descriptors, make_ep, mappings, number_of, open_group
from test_standby import until

import weft
from weft import _load
from weft.group import files

PACKET = struct.Struct("<IHHQIIII")  # magic, version, type, tag, message bytes, offset, payload bytes, descriptors
_HELLO, _REFUSAL = 1, 2
_PACKET_MAGIC, _PACKET_VERSION = 0x4B504657, 5
JOIN = struct.Struct("<IHHiI32s32s16s256s")  # as request_of names them
_JOIN_MAGIC, _JOIN_VERSION = 0x4E4A4657, 2
_INVALID_ARGUMENT, _UNSUPPORTED = 1, 3
_SET_DUMPABLE = 4  # PR_SET_DUMPABLE
_VERSION_AT = 4  # in a packet, a request and an endpoint


def packet_of(payload: bytes, version: int = _PACKET_VERSION) -> bytes:
    return PACKET.pack(_PACKET_MAGIC, version, _HELLO, 0, len(payload), 0, len(payload), 0) + payload


def request_of(address: str, own: bytes, **other: Any) -> bytes:
    """What a newcomer says at a door; `other`: in place of what is right."""
    fields: dict[str, Any] = {
        "magic": _JOIN_MAGIC,
        "version": _JOIN_VERSION,
        "bytes": JOIN.size,
        "slot": -1,
        "reserved": 0,
        "weft": weft.__version__.encode(),
        "sources": bytes.fromhex(_load.native().build_info()["sources"]),
        "group": bytes.fromhex(address.split(":")[5]),
        "endpoint": own,
    }
    return JOIN.pack(*{**fields, **other}.values())


def answer_of(door: str, packet: bytes) -> tuple[int, bytes]:
    """Type and payload of what a door answers; 0: it has ended the call."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as call:
        call.settimeout(LONG_S)
        call.connect("\0" + door)
        try:
            call.send(packet)
            answer, fds, _, _ = socket.recv_fds(call, 1 << 16, 4)
        except (BrokenPipeError, ConnectionResetError):  # cut off unread
            return 0, b""
        for fd in fds:
            os.close(fd)
    return (PACKET.unpack_from(answer)[2], answer[PACKET.size :]) if answer else (0, b"")


def refusal_of(door: str, packet: bytes) -> tuple[int, str]:
    """Code and text."""
    kind, payload = answer_of(door, packet)
    assert kind == _REFUSAL
    return struct.unpack_from("<i", payload)[0], payload[4:].decode()


def _calls(address: str) -> list[tuple[int, str, int, str]]:
    """What is wrong in each call: code and text that the door has to answer, then those that came."""
    listener = _load.native().Listener()
    endpoint = listener.endpoint()
    later_endpoint = endpoint[:_VERSION_AT] + b"\x09" + endpoint[_VERSION_AT + 1 :]
    sources = _load.native().build_info()["sources"]
    other_sources = bytes(reversed(bytes.fromhex(sources)))
    right = request_of(address, endpoint)
    wrong = [
        (_UNSUPPORTED, f"the newcomer is Weft 9.8.7, the group Weft {weft.__version__}", {"weft": b"9.8.7"}),
        (_UNSUPPORTED, f"SHA-256 {other_sources.hex()}, the group's from {sources}", {"sources": other_sources}),
        (_UNSUPPORTED, f"Weft 9.8.7, the group Weft {weft.__version__}", {"weft": b"9.8.7", "sources": other_sources}),
        (_UNSUPPORTED, "speaks version 3 of joining, the group version 2", {"version": 3}),
        (_UNSUPPORTED, "of version 9, those of the group of version 4", {"endpoint": later_endpoint}),
        (_INVALID_ARGUMENT, "wrong magic number", {"endpoint": bytes(4) + endpoint[4:]}),
        (_INVALID_ARGUMENT, "another group lives there by now", {"group": bytes(16)}),
        (_INVALID_ARGUMENT, "slot is 1, which another process has", {"slot": 1}),
        (_INVALID_ARGUMENT, "slot is 7; allowed are 0 to 2", {"slot": 7}),
    ]
    packets = [(code, text, packet_of(request_of(address, endpoint, **other))) for code, text, other in wrong]
    later = packet_of(right, _PACKET_VERSION + 1)
    packets += [
        (_UNSUPPORTED, f"a packet of version {_PACKET_VERSION + 1}; this Weft speaks version {_PACKET_VERSION}", later),
        (_INVALID_ARGUMENT, f"a request to join of {JOIN.size - 1} bytes; one has {JOIN.size}", packet_of(right[:-1])),
    ]
    doors = address.split(":")[6:]
    return [(code, text, *refusal_of(door, packet)) for door in doors for code, text, packet in packets]


def _come(outer_comm: Any, where: pathlib.Path) -> list[tuple[int, str, int, str]]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    if comm is None:
        outer.wait()
        found = _calls(address)
        (where / "refused").touch()
        outer.wait()
        with weft.Communicator.join(address, device="cpu") as joined:  # the slot was not lost by all that
            assert joined.rank == 2
            ep = make_ep(joined)
            joined.ready()
            assert joined.boundary(LONG_S) is not None
            checked_step(ep, number_of(joined))
            outer.wait()
        return found
    ep = make_ep(comm)
    checked_step(ep, number_of(comm))
    before = mappings(), descriptors()
    outer.wait()
    has_ended = False
    while not has_ended:
        assert comm.boundary(LONG_S) is None
        checked_step(ep, number_of(comm))
        has_ended = b"1" in comm.gather(b"%d" % (where / "refused").exists()).values()
    until(lambda: before == (mappings(), descriptors()))
    assert comm.membership == weft.Membership(1, (0, 1), (), (), slots=3)
    outer.wait()
    assert comm.change(admit=[2]).added == (2,)
    checked_step(ep, number_of(comm))
    outer.wait()
    comm.close()
    return []


def test_a_newcomer_that_differs_is_told_in_what(tmp_path: pathlib.Path) -> None:
    """By each member, with both values; the members work on meanwhile, and keep nothing of it."""
    found = weft.spawn(_come, 3, (tmp_path,), device="cpu")[2]
    assert len(found) == 2 * 11
    for wanted_code, wanted, code, text in found:
        assert code == wanted_code, text
        assert wanted in text


def _as_another_user(outer_comm: Any) -> list[str]:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    told = []
    if comm is None:
        os.seteuid(65534)
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1)  # as a process that this user has started
        try:
            with pytest.raises(weft.Unsupported) as refused:
                weft.Communicator.join(address, device="cpu")
            told.append(str(refused.value))
            # A process that does not look who answers is turned away unread.
            request = request_of(address, _load.native().Listener().endpoint())
            told.append(str(answer_of(address.split(":")[6], packet_of(request))))
        finally:
            os.seteuid(0)
    else:
        ep = make_ep(comm)
        checked_step(ep, number_of(comm))
    outer.wait()
    if comm is not None:
        checked_step(ep, number_of(comm))
        assert comm.membership.joining == ()
        comm.close()
    return told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_a_newcomer_of_another_user() -> None:
    """Both ends look: it learns of both users, and what it says is not read."""
    told = weft.spawn(_as_another_user, 3, device="cpu")[2]
    assert "the group runs as user 0, this process as user 65534" in told[0]
    assert told[1] == "(0, b'')"


def _differs(outer_comm: Any) -> dict[str, str]:
    """An object of two logical experts a slot; a newcomer makes it with one argument after the other changed."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    told = {}
    given: dict[str, Any] = {
        "num_experts": 6, "top_k": 3, "hidden": 32, "max_tokens_per_rank": 16, "dtype": torch.float32, "num_sms": 8,
        "deadline_s": 50.0, "heap_bytes": 1 << 16, "num_windows": 1, "num_logical_experts": 4, "sum_domain": None,
        "max_heap_bytes": 1 << 20, "node_ranks": None, "name": "one",
    }  # fmt: skip
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        changed_values: dict[str, Any] = {
            "num_experts": 9, "top_k": 4, "hidden": 64, "max_tokens_per_rank": 8, "dtype": torch.float16, "num_sms": 4,
            "deadline_s": 60.0, "heap_bytes": 1 << 17, "num_windows": 2, "num_logical_experts": 5, "sum_domain": 1,
            "max_heap_bytes": 1 << 21, "node_ranks": 1, "small_tokens": 3, "traffic_class": 5, "name": "another",
        }  # fmt: skip
        assert set(changed_values) == set(inspect.signature(weft.ExpertParallel).parameters) - {"comm", "min_ranks"}
        for name, value in changed_values.items():
            with pytest.raises(weft.InvalidArgument) as refused:
                weft.ExpertParallel(comm, **{**given, name: value})
            told[name] = str(refused.value)
        ep = weft.ExpertParallel(comm, **given)  # by all that nothing was lost
        comm.ready()
    else:
        ep = weft.ExpertParallel(comm, **given)
        outer.wait()
    outer.wait()
    ep.close()
    comm.close()
    return told


def test_an_object_that_differs_is_told_in_what() -> None:
    """Whatever argument it is: its name, what the newcomer has, and what the group has."""
    told = weft.spawn(_differs, 3, device="cpu")[2]
    assert len(told) == 16
    for name, text in told.items():
        assert text.startswith(f"{name} is "), text
        assert " on this rank, which joins, and " in text
        assert " in the group" in text


def _another_engine(outer_comm: Any) -> str:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    told = ""
    if comm is None:
        outer.wait()
        with pytest.raises(weft.Unsupported) as refused:
            weft.Communicator.join(address, device="cpu")
        told = str(refused.value)
    else:
        comm._choice = dataclasses.replace(comm._choice, engine="nvlink")  # as if such a group could be open
        comm._publish_contract()
        outer.wait()
    outer.wait()
    if comm is not None:
        while comm.membership.joining:  # until its end is noticed
            time.sleep(0.001)
        comm.close()
    return told


def test_a_group_on_another_engine() -> None:
    """The newcomer finds that by what the group says of itself, and is gone again."""
    told = weft.spawn(_another_engine, 3, device="cpu")[2]
    assert "nvlink" in told
    assert "cpu" in told


def _other_files(outer_comm: Any) -> str:
    """The files of the newcomer are others; then the same."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    told = ""
    if comm is not None:
        outer.wait()
        until(lambda: comm.membership.joining == ())  # noticed that it is gone
        outer.wait()
    else:
        right = files.digest
        files.digest = lambda: "0" * 64  # type: ignore[assignment]
        with pytest.raises(weft.Unsupported) as refused:
            weft.Communicator.join(address, device="cpu")
        told = str(refused.value)
        assert f"{'0' * 64} on this rank, which joins, and {right()} in the group" in told
        files.digest = right
        outer.wait()
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
    outer.wait()
    comm.close()
    return told


def test_a_newcomer_with_other_files_of_python() -> None:
    """Both digests are named, the slot is free again."""
    told = weft.spawn(_other_files, 3, device="cpu")[2]
    assert "the same files on all ranks" in told


def test_files_are_told_apart(tmp_path: pathlib.Path) -> None:
    """By content, by name, by where one ends, and not by what is no Python."""
    seen = [files.digest_of(tmp_path)]
    for name, text in [("a.py", "x = 1"), ("a.py", "x = 2"), ("b/a.py", "x = 1"), ("b.py", ""), ("c.py", "")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        seen.append(files.digest_of(tmp_path))
    (tmp_path / "a.txt").write_text("x = 1")
    assert files.digest_of(tmp_path) == seen[-1]
    assert len(set(seen)) == len(seen)
    assert files.digest() == files.digest_of(pathlib.Path(weft.__file__).parent)


def _want_one_slot(outer_comm: Any, slot: int | None) -> str:
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    told = "a founder"
    outer.wait()
    if comm is None:
        try:
            comm = weft.Communicator.join(address, slot=slot, device="cpu")
            told = f"rank {comm.rank}"
        except (weft.InvalidArgument, weft.CapacityExceeded) as error:
            told = type(error).__name__
    outer.wait()
    if comm is not None:
        comm.close()
    return told


@pytest.mark.parametrize("slot", [2, None])
def test_several_want_the_last_slot(slot: int | None) -> None:
    """At once, and by different sponsors: one has it, the others are told so."""
    seen = weft.spawn(_want_one_slot, 6, (slot,), device="cpu")
    refused = "InvalidArgument" if slot is not None else "CapacityExceeded"
    assert sorted(seen) == sorted(["a founder", "a founder", "rank 2", *[refused] * 3])


def _is_slow(outer_comm: Any) -> Any:
    """The third process joins, and is not ready for long."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 2, 3)
    told: Any = None
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        comm.ready()
        assert comm.boundary(LONG_S) is not None
    else:
        ep = make_ep(comm)
        outer.wait()
        outer.wait()
        if comm.rank == 0:
            ticket = comm.propose(admit=[2], deadline_s=0.2)
            told = ticket.wait(LONG_S), ticket.reason
        assert comm.membership.joining == (2,)
        checked_step(ep, number_of(comm))
        outer.wait()
        assert comm.change(admit=[2]).added == (2,)
    checked_step(ep, number_of(comm))
    outer.wait()
    comm.close()
    return told


def test_a_newcomer_that_is_not_ready() -> None:
    """The ticket ends at its deadline and names it; later it comes in by another one."""
    assert weft.spawn(_is_slow, 3, device="cpu")[0] == ("withdrawn", "rank 2 was not ready by the deadline")
