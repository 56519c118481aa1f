"""Runs the demo: prepares, starts the ranks, runs the baseline, puts the report together."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

import weft
from weft.demo.baseline import train_baseline
from weft.demo.config import DemoConfig
from weft.demo.events import EventPipe, weft_log_to
from weft.demo.live import LiveView
from weft.demo.plot import require_matplotlib, write_plots
from weft.demo.report import DemoReport
from weft.demo.text import load_text
from weft.demo.train import RankResult, train_rank

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Start:
    """How the ranks are started, and why, for people."""

    device: Literal["cpu", "cuda"]
    isolation: Literal["process", "thread"]
    why: str


def run(config: DemoConfig, console: Console | None, *, verbose: bool = False) -> DemoReport:
    """See `weft.demo.run_demo`."""
    start = time.perf_counter()
    if config.plot is not None:
        require_matplotlib()
        _prepare_folder(config.plot)
    if config.record is not None:
        _require_folder(config.record)
    text = load_text(config.text, min_bytes=config.context + 2)
    importlib.import_module("torch._dynamo")  # torch's optimizers want it: once here, not in every rank
    start_as = choose_start(config, torch.cuda.device_count() if config.device != "cpu" else 0)
    view = LiveView(console, config, verbose=verbose)
    view.begin(text.source, start_as.why)
    quiet = nullcontext if console is None else weft_log_to
    with view.progress("Weft", config.steps), EventPipe(view.listen) as events, quiet(events):
        outcomes = weft.spawn(
            train_rank,
            num_ranks=config.num_ranks,
            args=(config, text, events),
            device=start_as.device,
            isolation=start_as.isolation,
            on_failure="return",
            placement=config.placement,
        )
    results = survivors(config, outcomes)
    baseline = None
    if config.baseline:
        lost = {rank: loss.step for loss in results[0].lost for rank in loss.ranks}
        with view.progress("baseline", config.steps), one_thread():
            baseline = train_baseline(config, text, lost=lost, device=start_as.device, on_step=view.step)
    report = DemoReport(
        config=config,
        text_source=text.source,
        text_bytes=len(text.data),
        why_here=start_as.why,
        ranks=results,
        baseline=baseline,
        killed_ns=view.killed_ns,
        total_s=time.perf_counter() - start,
        plots=(),
        num_cores=len(os.sched_getaffinity(0)),
    )
    return report if config.plot is None else report.with_plots(write_plots(report, config.plot))


def choose_start(config: DemoConfig, num_gpus: int) -> Start:
    """GPUs if there are any: one rank each, or all ranks as threads on a single one. Raises `weft.Unsupported`."""
    ranks = f"{config.num_ranks} ranks as processes"
    if num_gpus == 0:
        if config.device == "cuda":
            raise weft.Unsupported("device='cuda'", have="no GPU that torch can use", need="at least one")
        asked = "as asked" if config.device == "cpu" else "torch finds no GPU here"
        return Start("cpu", "process", f"{ranks} on the CPU ({asked})")
    if num_gpus == 1:
        if config.kill_rank is None:
            return Start("cuda", "thread", f"{config.num_ranks} ranks as threads on the one GPU of this machine")
        if config.device == "cuda":
            raise weft.Unsupported(
                f"kill_rank={config.kill_rank} with device='cuda'",
                have="one GPU, which the ranks share as threads of one process",
                need="two GPUs, or device='cpu'",
            )
        return Start("cpu", "process", f"{ranks} on the CPU (on one GPU they would be threads, which can't be killed)")
    return Start("cuda", "process", f"{ranks} on {min(num_gpus, config.num_ranks)} GPUs")


def survivors(config: DemoConfig, outcomes: list[RankResult | BaseException]) -> tuple[RankResult, ...]:
    """The results of the ranks that lived; raises what ended one that was not meant to die."""
    results = []
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, RankResult):
            results.append(outcome)
        elif rank != config.kill_rank:
            raise outcome
    return tuple(results)


@contextmanager
def one_thread() -> Iterator[None]:
    """The baseline has one thread, as each rank has: torch's threads spin, which harms where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_folder(file: Path) -> None:
    folder = file.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise weft.InvalidArgument(f"record={str(file)!r}: the folder {str(folder)!r} must exist and be writable")


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise weft.InvalidArgument(
            f"plot={str(folder)!r}: must be a folder that can be written ({error.strerror})"
        ) from error
