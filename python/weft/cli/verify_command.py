"""`weft verify`: flags in, weft.verify, results out."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from weft.cli import options
from weft.cli.output import EXIT_FAILED, Output, command_output
from weft.errors import InvalidArgument, Unsupported
from weft.verify import Fixed, repeat_command

ModeName = Literal["auto", "throughput", "latency", "mixed", "staged", "graph"]
_MODE_HELP = (
    "Kernels: auto, throughput, latency, mixed, staged, graph. mixed: "
    "small batches behind a throughput dispatch; graph: only with --kill. "
    "Random in every trial unless given, with --kill in turn."
)
_DEATHS_HELP = "With --kill: ranks killed one after the other in each trial, fewer than there are."
_REJOIN_HELP = (
    "With --kill: one group lives on while --trials of its ranks are killed, and spares and new processes join in "
    "their place; --ranks, --tokens and --hidden count; cpu engine."
)
_KILL_HELP = "Kill a random rank at a random moment in each trial; report what survivors see and how soon."


def verify(
    ranks: options.AnyRanks = None,
    tokens: options.AnyTokens = None,
    hidden: options.AnyHidden = None,
    experts: options.AnyExperts = None,
    top_k: options.AnyTopK = None,
    layout: options.AnyLayout = None,
    quantize: options.AnyQuantize = None,
    dtype: options.AnyDtype = None,
    routing: options.AnyRouting = None,
    mode: Annotated[ModeName | None, typer.Option("--mode", metavar="NAME", help=_MODE_HELP)] = None,
    trace: options.Trace = None,
    trials: Annotated[int, typer.Option("--trials", metavar="N", min=1, help="How many cases to try.")] = 40,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    kill: Annotated[bool, typer.Option("--kill", help=_KILL_HELP)] = False,
    rejoin: Annotated[bool, typer.Option("--rejoin", help=_REJOIN_HELP)] = False,
    deaths: Annotated[int, typer.Option("--deaths", metavar="N", min=1, help=_DEATHS_HELP)] = 1,
    json: options.Json = False,
) -> None:
    """Compare random cases with the reference, bit for bit; exit 1 if one differs."""
    fixed = Fixed(
        ranks=ranks,
        tokens=tokens,
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        layout=layout,
        quantize=quantize,
        dtype=dtype,
        routing=routing,
        mode=mode,
        trace=None if trace is None else str(trace),
    )
    with command_output(json_lines=json) as output:
        if mode == "graph" and not kill:
            raise InvalidArgument("mode is 'graph'; allowed with --kill only")
        if rejoin and not kill:
            raise InvalidArgument("--rejoin is allowed with --kill only")
        if rejoin and device == "cuda":
            raise Unsupported("newcomers on GPUs", "--rejoin", "--device cpu")
        if rejoin:
            ok = _run_rejoins(output, fixed, trials, seed)
        elif kill:
            ok = _run_kills(output, fixed, trials, seed, device, deaths)
        else:
            ok = _run_trials(output, fixed, trials, seed, device)
        if not ok:
            raise typer.Exit(EXIT_FAILED)


def _run_trials(output: Output, fixed: Fixed, trials: int, seed: int, device: str) -> bool:
    import dataclasses

    from weft.machine import where
    from weft.verify import run_trials

    failed, num_words = 0, 0
    with output.progress(trials, "verify", where.read) as advance:
        for result in run_trials(trials=trials, seed=seed, fixed=fixed, device=device):
            case = result.case
            advance(f"verify: {case.ranks} ranks, {case.layout}, {case.dtype}, {case.quantize}")
            num_words += result.num_words
            failed += not result.ok
            repeat = repeat_command(case, fixed, device)
            output.row(
                {
                    "kind": "trial",
                    "ok": result.ok,
                    "num_words": result.num_words,
                    "problems": list(result.problems),
                    "repeat": repeat,
                    "case": dataclasses.asdict(case),
                }
            )
            if not result.ok:
                output.text(f"FAILED {case.summary()}", style="bold red")
                for problem in result.problems:
                    output.text(f"  {problem}")
                output.text(f"  repeat: {repeat}")
    output.row({"kind": "summary", "ok": not failed, "trials": trials, "failed": failed, "num_words": num_words})
    verdict = f"{failed} of {trials} cases FAILED" if failed else f"{trials} cases ok"
    output.text(f"verify: {verdict}, {num_words} words compared bit for bit", style="bold red" if failed else "green")
    return not failed


def _run_kills(output: Output, fixed: Fixed, trials: int, seed: int, device: str, deaths: int) -> bool:
    import dataclasses
    from collections import Counter

    from weft.bench.apart import apart
    from weft.bench.facts import machine_facts
    from weft.verify.kill import KillResult, percentile, run_kills

    results: list[KillResult] = []
    with output.progress(trials * deaths, "verify --kill") as advance:
        for result in run_kills(trials=trials, seed=seed, fixed=fixed, device=device, deaths=deaths):
            advance(f"verify --kill: rank {result.victim} of {result.ranks}")
            if output.json_lines and not results:
                output.row({"kind": "machine", **apart(machine_facts, device)})
            results.append(result)
            output.row({"kind": "kill", "ok": result.ok, **dataclasses.asdict(result)})
            for problem in result.problems:
                output.text(f"FAILED trial {result.trial} (seed {result.seed}): {problem}", style="bold red")
    failed = sum(not result.ok for result in results)
    times: dict[str, list[float]] = {"detection": [], "rebuild": []}
    for result in results:
        times["detection"] += result.detection_us
        times["rebuild"] += result.rebuild_us
        for channels in result.channels:
            for channel, reported_us in channels.items():
                times.setdefault(f"channel: {channel}", []).append(reported_us)
    rows = []
    for what, values in times.items():
        p50, p99, worst = percentile(values, 0.5), percentile(values, 0.99), max(values, default=0.0)
        rows.append((what, str(len(values)), f"{p50:.0f}", f"{p99:.0f}", f"{worst:.0f}"))
        output.row({"kind": "times", "what": what, "count": len(values), "p50_us": p50, "p99_us": p99, "max_us": worst})
    counts = Counter((result.mode, result.operation, result.ok) for result in results)
    for mode, operation in sorted({key[:2] for key in counts}):
        wrong = counts[mode, operation, False]
        kills = counts[mode, operation, True] + wrong
        output.row({"kind": "count", "mode": mode, "operation": operation, "kills": kills, "failed": wrong})
        output.text(f"{mode} {operation}: {kills} kills, {wrong} failed")
    output.row({"kind": "summary", "ok": not failed, "trials": trials, "failed": failed})
    output.table("kill -9, as the survivors saw it", ("time from the kill, us", "count", "p50", "p99", "max"), rows)
    verdict = f"{failed} of {len(results)} kills FAILED" if failed else f"{len(results)} kills ok"
    output.text(
        f"verify --kill: {verdict}: PeerLost named the victim everywhere, rebuild worked, bits right"
        if not failed
        else f"verify --kill: {verdict}",
        style="bold red" if failed else "green",
    )
    return not failed


def _run_rejoins(output: Output, fixed: Fixed, trials: int, seed: int) -> bool:
    import dataclasses

    from weft.verify.kill import percentile
    from weft.verify.rejoin import RejoinResult, run_rejoins, slope

    sizes = {"ranks": fixed.ranks, "tokens": fixed.tokens, "hidden": fixed.hidden}
    results: list[RejoinResult] = []
    with output.progress(trials, "verify --kill --rejoin") as advance:
        given = {name: value for name, value in sizes.items() if value is not None}
        for result in run_rejoins(trials=trials, seed=seed, **given):
            advance(f"verify --kill --rejoin: rank {result.victim}")
            results.append(result)
            output.row({"kind": "rejoin", "ok": result.ok, **dataclasses.asdict(result)})
            for problem in result.problems:
                output.text(f"FAILED trial {result.trial}, seed {seed}: {problem}", style="bold red")
    rows = []
    for what in ("notice_us", "out_us", "right_us", "full_us"):
        for by in ("spare", "new"):
            values = [getattr(result, what) for result in results if result.by == by and result.ok]
            p50, p99, worst = percentile(values, 0.5), percentile(values, 0.99), max(values, default=0.0)
            rows.append((f"{what[:-3]}, {by}", str(len(values)), f"{p50:.0f}", f"{p99:.0f}", f"{worst:.0f}"))
            row = {"kind": "times", "what": what, "by": by, "count": len(values)}
            output.row({**row, "p50_us": p50, "p99_us": p99, "max_us": worst})
    failed = sum(not result.ok for result in results) + (len(results) < trials)
    witnessed = [result.witness.rss_bytes for result in results if result.witness is not None]
    growth = slope(witnessed[len(witnessed) // 2 :])
    summary = {"kind": "summary", "ok": not failed, "trials": trials, "failed": failed, "rss_bytes_per_kill": growth}
    output.row(summary)
    output.table("kill -9, from the kill", ("until, place taken by", "count", "p50", "p99", "max"), rows)
    output.text(
        f"verify --kill --rejoin: {failed} of {trials} kills FAILED"
        if failed
        else f"verify --kill --rejoin: {trials} kills ok: bits right, nothing left, {growth:.0f} bytes more a kill",
        style="bold red" if failed else "green",
    )
    return not failed
