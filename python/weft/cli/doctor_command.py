"""`weft doctor`: weft.machine.doctor's findings as a table, exit code 1 if a check fails; of a fleet, what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.cli import options
from weft.cli.output import EXIT_FAILED, Output, command_output
from weft.errors import InvalidArgument
from weft.machine.doctor import CHECKS, Finding, diagnose, facts_of
from weft.machine.doctor import fleet as fleets
from weft.machine.doctor import measure as measurement

_ROOT_HELP = "Look at a recording (weft topo --record) in place of this machine."
_MEASURE_HELP = "Measure rates and latencies of the GPUs, 2 s and the start of torch; by default where there are GPUs."
_FLEET_HELP = "Compare hosts: a file of each, named after it, with what `weft doctor --json` wrote there."
_MOST_HOSTS = 8  # named in a line
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "n/a": "dim"}


def doctor(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Hosts for --fleet.")] = None,
    fleet: Annotated[bool, typer.Option("--fleet", help=_FLEET_HELP)] = False,
    root: Annotated[Path, typer.Option("--root", exists=True, help=_ROOT_HELP)] = Path("/"),
    measure: Annotated[bool | None, typer.Option("--measure/--no-measure", help=_MEASURE_HELP)] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every check in a table, with why it matters.")] = False,
    json: options.Json = False,
) -> None:
    """Check this machine and say what mends it; exit 1 if a check fails. Needs no GPU and no root."""
    with command_output(json_lines=json) as output:
        if fleet or files:
            if not fleet:
                raise InvalidArgument(f"{(files or [])[0]} is given without --fleet")
            _show_fleet(output, fleets.read_hosts(files or []))
            return
        findings = []
        facts = facts_of(root)
        checks = CHECKS
        if facts.live and (bool(facts.gpus) if measure is None else measure):
            with output.progress(1, "measuring the GPUs"):
                facts = dataclasses.replace(facts, measured=measurement.run(facts))
            checks += measurement.CHECKS
            output.row({"kind": "measurement", **(facts.measured or {})})
        for finding in diagnose(facts, checks):
            output.row({"kind": "check", **dataclasses.asdict(finding)})
            findings.append(finding)
        _show(output, findings, every=every)
        count = {status: sum(finding.status == status for finding in findings) for status in _STYLES}
        summary = {"failed": count["fail"], "warned": count["warn"], "passed": count["ok"], "skipped": count["n/a"]}
        output.row({"kind": "summary", "ok": not count["fail"], **summary})
        if count["fail"]:
            raise typer.Exit(EXIT_FAILED)


def _show(output: Output, findings: Sequence[Finding], *, every: bool) -> None:
    """What needs a hand first, then what is in order; checks that do not apply are only counted unless `every`."""
    by_status = {status: [finding for finding in findings if finding.status == status] for status in _STYLES}
    failed, warned, passed, skipped = (by_status[status] for status in ("fail", "warn", "ok", "n/a"))
    for finding in (*failed, *warned):
        output.text(f"{finding.status}: {finding.check}: {finding.found}", style=_STYLES[finding.status])
        output.text(f"  why:   {finding.why}")
        if finding.cost:
            output.text(f"  costs: {finding.cost}")
        if finding.fix:
            output.text(f"  mend:  {finding.fix}")
    if every:
        rows = [
            (one.check, f"[{_STYLES[one.status]}]{one.status}[/]", escape(one.found), escape(one.why))
            for one in findings
        ]
        output.table("weft doctor", ("check", "state", "found", "why it matters"), rows, left=range(4))
    else:
        in_order = [(finding.check, escape(finding.found)) for finding in passed]
        output.table("in order", ("check", "found"), in_order, left=range(2))
        if skipped:
            output.text(f"{_count(len(skipped), 'check')} not applicable here (--all shows every check)")
    complaints = f"failed: {len(failed)}, warnings: {len(warned)}"
    verdict = complaints if failed or warned else "nothing to mend"
    output.text(f"doctor: {verdict}", style="bold red" if failed else "yellow" if warned else "green")


def _show_fleet(output: Output, hosts: Mapping[str, Sequence[Finding]]) -> None:
    """What fails or warns on each host, then what hosts answer differently."""
    num_failed = 0
    for host, findings in hosts.items():
        by_status = {status: [one for one in findings if one.status == status] for status in _STYLES}
        num_failed += len(by_status["fail"])
        output.row({"kind": "host", "host": host, "failed": len(by_status["fail"]), "warned": len(by_status["warn"])})
        for finding in (*by_status["fail"], *by_status["warn"]):
            style = _STYLES[finding.status]
            output.text(f"{host}: {finding.status}: {finding.check}: {finding.found}", style=style)
    found = fleets.differences(hosts)
    for difference in found:
        output.row({"kind": "difference", **dataclasses.asdict(difference)})
        output.text(f"differs: {difference.check} ({difference.why})", style="bold")
        for variant in difference.variants:
            names = _some(variant.hosts)
            output.text(f"  {variant.status}: {variant.found}: {names}")
    output.row({"kind": "summary", "ok": not num_failed, "hosts": len(hosts), "differences": len(found)})
    style = "bold red" if num_failed else "yellow" if found else "green"
    alike = f"{_count(len(found), 'check')} differ{'s' * (len(found) == 1)}" if found else "all alike"
    output.text(f"{_count(len(hosts), 'host')}: {alike}, {_count(num_failed, 'check')} failed", style=style)
    if num_failed:
        raise typer.Exit(EXIT_FAILED)


def _some(hosts: Sequence[str]) -> str:
    more = len(hosts) - _MOST_HOSTS
    return ", ".join(hosts[:_MOST_HOSTS]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
