"""`weft doctor`: weft.machine.doctor's findings as a table, exit code 1 if a check fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.cli import options
from weft.cli.output import EXIT_FAILED, Output, command_output
from weft.machine.doctor import CHECKS, Finding, diagnose, facts_of
from weft.machine.doctor import measure as measurement

_ROOT_HELP = "Look at a recording (weft topo --record) in place of this machine."
_MEASURE_HELP = "Measure rates and latencies of the GPUs, 2 s and the start of torch; by default where there are GPUs."
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "n/a": "dim"}


def doctor(
    root: Annotated[Path, typer.Option("--root", exists=True, help=_ROOT_HELP)] = Path("/"),
    measure: Annotated[bool | None, typer.Option("--measure/--no-measure", help=_MEASURE_HELP)] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every check in a table, with why it matters.")] = False,
    json: options.Json = False,
) -> None:
    """Check this machine and say what mends it; exit 1 if a check fails. Needs no GPU and no root."""
    with command_output(json_lines=json) as output:
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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
