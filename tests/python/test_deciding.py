"""Guards against secrets that can be read once only, or are shown, and answers of a store that are none."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.group import deciding
from weft.group.deciding import Network

SECRET = b"the secret of this group"


def decide(key: str, expected: str, desired: str) -> str:
    raise AssertionError


def read(secret: Any) -> bytes:
    return Network.make(decide, secret).secret


def test_a_descriptor_serves_more_than_once(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    with path.open("rb") as file:
        assert [read(file.fileno()) for _ in range(3)] == [SECRET] * 3
        assert file.read() == SECRET  # nor does it move under its owner


def test_a_descriptor_of_memory_has_no_mode_that_counts() -> None:
    fd = os.memfd_create("secret")
    try:
        os.write(fd, SECRET)
        assert [read(fd), read(fd)] == [SECRET] * 2
    finally:
        os.close(fd)


def test_a_pipe_is_read_to_its_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, SECRET)
    os.close(writing)
    assert read(reading) == SECRET
    os.close(reading)


def test_a_path_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o640)
    with pytest.raises(weft.InvalidArgument, match="can be read by others"):
        read(path)


def test_the_secret_is_not_shown() -> None:
    assert "secret of" not in repr(Network(decide, SECRET))


class Asked:
    """A decider that asks once, and what it was told."""

    def __init__(self) -> None:
        self.requests: list[Any] = [(1, "key", "", "new")]
        self.told: list[Any] = []
        self.ended = threading.Event()

    def next(self) -> Any:
        if self.requests:
            return self.requests.pop()
        self.ended.set()
        return None

    def answer(self, number: int, value: bytes) -> None:
        self.told.append(value)

    def fail(self, number: int, why: str) -> None:
        self.told.append(why)


@pytest.mark.parametrize("value", [3, None, 0.5, ["new"]])
def test_what_is_neither_bytes_nor_str_is_no_answer(value: Any) -> None:
    asked = Asked()
    deciding.serve(asked, lambda *_: value)  # type: ignore[arg-type]
    assert asked.ended.wait(60)
    assert asked.told == [f"TypeError: decide returned {value!r}; allowed are bytes and str"]


@pytest.mark.parametrize("value", ["new", b"new"])
def test_bytes_and_str_are_answers(value: Any) -> None:
    asked = Asked()
    deciding.serve(asked, lambda *_: value)  # type: ignore[arg-type]
    assert asked.ended.wait(60)
    assert asked.told == [b"new"]
