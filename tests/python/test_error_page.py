"""Guards against an errors page whose texts are no longer those of the code: makes each error and compares."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
LOGGED = re.compile(" left dispatch, |; seen in |: waiting for rank")
MADE = multiprocessing.get_context("fork").Barrier(2)


def make(comm: weft.Communicator, **changes: object) -> weft.ExpertParallel:
    arguments = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 4, "deadline_s": 20.0}
    return weft.ExpertParallel(comm, **(arguments | changes))  # type: ignore[arg-type]


def rows() -> torch.Tensor:
    return torch.ones(4, 64, dtype=torch.bfloat16)


def picks() -> torch.Tensor:
    return torch.arange(8).view(4, 2)


def text_of(call: Callable[[], object]) -> str:
    try:
        call()
    except weft.Error as error:
        return str(error)
    return "no error"


def wrong_calls(comm: weft.Communicator) -> list[str]:
    """Every error after which the communicator stays usable, on rank 0 or on both."""
    ep = make(comm)
    texts = [
        text_of(lambda: ep.dispatch(rows(), picks().float())),
        text_of(lambda: ep.dispatch(rows(), picks(), layout="masked")),
        text_of(lambda: make(comm, num_experts=7)),
        text_of(lambda: make(comm, top_k=2 + comm.rank)),
        text_of(lambda: ep.dispatch(rows(), picks(), layout="rank_major" if comm.rank else "expert_major")),
        text_of(lambda: ep.dispatch(rows().requires_grad_(), picks(), quantize="fp8")),
    ]
    ids = picks()
    ids[1, 1] = 99
    r = ep.dispatch(rows(), ids)
    texts.append(text_of(lambda: ep.combine(r.x, r.handle)))
    ep.combine(r.x, r.handle)
    r = ep.dispatch(rows(), picks() * 0, layout="masked", capacity=3)
    ep.combine(r.x, r.handle)
    texts.append(text_of(ep.check))
    other = make(comm)
    texts.append(text_of(lambda: other.combine(r.x, r.handle)))
    other.close()
    texts.append(text_of(lambda: other.dispatch(rows(), picks())))
    comm.rebuild(range(comm.num_ranks))
    texts.append(text_of(lambda: ep.combine(r.x, r.handle)))
    return texts


def wrong_variables() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1025")
        too_many = text_of(weft.Communicator.from_env)
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("MASTER_ADDR", "localhost")
        patch.delenv("MASTER_PORT", raising=False)
        return [too_many, text_of(weft.Communicator.from_env)]


def late_peer(comm: weft.Communicator) -> str:
    ep = make(comm, deadline_s=1.0)
    if comm.rank == 1:
        while not comm.broken:
            time.sleep(0.01)
    return text_of(lambda: ep.dispatch(rows(), picks()))


def dead_peer(comm: weft.Communicator) -> str:
    ep = make(comm)
    MADE.wait(60)  # a rank that still makes its object would raise PeerLost there
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return text_of(lambda: ep.dispatch(rows(), picks()))


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelno, record.getMessage()))


def logged(comm: weft.Communicator, work: Callable[[weft.Communicator], str]) -> list[tuple[int, str]]:
    lines = Lines()
    logging.getLogger("weft").addHandler(lines)
    work(comm)
    return lines.seen


def closed_peer(comm: weft.Communicator) -> str:
    ep = make(comm)
    if comm.rank == 1:
        comm.close()
        return ""
    return text_of(lambda: ep.dispatch(rows(), picks()))


def refused_peer(comm: weft.Communicator) -> str:
    ep = make(comm, deadline_s=1.0)
    if comm.rank == 1:
        text_of(lambda: ep.dispatch(rows(), picks().float()))
        while not comm.broken:
            time.sleep(0.01)
    return text_of(lambda: ep.dispatch(rows(), picks()))


def failed_peer(comm: weft.Communicator) -> str:
    ep = make(comm)
    if comm.rank == 1:
        with comm:
            raise ValueError("no data")
    return text_of(lambda: ep.dispatch(rows(), picks()))


def other_order(comm: weft.Communicator) -> str:
    layers = [make(comm), make(comm)]
    made = [layer.dispatch(rows(), picks()) for layer in layers]
    return text_of(lambda: layers[comm.rank].combine(made[comm.rank].x, made[comm.rank].handle))


def left_out(comm: weft.Communicator) -> str:
    ep = make(comm)
    MADE.wait(60)  # a rank that still makes its object would raise Evicted there
    if comm.rank == 0:
        comm.rebuild([0])
    text = text_of(lambda: ep.dispatch(rows(), picks())) if comm.rank == 1 else ""
    MADE.wait(60)  # its end would be a PeerLost
    return text


def aborting_peer(comm: weft.Communicator) -> str:
    ep = make(comm)
    if comm.rank == 0:
        comm.abort("the watchdog found no progress")
    return text_of(lambda: ep.dispatch(rows(), picks()))


def tensor_without_memory(comm: weft.Communicator) -> str:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    weights = DTensor.from_local(torch.ones(4, 2), init_device_mesh("cpu", (1,)))
    return text_of(lambda: make(comm).dispatch(rows(), picks(), weights))


def documented() -> set[str]:
    """The texts on the page, without the log lines of a timeout."""
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return {line for block in blocks for line in block.splitlines() if not LOGGED.search(line)}


def test_texts_are_those_of_the_code() -> None:
    seen = {*weft.spawn(wrong_calls, num_ranks=2)[0], *wrong_variables()}
    for work in (late_peer, dead_peer, closed_peer, refused_peer, failed_peer, other_order):
        seen.add(weft.spawn(work, num_ranks=2, on_failure="return")[0])
    for work in (aborting_peer, left_out):
        seen.add(weft.spawn(work, num_ranks=2)[1])
    seen.add(weft.spawn(tensor_without_memory, num_ranks=1)[0])
    assert documented() == seen


@pytest.mark.parametrize("work", [late_peer, dead_peer])
def test_the_log_says_in_plain_words_what_happened(work: Callable[[weft.Communicator], str]) -> None:
    seen: list[tuple[int, str]] = []
    for _ in range(30):  # of a death that is known before the call nothing is logged
        seen = seen or weft.spawn(logged, num_ranks=2, args=(work,), on_failure="return")[0]
    expected = {
        late_peer: "rank 1 did not come before the deadline of rank 0; seen in dispatch by rank 0",
        dead_peer: "rank 1 is gone (process ended); seen in dispatch by rank 0",
    }[work]
    assert seen == [(logging.WARNING, expected)]
    assert f"\n{expected}\n" in PAGE.read_text()


def test_words_of_the_protocol_are_logged_at_level_debug() -> None:
    code = """
import weft
from test_error_page import late_peer
weft.spawn(late_peer, num_ranks=2, on_failure="return")
"""
    folder = str(Path(__file__).parent)
    paths = os.pathsep.join([str(Path(weft.__file__).parents[1]), folder])
    env = {**os.environ, "PYTHONPATH": paths, "WEFT_LOG_LEVEL": "debug"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=True
    )
    assert "DEBUG rank 0 left dispatch, epoch 1, sequence 1, phase count; sequences seen: rank 1:0" in done.stderr
