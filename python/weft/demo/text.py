"""The text the demo learns from: a file of the user, else one found on this machine, else one that comes with Weft."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import InvalidArgument

SHIPPED = Path(__file__).with_name("alice.txt")
"""Chapter I of Lewis Carroll's "Alice's Adventures in Wonderland" (1865), in the public domain."""

MIN_FOUND_BYTES = 200_000  # less than this is read so often in one demo that it is learned by heart


@dataclass(frozen=True)
class Text:
    """What the demo learns from. `data`: the bytes, uint8 [N]; `source`: where they are from, for people."""

    data: Tensor
    source: str

    def batch(self, config_seed: int, step: int, rank: int, sequences: int, length: int) -> Tensor:
        """Random pieces of the text, int64 [sequences, length]; the same for the same seed, step and rank."""
        generator = torch.Generator().manual_seed((config_seed * 1_000_003 + step) * 1_009 + rank)
        starts = torch.randint(
            0, len(self.data) - length + 1, (sequences, 1), generator=generator, dtype=torch.int64, device="cpu"
        )
        return self.data[starts + torch.arange(length, dtype=torch.int64, device="cpu")].long()


def load_text(file: Path | None, *, min_bytes: int) -> Text:
    """Reads `file`; None: Python's own language reference if this machine has it, else the text shipped with Weft.

    Raises `weft.InvalidArgument` if `file` can't be read or has fewer than `min_bytes` bytes.
    """
    if file is not None:
        return _from_bytes(_read(file), str(file), min_bytes)
    for source, find in _FINDERS.items():
        found = find()
        if found is not None and len(found) >= max(min_bytes, MIN_FOUND_BYTES):
            return _from_bytes(found, source, min_bytes)
    shipped = "the first chapter of Alice in Wonderland, shipped with Weft"
    return _from_bytes(plain(SHIPPED.read_text("utf-8")), shipped, min_bytes)


def plain(text: str) -> bytes:
    """Paragraphs on one line each, runs of blanks as one: a small model should learn words rather than indentation."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n".join(paragraph for paragraph in paragraphs if paragraph).encode()


def _python_reference() -> bytes | None:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
        return plain("\n\n".join(topics.values()))
    except (ImportError, AttributeError, TypeError):
        return None


_FINDERS: dict[str, Callable[[], bytes | None]] = {
    "the Python language reference (pydoc_data.topics of this interpreter)": _python_reference
}


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"text={str(file)!r}: must be a file that can be read ({error.strerror})") from error


def _from_bytes(data: bytes, source: str, min_bytes: int) -> Text:
    if len(data) < min_bytes:
        raise InvalidArgument(f"text={source!r}: has {len(data)} bytes, must have at least {min_bytes}")
    return Text(torch.frombuffer(bytearray(data), dtype=torch.uint8), source)
