"""Guards against processes that die at one point of a kernel, or are late there, and against one that is stopped and
wakes up too late.

Points: some of a rank's headers have gone out, or some of its rows. The victim's kernels are compiled from a changed
copy of the headers; they stop there, in the first operation behind calls that went well: for good, and the process is
killed, or for a while.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_streams import EXPERTS, HIDDEN, TOKENS, TOP_K, inputs

import weft
from weft import reference
from weft.kernels import paths as kernel_paths

NUM_RANKS, VICTIM, GOOD_CALLS, GIVE_UP_S, LATE_S = 4, 1, 2, 60.0, 2.0
LEFT = [rank for rank in range(NUM_RANKS) if rank != VICTIM]
CAPACITY = NUM_RANKS * TOKENS


class Point(NamedTuple):
    """Where block 0 of a kernel stops: in front of some text of a file below include/weft/kernels."""

    mode: str
    file: str
    text: str
    only_if: str = "true"
    is_through: tuple[int, ...] = ()  # ranks that have all they need, so that their call ends well

    def num_ended(self, rank: int) -> int:
        """Dispatches and combines, after those that went well, that end well on a rank that is left."""
        return int("combine" in self.file) + int(rank in self.is_through)


NOTIFY, CALL = "peers().notify(", "peers.notify_call("
POINTS = {
    "dispatch, no counts are told": Point("throughput", "dispatch/count.cuh", f"if (this->is_peer(peer)) {CALL}"),
    "dispatch, one peer has the counts": Point(
        "throughput", "dispatch/count.cuh", f"if (this->is_peer(peer)) {CALL}", "peer != 0"
    ),
    "dispatch, some rows are there": Point(
        "throughput",
        "dispatch/store_by_rank.cuh",
        "if (lane == 0) this->peers().put(s.x[to] + row_there",
        "row_there > s.start[to] + 4",
    ),
    "dispatch, rows are not announced": Point(
        "throughput", "dispatch/entry.cuh", f"if (state_.is_peer(peer)) state_.{NOTIFY}"
    ),
    "dispatch, one peer knows of its rows": Point(
        "throughput", "dispatch/entry.cuh", f"if (state_.is_peer(peer)) state_.{NOTIFY}", "peer != 0", is_through=(0,)
    ),
    "combine, nothing is told": Point("throughput", "combine/entry.cuh", f"{CALL}b_.flight"),
    "combine, some rows are there": Point(
        "throughput", "combine/push.cuh", "const auto place = landing_of(item", "item.index > 2"
    ),
    "combine, the end is not announced": Point("throughput", "combine/entry.cuh", f"if (has_peer) b_.{NOTIFY}"),
    "combine, one peer knows of the end": Point(
        "throughput", "combine/entry.cuh", f"if (has_peer) b_.{NOTIFY}", "peer != 0", is_through=(0,)
    ),
    "small dispatch, nothing is told": Point(
        "latency", "small/dispatch_entry.cuh", "if (blockIdx.x == 0 && tells(s_.lane)) s_.peers().notify_call"
    ),
    "small dispatch, some rows are there": Point(
        "latency",
        "small/dispatch_send.cuh",
        "const Picks picks = picks_of(token);\n      if constexpr (kConfig.has_n",
        "token > 2",
    ),
    "small dispatch, one peer knows of its rows": Point(
        "latency", "small/dispatch_entry.cuh", f"s_.{NOTIFY}Phase::kSend", "s_.lane != 0", is_through=(0,)
    ),
    "small combine, nothing is told": Point(
        "latency", "small/combine_entry.cuh", f"if (block == 0 && tells(flight)) {CALL}"
    ),
    "small combine, one peer knows of its sums": Point(
        "latency",
        "small/combine_entry.cuh",
        "if (tells(flight)) peers.notify(Phase::kReduce",
        "b_.lane != 0",
        is_through=(0,),
    ),
}
FLIGHTS = {"combine/entry.cuh": "b_.flight", "combine/push.cuh": "b_.flight", "small/dispatch_entry.cuh": "s_.flight"}


class Board:
    """Words of a page that all ranks share, of which a GPU can write one."""

    PID, BEFORE, AFTER, AWAKE, LAST, ENDED = range(6)  # ENDED + rank: its operations that ended well
    READY = ENDED + NUM_RANKS  # READY + rank: its first calls went well

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def get(self, idx: int) -> int:
        return int(struct.unpack_from("q", self._page, 8 * idx)[0])

    def set(self, idx: int, value: int) -> None:
        struct.pack_into("q", self._page, 8 * idx, value)

    def tensor(self) -> torch.Tensor:
        """The words, pinned: a copy to them needs no thread of this process."""
        words = torch.frombuffer(self._page, dtype=torch.int64)
        assert torch.cuda.cudart().cudaHostRegister(words.data_ptr(), mmap.PAGESIZE, 0) == 0
        return words


def changed_paths(folder: Path, point: Point, reached: int, late_s: float | None = None) -> dict[str, str]:
    """`kernel_paths.compiler_paths` with a copy of the headers in which the point stops, for good or once for so long,
    and no cache. Who gets there says so in the word at the address `reached`.
    """
    paths = kernel_paths.compiler_paths(cache="")
    include = Path(shutil.copytree(paths["include"], folder / "include"))
    file = include / "weft" / "kernels" / point.file
    text = file.read_text()
    assert text.count(point.text) == 1, f"{point.file} has this {text.count(point.text)} times: {point.text}"
    operation = f"{FLIGHTS.get(point.file, 'flight')}.turn.sequence"
    word = f"*reinterpret_cast<volatile u64*>({reached}ull)"
    stop = f"if (blockIdx.x == 0 && {operation} > {2 * GOOD_CALLS} && ({point.only_if})) {{\n"
    if late_s is None:
        stop += f"{word} = 1; for (;;) ptx::nanosleep(1000); }}"
    else:
        stop += f"if ({word} == 0) for (const u64 from = ptx::globaltimer_ns(); ptx::globaltimer_ns() - from < "
        stop += f"{int(late_s * 1e9)}ull;) ptx::nanosleep(1000);\n{word} = 1; }}"
    file.write_text(text.replace(point.text, f"{stop}\n{point.text}"))
    return {**paths, "include": str(include)}


class Calls:
    """A dispatch and combine of the same data again and again, and what they must give to the ranks that are left."""

    def __init__(self, comm: weft.Communicator, mode: str) -> None:
        shape = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens_per_rank": TOKENS}
        self.comm, self.mode = comm, mode
        self.ep = weft.ExpertParallel(comm, **shape, num_sms=4, deadline_s=2 * GIVE_UP_S)  # type: ignore[arg-type]
        self._inputs = [[part[comm.rank].to(comm.device) for part in inputs(seed)] for seed in range(3)]
        self._received: weft.Dispatched | None = None
        self._rows, self._sums = [], []
        for seed in range(3):
            given = reference.dispatch(*inputs(seed), num_experts=EXPERTS, active_ranks=LEFT)
            self._rows.append(given[comm.rank].x)
            self._sums.append(reference.combine([each.x for each in given], given)[comm.rank])

    def dispatch(self, seed: int = 0) -> weft.Dispatched:
        """With a capacity: the host does not wait."""
        return self.ep.dispatch(*self._inputs[seed], capacity=CAPACITY, mode=self.mode)

    def combine(self, r: weft.Dispatched, deadline_s: float | None = None) -> torch.Tensor:
        """Of an ordinary tensor: large batches push it to their owners."""
        return self.ep.combine(r.x.clone(), r.handle, mode=self.mode, deadline_s=deadline_s)

    def step(self) -> None:
        """The next of both, and an error if there was one."""
        received, self._received = self._received, None
        if received is None:
            self._received = self.dispatch()
        else:
            self.combine(received)
        self.check()

    def run(self) -> None:
        """Both."""
        self.step()
        self.step()

    def check(self) -> None:
        """Raises what has gone wrong up to now."""
        torch.cuda.current_stream().synchronize()
        self.ep.check()

    def compare(self, seed: int) -> None:
        """Both after a rebuild, with other data than the call before: every word is right."""
        r = self.dispatch(seed)
        y = self.combine(r)
        self.check()
        rows = self._rows[seed]
        assert int(r.num_rows) == len(rows)
        assert torch.equal(r.x[: len(rows)].cpu(), rows), f"rows of data {seed}"
        assert torch.equal(y.cpu(), self._sums[seed]), f"sums of data {seed}"


def first_error(call: Callable[[], object], note: Callable[[int], None] = lambda num_calls: None) -> weft.Error:
    """Call until it raises; `note` is told how often it has not."""
    num_calls = 0
    while True:
        try:
            call()
        except weft.Error as error:
            return error
        num_calls += 1
        note(num_calls)


def wait_for_the_others(board: Board) -> None:
    """Until their first calls went well: a rank that still checks the last of them would find the victim gone there."""
    give_up_at = time.monotonic() + GIVE_UP_S
    while not all(board.get(Board.READY + rank) for rank in LEFT):
        assert time.monotonic() < give_up_at, "the first calls of another rank do not end"
        time.sleep(0.001)


def kill_at(point: Point, board: Board, reached: torch.Tensor) -> None:
    """Kill this process when it has come to the point and the others as far as they can."""
    give_up_at = time.monotonic() + GIVE_UP_S
    while int(reached) == 0 or any(board.get(Board.ENDED + rank) < point.num_ended(rank) for rank in LEFT):
        if time.monotonic() > give_up_at:
            break  # the others tell how far they came
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def spawned(work: Callable[[weft.Communicator], Any]) -> list[Any]:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process: run the tests of processes alone")
    return weft.spawn(work, NUM_RANKS, device="cuda", on_failure="return")


@pytest.mark.parametrize("name", POINTS)
def test_processes_of_which_one_dies_at_a_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others name it in the operation in which it stopped, or the next if they had all they needed; and go on."""
    point, board = POINTS[name], Board()

    def work(comm: weft.Communicator) -> tuple[int, tuple[int, ...]]:
        with tempfile.TemporaryDirectory() as folder:
            reached = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            if comm.rank == VICTIM:
                paths = changed_paths(Path(folder), point, reached.data_ptr())
                monkeypatch.setattr(kernel_paths, "compiler_paths", lambda cache=None: paths)
            return live(comm, reached)

    def live(comm: weft.Communicator, reached: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        calls = Calls(comm, point.mode)
        for _ in range(GOOD_CALLS):
            calls.run()
        board.set(Board.READY + comm.rank, 1)
        if comm.rank == VICTIM:
            wait_for_the_others(board)
            threading.Thread(target=kill_at, args=(point, board, reached)).start()
        mine = Board.ENDED + comm.rank
        error = first_error(calls.step, lambda num_calls: board.set(mine, num_calls))
        assert isinstance(error, weft.PeerLost)
        comm.rebuild(LEFT)
        for seed in range(3):
            calls.compare(seed)
        calls.ep.close()
        return board.get(mine), error.ranks

    outcomes = spawned(work)
    assert isinstance(outcomes.pop(VICTIM), weft.PeerLost)
    assert outcomes == [(point.num_ended(rank), (VICTIM,)) for rank in LEFT]


@pytest.mark.parametrize("name", POINTS)
def test_processes_of_which_one_is_late_at_a_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in the middle of the call, and all have the right bits."""
    point = POINTS[name]
    given = reference.dispatch(*inputs(0), num_experts=EXPERTS)
    sums = reference.combine([each.x for each in given], given)

    def work(comm: weft.Communicator) -> tuple[int, float]:
        with tempfile.TemporaryDirectory() as folder:
            reached = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            if comm.rank == VICTIM:
                paths = changed_paths(Path(folder), point, reached.data_ptr(), LATE_S)
                monkeypatch.setattr(kernel_paths, "compiler_paths", lambda cache=None: paths)
            calls = Calls(comm, point.mode)
            for _ in range(GOOD_CALLS):
                calls.run()
            begin = time.monotonic()
            r = calls.dispatch()
            y = calls.combine(r)
            calls.check()
            took_s = time.monotonic() - begin
            rows = given[comm.rank].x
            assert torch.equal(r.x[: len(rows)].cpu(), rows)
            assert torch.equal(y.cpu(), sums[comm.rank])
            calls.ep.close()
            return int(reached), took_s

    outcomes = spawned(work)
    assert not [each for each in outcomes if isinstance(each, BaseException)], outcomes
    assert [reached for reached, _ in outcomes] == [int(rank == VICTIM) for rank in range(NUM_RANKS)]
    assert outcomes[VICTIM][1] >= LATE_S


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_processes_of_which_one_is_stopped_and_wakes_up(mode: str) -> None:
    """Its combine begins when the others have gone on without it: it finds their headers of then, and stores its rows
    in memory that nobody else has. A GPU goes on while its process is stopped, so the combine waits behind a sleep, and
    a word in the others' memory tells that it is through.
    """
    board = Board()

    def stop(calls: Calls) -> str:
        words, ones = board.tensor(), torch.ones(1, dtype=torch.int64, device=calls.comm.device)
        r = calls.dispatch()
        calls.check()
        torch.cuda._sleep(10_000_000_000)
        words[Board.BEFORE : Board.BEFORE + 1].copy_(ones, non_blocking=True)
        calls.combine(r, deadline_s=2.0)
        words[Board.AFTER : Board.AFTER + 1].copy_(ones, non_blocking=True)
        board.set(Board.PID, os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        torch.cuda.current_stream().synchronize()
        error = first_error(calls.run)
        board.set(Board.AWAKE, 1)
        calls.ep.close()
        return type(error).__name__

    def go_on(calls: Calls) -> tuple[tuple[int, ...], bool]:
        try:
            return without_it(calls)
        except BaseException:  # or the stopped one would stay, and nobody would be told why
            if board.get(Board.PID) != 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(board.get(Board.PID), signal.SIGCONT)
            raise

    def without_it(calls: Calls) -> tuple[tuple[int, ...], bool]:
        calls.combine(calls.dispatch(), deadline_s=2.0)
        with pytest.raises(weft.PeerTimeout) as caught:
            calls.check()
        calls.comm.rebuild(LEFT)
        was_early, number, give_up_at = board.get(Board.BEFORE) == 0, 0, time.monotonic() + GIVE_UP_S
        while board.get(Board.LAST) == 0 or number < board.get(Board.LAST):
            calls.compare(number % 3)
            number += 1
            assert time.monotonic() < give_up_at, [board.get(idx) for idx in range(Board.ENDED)]
            if calls.comm.rank != LEFT[0]:
                continue
            if board.get(Board.AFTER) == 1 and board.get(Board.AWAKE) == 0:
                os.kill(board.get(Board.PID), signal.SIGCONT)
            if board.get(Board.AWAKE) == 1 and board.get(Board.LAST) == 0:
                board.set(Board.LAST, number + 3)  # the others are one call ahead at most
        calls.ep.close()
        return caught.value.peers, was_early

    def work(comm: weft.Communicator) -> Any:
        calls = Calls(comm, mode)
        for _ in range(GOOD_CALLS):
            calls.run()
        return stop(calls) if comm.rank == VICTIM else go_on(calls)

    outcomes = spawned(work)
    assert outcomes.pop(VICTIM) in ("Evicted", "PeerTimeout")
    assert outcomes == [((VICTIM,), True)] * len(LEFT)
