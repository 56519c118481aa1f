"""What differs between hosts, from the lines that `weft doctor --json` wrote on each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from weft.errors import InvalidArgument
from weft.machine.doctor.model import Finding, Status

__all__ = ["Difference", "Variant", "differences", "read_hosts"]

_FIELDS = tuple(Finding.__dataclass_fields__)


@dataclass(frozen=True)
class Variant:
    """What some hosts have in common."""

    status: Status
    found: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """A check that hosts answer differently: what most of them say comes first."""

    check: str
    why: str
    variants: tuple[Variant, ...]


def read_hosts(files: Sequence[Path]) -> dict[str, tuple[Finding, ...]]:
    """The findings of each host, by its name, which is the name of its file without the ending.

    Raises:
        InvalidArgument: fewer than two files, two of one name, or one that is not what `weft doctor --json` writes.
    """
    if len(files) < 2:
        raise InvalidArgument(f"--fleet compares hosts and got {len(files)} of their files; give two or more")
    hosts: dict[str, tuple[Finding, ...]] = {}
    for file in files:
        if file.stem in hosts:
            raise InvalidArgument(f"two files are called {file.stem}, which stands for one host")
        hosts[file.stem] = _read(file)
    return hosts


def _read(file: Path) -> tuple[Finding, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} can't be read: {error}") from error
    findings = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidArgument(f"{file}:{number}: no JSON; `weft doctor --json` writes a row a line") from error
        if not isinstance(row, dict) or row.get("kind") != "check":
            continue
        values: dict[str, Any] = {field: row.get(field) for field in _FIELDS}
        if not all(isinstance(value, str) for value in values.values()) or row["status"] not in get_args(Status):
            raise InvalidArgument(f"{file}:{number}: a check of another version of Weft; take all with one version")
        findings.append(Finding(**values))
    if not findings:
        raise InvalidArgument(f"{file} has no checks; write it with `weft doctor --json`")
    return tuple(findings)


def differences(hosts: Mapping[str, Sequence[Finding]]) -> tuple[Difference, ...]:
    """Where hosts differ, in the order of the checks; those whose state differs come first.

    A check that has several answers on a host (one a GPU, say) is compared as a whole.
    """
    answers: dict[str, dict[str, list[Finding]]] = {}
    for host, findings in hosts.items():
        for finding in findings:
            answers.setdefault(finding.check, {}).setdefault(host, []).append(finding)
    found = [_difference(check, by_host, tuple(hosts)) for check, by_host in answers.items()]
    differing = [each for each in found if len(each.variants) > 1]
    return tuple(sorted(differing, key=lambda each: len({variant.status for variant in each.variants}) == 1))


def _difference(check: str, by_host: Mapping[str, Sequence[Finding]], hosts: Sequence[str]) -> Difference:
    variants: dict[tuple[Status, str], list[str]] = {}
    for host in hosts:
        variants.setdefault(_answer(by_host.get(host, ())), []).append(host)
    most_first = sorted(variants.items(), key=lambda item: -len(item[1]))
    why = next(iter(by_host.values()))[0].why
    return Difference(check, why, tuple(Variant(*answer, tuple(names)) for answer, names in most_first))


def _answer(findings: Sequence[Finding]) -> tuple[Status, str]:
    worst: Sequence[Status] = ("fail", "warn", "ok", "n/a")
    if not findings:
        return "n/a", "not checked"
    status = min((finding.status for finding in findings), key=worst.index)
    return status, "; ".join(finding.found for finding in findings)
