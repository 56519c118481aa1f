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
        _show(output, findings)
        count = {status: sum(finding.status == status for finding in findings) for status in _STYLES}
        summary = {"failed": count["fail"], "warned": count["warn"], "passed": count["ok"], "skipped": count["n/a"]}
        output.row({"kind": "summary", "ok": not count["fail"], **summary})
        if count["fail"]:
            raise typer.Exit(EXIT_FAILED)


def _show(output: Output, findings: Sequence[Finding]) -> None:
    rows = [
        (finding.check, f"[{_STYLES[finding.status]}]{finding.status}[/]", escape(finding.found), escape(finding.why))
        for finding in findings
    ]
    output.table("weft doctor", ("check", "state", "found", "why it matters"), rows, left=range(4))
    for finding in findings:
        if finding.status not in ("warn", "fail"):
            continue
        output.text(f"{finding.status}: {finding.check}: {finding.found}", style=_STYLES[finding.status])
        if finding.cost:
            output.text(f"  costs: {finding.cost}")
        if finding.fix:
            output.text(f"  mend:  {finding.fix}")
    failed, warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    complaints = f"failed: {failed}, warnings: {warned}"
    verdict = complaints if failed or warned else "nothing to mend"
    output.text(f"doctor: {verdict}", style="bold red" if failed else "yellow" if warned else "green")
