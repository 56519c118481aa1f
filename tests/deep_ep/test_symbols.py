"""Guards against a name of DeepEP that docs/deep_ep.md has no mark for, a mark of a name that is not there, and one
that is not true of what is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weft import deep_ep
from weft.deep_ep import _C, hybrid_ep_buffer, utils
from weft.deep_ep.utils import comm, envs, event, gate, math, refs, semantic, testing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deep_ep.md"
MARKS = ("yes", "accepted", "differs", "refused")
CLASSES = {
    "V1 `Buffer`": deep_ep.Buffer,
    "V2 `ElasticBuffer`": deep_ep.ElasticBuffer,
    "`HybridEPBuffer`": deep_ep.HybridEPBuffer,
}
# Their parameters are named, too; those of hints are not.
CALLS = (
    "__init__", "barrier", "combine", "combine_with_unpermute", "dispatch", "dispatch_with_permute",
    "get_dispatch_layout", "internode_combine", "internode_dispatch", "low_latency_combine", "low_latency_dispatch",
)  # fmt: skip
# Of handles, and names that stand beside those of a class.
BESIDE = {
    "Buffer", "Config", "EPHandle", "ElasticBuffer", "HybridEPBuffer", "deterministic_sort", "dst_buffer_slot_idx",
    "handle", "indices_to_map", "local_expert_routing_map", "overflow_flag", "recv_src_idx",
}  # fmt: skip
UTILS: dict[str, ModuleType] = {
    each.__name__.rpartition(".")[2]: each for each in (comm, envs, event, gate, math, refs, semantic, testing)
}


def tables() -> dict[str, list[tuple[str, str, str]]]:
    """Of each heading the rows: what is in the first column, and the marks of the cpu engine and of GPUs."""
    text = PAGE.read_text().partition("\n## Every symbol\n")[2].partition("\n## ")[0]
    found: dict[str, list[tuple[str, str, str]]] = {}
    for part in text.split("\n### ")[1:]:
        title, _, rest = part.partition("\n")
        lines = [line for line in rest.splitlines() if line.startswith("|")][2:]
        found[title] = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]  # type: ignore[misc]
    return found


TABLES = tables()


def names_in(cell: str) -> set[str]:
    """What is code there; of `call(parameters)` both."""
    return {name for code in re.findall(r"`([^`]+)`", cell) for name in re.findall(r"[A-Za-z_]\w*", code)}


def named(title: str) -> set[str]:
    """In a table."""
    return set().union(*(names_in(cell) for cell, _, _ in TABLES[title]))


def public(of: Any) -> set[str]:
    """What a class shows."""
    return {name for name in dir(of) if not name.startswith("_")}


def parameters(of: Any) -> Iterator[str]:
    """Of its calls."""
    for name in CALLS:
        if hasattr(of, name):
            yield from list(inspect.signature(getattr(of, name)).parameters)[1:]


def test_every_row_has_two_marks() -> None:
    assert TABLES.keys() == {"Module", *CLASSES, "`deep_ep.utils`"}
    for title, rows in TABLES.items():
        assert rows, title
        for row in rows:
            assert len(row) == 3, row
            assert all(mark.startswith(MARKS) for mark in row[1:]), row


def test_names_of_the_module() -> None:
    assert named("Module") == {*deep_ep.__all__, *_C.__all__, "_C"}


@pytest.mark.parametrize("title", CLASSES)
def test_names_of_a_class(title: str) -> None:
    """All that callers can write, and nothing else."""
    there = {*public(CLASSES[title]), *parameters(CLASSES[title])}
    assert named(title) - there - BESIDE == set()
    assert there - named(title) == set()


def test_names_of_utils() -> None:
    for name in utils._MODULES:
        rows = [cell for cell, _, _ in TABLES["`deep_ep.utils`"] if cell.startswith(f"`{name}`:")]
        assert set().union(*map(names_in, rows)) == {name, *UTILS[name].__all__}
    assert len(TABLES["`deep_ep.utils`"]) == len(utils._MODULES) + 1  # envs has two


def test_what_is_refused_is_refused() -> None:
    """Of methods that raise whatever they are given; what depends on an argument is in refusal_cases.py."""
    for title, kind in CLASSES.items():
        rows = [row for row in TABLES[title] if row[1].startswith("refused") and row[2].startswith("refused")]
        marked = {name for cell, _, _ in rows for name in names_in(cell) & public(kind) if f"`{name}`" in cell}
        absent = {name for name in public(kind) if inspect.getdoc(getattr(kind, name)) == "Raises NotSupported."}
        assert marked == absent, title


def test_the_function_beside_hybrids_class() -> None:
    assert {"HybridEPBuffer", "HybridEpConfigInstance", "indices_to_map"} == set(hybrid_ep_buffer.__all__)
