"""What the ranks of weft.verify.rejoin show the process that kills them."""

from __future__ import annotations

import enum
import mmap
import struct

__all__ = ["Board", "Word"]

_NUMBER = struct.Struct("q")
_TEXT_BYTES = 4096


class Word(enum.IntEnum):
    """Of a slot; times are CLOCK_MONOTONIC in ns, 0: not yet."""

    READY = 0  # it has joined and waits to be taken in
    EPOCH = 1
    ACTIVE = 2  # as a mask, and
    STEPS = 3  # how many it has done, in that epoch
    WRONG = 4  # steps with a wrong word
    DOING = 5  # index of rejoin.DOING
    LOST_AT = 6  # a call has raised
    NAMED = 7  # ranks that PeerLost named, as a mask
    RECOVERED_AT = 8
    RIGHT_AT = 9  # end of the next right step
    FULL_AT = 10  # end of the next right step of as many ranks as before


class Board:
    """A page of words for each slot, shared by whoever forks, and a text; word END says that all is over."""

    def __init__(self, slots: int) -> None:
        self._words = mmap.mmap(-1, (slots * len(Word) + 1) * _NUMBER.size)
        self._texts = mmap.mmap(-1, slots * _TEXT_BYTES)
        self._end = slots * len(Word)

    def get(self, slot: int, word: Word) -> int:
        return int(_NUMBER.unpack_from(self._words, (slot * len(Word) + word) * _NUMBER.size)[0])

    def set(self, slot: int, word: Word, value: int) -> None:
        _NUMBER.pack_into(self._words, (slot * len(Word) + word) * _NUMBER.size, value)

    def clear(self, slot: int) -> None:
        """For another process in that slot."""
        for word in Word:
            self.set(slot, word, 0)

    def end(self) -> None:
        """All are to end."""
        _NUMBER.pack_into(self._words, self._end * _NUMBER.size, 1)

    def is_over(self) -> bool:
        return int(_NUMBER.unpack_from(self._words, self._end * _NUMBER.size)[0]) != 0

    def tell(self, slot: int, text: str) -> None:
        """The group's address, as that rank knows it; the parent reads it while the rank does not write."""
        data = text.encode()
        self._texts[slot * _TEXT_BYTES : slot * _TEXT_BYTES + len(data) + 1] = data + b"\0"

    def told(self, slot: int) -> str:
        return self._texts[slot * _TEXT_BYTES : (slot + 1) * _TEXT_BYTES].split(b"\0")[0].decode()
