"""The report of the demo for people: what happened, in the order in which a newcomer asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from weft.demo.chart import area, bar
from weft.demo.report import LOAD_STEPS, DemoReport, mean_of_ends

if TYPE_CHECKING:
    from weft.demo.train import Loss

_CHART_HEIGHT = 7


def show_report(report: DemoReport, console: Console) -> None:
    """Prints all parts of the report that apply."""
    _engine(report, console)
    _losses(report, console)
    if report.lost_ranks:
        _story(report, console)
    _generated(report, console)
    _load(report, console)
    _traffic(report, console)
    _end(report, console)


def _head(console: Console, title: str, remark: str = "") -> None:
    fits = len(title) + 2 + len(remark) <= console.width
    console.print(
        f"\n[bold]{title}[/]" + (f"{'  ' if fits else chr(10)}[dim]{escape(remark)}[/]" if remark else ""),
        highlight=False,
    )


def _engine(report: DemoReport, console: Console) -> None:
    _head(console, "Engine")
    console.print(report.ranks[0].engine, highlight=False, markup=False)
    console.print(f"{report.why_here}.", highlight=False, markup=False)
    _head(console, "Placement", f"placement={report.config.placement!r}; docs/placement.md says why")
    ranks_of: dict[str, list[int]] = {}
    for rank in report.ranks:
        ranks_of.setdefault(rank.placement, []).append(rank.rank)
    for placement, ranks in ranks_of.items():
        console.print(f"{names_of(ranks)}: {placement}", highlight=False, markup=False)
    if report.num_cores is not None and report.num_cores < report.config.num_ranks and report.ranks[0].device == "cpu":
        console.print(
            f"{report.config.num_ranks} ranks share {report.num_cores} CPU{'s' * (report.num_cores != 1)}: they wait "
            "for each other's turn, so times say little about Weft.",
            highlight=False,
        )


def names_of(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-3", "ranks 0, 2, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = ranks == list(range(ranks[0], ranks[-1] + 1))
    return "ranks " + (f"{ranks[0]}-{ranks[-1]}" if whole else ", ".join(map(str, ranks)))


def _losses(report: DemoReport, console: Console) -> None:
    _head(console, "Loss", "mean over the ranks, in nats per byte; guessing blindly is 5.55")
    width = max(20, min(console.width - 10, 84, report.config.steps))
    for line in area(report.losses, width=width, height=_CHART_HEIGHT):
        console.print(line, style="cyan", highlight=False, markup=False)
    axis = f"step 0{' ' * (width - 6 - len(str(report.config.steps)))}{report.config.steps}"
    for rank, step in report.lost_ranks.items():
        at = step * width // report.config.steps
        mark = f"▲ rank {rank} lost" if at < width // 2 else f"rank {rank} lost ▲"
        console.print(" " * (8 + at - (0 if at < width // 2 else len(mark) - 1)) + mark, style="red", highlight=False)
    console.print(" " * 8 + axis, style="dim", highlight=False)
    if report.baseline is not None:
        _comparison(report, console)


def _comparison(report: DemoReport, console: Console) -> None:
    steps, baseline = report.config.steps, report.baseline.losses if report.baseline else ()
    lost = report.lost_ranks.values()
    parts = max(1, min(6, (console.width - 20) // 10 - 1 - len(lost)))
    shown = sorted({0, *(steps * i // parts for i in range(1, parts)), *lost, steps - 1})
    table = Table(title="The same on one rank, in plain torch without Weft", title_justify="left", title_style="bold")
    for column in ("step", *(f"{step}" for step in shown)):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row(f"Weft, {report.config.num_ranks} ranks", *(f"{report.losses[step]:.4f}" for step in shown))
    table.add_row("plain torch", *(f"{baseline[step]:.4f}" for step in shown))
    differences, config = report.differences, report.config
    table.add_row("difference", *(f"{differences[step]:.4%}" for step in shown))
    console.print(table)
    console.print(
        f"Largest difference: {report.early_difference:.4%} in the first {config.early_steps} steps (allowed: "
        f"{config.early_tolerance:.1%}), {report.overall_difference:.2%} between means of {config.window} steps "
        f"(allowed: {config.tolerance:.0%}). "
        "Sums in another order round differently; in time that turns a close choice of experts the other way.",
        highlight=False,
    )


def _story(report: DemoReport, console: Console) -> None:
    for loss in report.ranks[0].lost:
        names = ", ".join(str(rank) for rank in loss.ranks)
        _head(console, f"How rank {names} was lost, and what the others did")
        for number, line in enumerate(_story_of(loss, names, report), 1):
            console.print(f"  {number}. {line}", highlight=False)


def _story_of(loss: Loss, names: str, report: DemoReport) -> list[str]:
    config, survivors = report.config, [rank.rank for rank in report.ranks]
    seen_by = {rank.rank: seen for rank in report.ranks for seen in rank.lost if seen.ranks == loss.ranks}
    lines = [f"In step {loss.step} of {config.steps}, rank {names} was killed (SIGKILL) inside a call of Weft."]
    times = [(rank, report.seen_after_ms(seen.seen_ns)) for rank, seen in seen_by.items()]
    when = ", ".join(f"rank {rank}" + ("" if ms is None else f" after {ms:.1f} ms") for rank, ms in times)
    lines.append(f"Instead of waiting for ever, the others got an exception: {when}.")
    lines.append(f"It says: [yellow]weft.PeerLost: {escape(loss.error)}[/]")
    rebuild_ms = max(seen.rebuild_ms for seen in seen_by.values())
    lines.append(f"They called comm.rebuild({escape(str(survivors))}), which took {rebuild_ms:.1f} ms.")
    gone = len(loss.ranks) * config.experts_per_rank
    lines.append(
        f"They told the gates that {gone} of the {config.experts} experts of each layer are gone, and repeated step "
        f"{loss.step}. No process was restarted."
    )
    before, after = report.losses[: loss.step], report.losses[loss.step :]
    lines.append(
        f"Loss just before: {before[-1] if before else float('nan'):.3f}; without the lost experts: {after[0]:.3f}; "
        f"in the end: {mean_of_ends(after)[1]:.3f}."
    )
    return lines


def _generated(report: DemoReport, console: Console) -> None:
    written = [(rank.rank, rank.generated.decode("utf-8", "replace")) for rank in report.ranks]
    if report.config.generate == 0:
        return
    _head(
        console, "Text the model writes", f"each rank continues {report.config.prompt!r}, all experts working together"
    )
    for rank, text in written:
        printable = "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
        console.print(Panel(escape(printable), title=f"rank {rank}", title_align="left", border_style="dim"))


def _load(report: DemoReport, console: Console) -> None:
    layers, alive, per_rank = report.final_load(), report.alive_experts(), report.config.experts_per_rank
    total = max(1, sum(map(sum, layers)))
    _head(console, "Expert load", f"picks in the last {min(LOAD_STEPS, report.config.steps)} steps, all layers")
    table = Table()
    for column in ("rank", "experts", "share", "", "min", "mean", "max"):
        table.add_column(column, justify="left" if column == "" else "right")
    shares = {rank.rank: _of_rank(layers, rank.rank, per_rank) for rank in report.ranks}
    largest = max(sum(picks) for picks in shares.values())
    width = max(4, min(20, console.width - 60))
    for rank, picks in shares.items():
        experts = f"{rank * per_rank}-{(rank + 1) * per_rank - 1}"
        table.add_row(str(rank), experts, f"{sum(picks) / total:.1%}", bar(sum(picks), largest, width), *_spread(picks))
    everything = [layer[expert] for layer in layers for expert in alive]
    table.add_row("all", str(len(alive)), "100%", "", *_spread(everything), style="bold")
    console.print(table)
    now, before = _imbalance(everything), _imbalance([picks for layer in report.load(0, LOAD_STEPS) for picks in layer])
    text = f"The busiest expert has {now:.1f} times the mean"
    if report.config.steps >= 2 * LOAD_STEPS:
        text += f", in the first {LOAD_STEPS} steps it had {before:.1f}"
    text += ": after every step the gate's bias moves a little towards an even load."
    console.print(text, highlight=False)


def _of_rank(layers: list[list[int]], rank: int, per_rank: int) -> list[int]:
    return [picks for layer in layers for picks in layer[rank * per_rank : (rank + 1) * per_rank]]


def _spread(picks: list[int]) -> tuple[str, str, str]:
    return f"{min(picks):,}", f"{sum(picks) / len(picks):,.0f}", f"{max(picks):,}"


def _imbalance(picks: list[int]) -> float:
    return max(picks) * len(picks) / max(1, sum(picks))


def _traffic(report: DemoReport, console: Console) -> None:
    _head(console, "What Weft moved and how long it took", "whole training; rows and MB are what dispatch sent")
    table = Table()
    for column in ("rank", "tokens", "rows", "MB", "dispatch", "combine", "training", "in Weft"):
        table.add_column(column, justify="right")
    for rank in report.ranks:
        moved = rank.traffic
        table.add_row(
            str(rank.rank),
            f"{moved.num_tokens:,}",
            f"{moved.rows_sent:,}",
            f"{moved.bytes_sent / 1e6:,.0f}",
            f"{moved.dispatch_s:.1f} s",
            f"{moved.combine_s:.1f} s",
            f"{rank.train_s:.1f} s",
            f"{(moved.dispatch_s + moved.combine_s) / rank.train_s:.0%}",
        )
    console.print(table)
    console.print("Time in Weft includes waiting for ranks that are still computing.", style="dim", highlight=False)


def _end(report: DemoReport, console: Console) -> None:
    for plot in report.plots:
        console.print(f"Picture: {plot}", highlight=False, markup=False)
    if report.config.record is not None:
        console.print(
            f"Routing trace, a file a rank; replay it with: weft bench --trace {report.config.record}",
            highlight=False,
            markup=False,
        )
    baseline = "" if report.baseline is None else f", the one-rank baseline {report.baseline.train_s:.1f} s"
    train_s = max(rank.train_s for rank in report.ranks)
    first, last = mean_of_ends(report.losses)
    console.print(
        f"\nThe loss fell from {first:.2f} to {last:.2f}. Training took {train_s:.1f} s{baseline}, all together "
        f"{report.total_s:.1f} s.",
        highlight=False,
    )
    for problem in report.problems:
        console.print(f"[bold red]Problem:[/] {escape(problem)}", highlight=False)
    if report.ok:
        console.print("[bold green]All is as it should be.[/]", highlight=False)
