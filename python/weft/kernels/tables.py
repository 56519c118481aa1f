"""Measured tables (kernels/tuning.py) in files: what `weft tune` writes into the cache folder, and what comes with us.

A table is for one kind of GPU and one number of ranks. Needs no torch and no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft import env
from weft.errors import Error, InvalidState
from weft.kernels.cache import is_private
from weft.kernels.tuning import DEFAULT, FORMS, Table
from weft.limits import LAYOUTS, MAX_NUM_SMS, MAX_RANKS, MAX_SMALL_TOKENS
from weft.log import logger

__all__ = ["Tuning", "as_json", "find", "from_json", "path_in", "read", "write"]

FORMAT = 1  # of the files; another number is not read
_SHIPPED = Path(__file__).parents[1] / "tables"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Tuning:
    """A table and where it comes from.

    Attributes:
        device_name: of the GPU, as torch and NVML name it; "cpu".
        num_ranks: of the communicator.
        table: what weft.kernels.tuning asks.
        source: in words, who measured it with what; or that nobody has.
        shape: of the calls that were measured (hidden, experts, top_k, dtype); empty if none were.
    """

    device_name: str
    num_ranks: int
    table: Table
    source: str
    shape: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """As it stands in a file."""
        head = {"format": FORMAT, "source": self.source, "device_name": self.device_name, "num_ranks": self.num_ranks}
        return json.dumps({**head, "shape": dict(self.shape), **as_json(self.table)}, indent=1) + "\n"


def find(device_name: str, num_ranks: int, folder: str | None = None) -> Tuning:
    """The table of this machine: from the cache folder (None: what the environment says), else one that comes with
    Weft, else the defaults. A file that cannot be trusted or read is passed over, with a warning.
    """
    where = env.cache_folder() if folder is None else folder
    candidates = [path_in(where, device_name, num_ranks)] if where else []
    for path in (*candidates, *sorted(_SHIPPED.glob("*.json"))):
        try:
            found = read(path, is_shipped=path.parent == _SHIPPED)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError, Error) as error:
            logger.warning("tuning table %s is not used: %s", path, error)
            continue
        if (found.device_name, found.num_ranks) == (device_name, num_ranks):
            return found
    return Tuning(device_name, num_ranks, DEFAULT, "the defaults of weft.kernels.tuning; not measured")


def path_in(folder: str | Path, device_name: str, num_ranks: int) -> Path:
    """Where `weft tune` puts a table."""
    return Path(folder) / f"tuning-{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}-{num_ranks}.json"


def read(path: Path, *, is_shipped: bool = False) -> Tuning:
    """A file of this user in a private folder (`is_shipped`: of whoever has installed Weft).

    Raises:
        InvalidState: others may have written it. ValueError: what is wrong in it. OSError.
    """
    if not is_shipped and path.parent.exists() and not is_private(path.parent):
        raise InvalidState(f"{path.parent} is not a private folder of this user (mode 0700)")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        is_own = is_shipped or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
        if not stat.S_ISREG(status.st_mode) or not is_own:
            raise InvalidState("it is not a file that only this user can write")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"it has {status.st_size} bytes")
        return _parse(file.read().decode())


def write(path: Path, tuning: Tuning) -> None:
    """Write aside and rename, so that readers see the old file or the new one. The folder is made, mode 0700.

    Raises:
        InvalidState: the folder is not a private one of this user. OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(path.parent):
        raise InvalidState(f"{path.parent} is not a private folder of this user (mode 0700), so nothing is kept there")
    aside = path.parent / f".new-{secrets.token_hex(3)}"
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(tuning.text())
        aside.rename(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()


# ---- JSON


def as_json(table: Table) -> dict[str, Any]:
    """A table as JSON values."""
    return {
        "crossovers": [
            {"op": op, "layout": layout, "form": form, "most_tokens": most}
            for (op, layout, form), most in table.most_tokens
        ],
        "most_tokens_else": table.most_tokens_else,
        "num_sms": [{"most_tokens": most, "num_sms": num_sms} for most, num_sms in table.num_sms],
        "num_sms_else": table.num_sms_else,
        "node_num_sms": [
            {"node_ranks": node_ranks, "op": op, "layout": layout, "num_sms": num_sms}
            for (node_ranks, op, layout), num_sms in table.node_num_sms
        ],
    }


def from_json(values: Mapping[str, Any]) -> Table:
    """The table of `as_json`.

    Raises:
        ValueError: what is wrong.
    """
    crossovers = tuple(_crossovers(values.get("crossovers")))
    num_sms = tuple(
        (_number(entry, "most_tokens", 0, MAX_SMALL_TOKENS), _number(entry, "num_sms", 1, MAX_NUM_SMS))
        for entry in _entries(values, "num_sms")
    )
    if [most for most, _ in num_sms] != sorted({most for most, _ in num_sms}):
        raise ValueError("num_sms: most_tokens must ascend")
    return Table(
        most_tokens=crossovers,
        most_tokens_else=_number(values, "most_tokens_else", 0, MAX_SMALL_TOKENS),
        num_sms=num_sms,
        num_sms_else=_number(values, "num_sms_else", 1, MAX_NUM_SMS),
        node_num_sms=tuple(_node_num_sms(values)),
    )


def _parse(text: str) -> Tuning:
    values = json.loads(text)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"it is no table of format {FORMAT}")
    source, device_name, shape = (values.get(name) for name in ("source", "device_name", "shape"))
    if not isinstance(source, str) or not isinstance(device_name, str) or not isinstance(shape, dict):
        raise ValueError("source and device_name must be texts, shape an object")
    return Tuning(device_name, _number(values, "num_ranks", 1, MAX_RANKS), from_json(values), source, shape)


def _crossovers(entries: Any) -> Iterator[tuple[tuple[str, str, str], int]]:
    seen = set()
    for entry in _entries({"crossovers": entries}, "crossovers"):
        op, layout, form = (entry.get(name) for name in ("op", "layout", "form"))
        if op not in FORMS or form not in FORMS[op] or layout not in LAYOUTS or (op, layout, form) in seen:
            raise ValueError(f"crossovers: {op!r}, {layout!r}, {form!r} is unknown or there twice")
        seen.add((op, layout, form))
        yield (op, layout, form), _number(entry, "most_tokens", 0, MAX_SMALL_TOKENS)


def _node_num_sms(values: Mapping[str, Any]) -> Iterator[tuple[tuple[int, str, str], int]]:
    """None in files of before there were nodes."""
    seen = set()
    for entry in _entries({"node_num_sms": values.get("node_num_sms", [])}, "node_num_sms"):
        op, layout, node_ranks = entry.get("op"), entry.get("layout"), _number(entry, "node_ranks", 1, MAX_RANKS)
        if op not in FORMS or layout not in LAYOUTS or (node_ranks, op, layout) in seen:
            raise ValueError(f"node_num_sms: {node_ranks}, {op!r}, {layout!r} is unknown or there twice")
        seen.add((node_ranks, op, layout))
        yield (node_ranks, op, layout), _number(entry, "num_sms", 1, MAX_NUM_SMS)


def _entries(values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    entries = values.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{name} must be a list of objects")
    return entries


def _number(values: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = values.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; allowed are {least} to {most}")
    return value
