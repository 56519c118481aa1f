"""Guards against survivors that hang, get a CUDA error, name the wrong rank or lose memory when a rank is killed.

python tests/gpu/window_kills.py [--ranks 4] [--kills 5] starts a process a rank (GPU rank % number of GPUs) for each
kill; one JSON object a line, exit 1 if one failed. Also: Ctrl-C in a wait, and processes that end with windows open.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import window_ranks as ranks

from weft import _load, errors, reference

_DEADLINE_S = 20.0


def connect(index: int, pipe: Any) -> tuple[Any, Any]:
    """Communicator and GPU of a process."""
    native = _load.native()
    torch.cuda.set_device(index % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    listener = native.Listener()
    pipe.send(listener.endpoint())
    comm = native.Communicator.connect(index, pipe.recv(), listener, 60.0)
    return comm, native.Gpu(torch.cuda.current_device(), **ranks.paths())


def used_mib(gpu: int) -> int:
    """Memory of a GPU that is in use, by whomever."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used) >> 20


def survive(index: int, num_ranks: int, pipe: Any) -> dict[str, Any]:
    """Dispatch until a peer dies, then go on without it."""
    comm, gpu = connect(index, pipe)
    rank = ranks.Rank(comm, gpu, gpu.index, heap_bytes=256 << 20)
    xs, ids, weights = ranks.inputs(11, num_ranks)
    mine = [part[index].cuda() for part in (xs, ids, weights)]
    for layout in ("expert_major", "rank_major"):
        rank.dispatch(*mine, layout)
    aside, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    busy = torch.nn.functional.normalize(busy @ busy)  # loads cuBLAS, in which time no call could raise
    torch.cuda.synchronize()
    comm.exchange(1, b"", 60.0)
    pipe.send("running")
    error: BaseException | None = None
    calls = 0
    begin = time.monotonic()
    while error is None and time.monotonic() - begin < 30:
        with torch.cuda.stream(aside):
            busy = torch.nn.functional.normalize(busy @ busy)
        try:
            rank.dispatch(*mine, ("rank_major", "expert_major")[calls % 2], capacity=(-1, 400)[calls // 2 % 2])
            if calls % 4 == 3:
                torch.cuda.current_stream().synchronize()
                rank.window.check()
            calls += 1
        except errors.Error as caught:
            error = caught
    seen_ns = time.monotonic_ns()
    if not isinstance(error, errors.PeerLost):
        raise AssertionError(f"instead of PeerLost: {error!r}")
    left = [peer for peer in range(num_ranks) if peer not in error.ranks]
    grave = next(iter(error.ranks)) % torch.cuda.device_count()
    time.sleep(0.5)  # for the system to take the dead process down
    before = used_mib(grave)
    comm.rebuild(left, 60.0)
    want = reference.dispatch(xs, ids, weights, num_experts=rank.shape["num_experts"], active_ranks=left)[index]
    bad = ranks.differences(rank.dispatch(*mine), want, "rank_major")
    torch.cuda.synchronize()
    finite = bool(torch.isfinite(busy).all())
    rank.window.check()
    comm.exchange(2, b"", 60.0)
    after = used_mib(grave)
    rank.window.close()
    comm.close()
    return {
        "lost": list(error.ranks),
        "seen_ns": seen_ns,
        "calls": calls,
        "differs": bad,
        "finite": finite,
        "grave_mib": [before, after],
    }


def interrupted(index: int, num_ranks: int, pipe: Any) -> dict[str, Any]:
    """Rank 0 waits for rank 1, which never comes, and gets SIGINT; rank 1 hears of it."""
    comm, gpu = connect(index, pipe)
    rank = ranks.Rank(comm, gpu, gpu.index)
    xs, ids, weights = ranks.inputs(11, num_ranks)
    mine = [part[index].cuda() for part in (xs, ids, weights)]
    rank.dispatch(*mine)
    torch.cuda.synchronize()
    comm.exchange(1, b"", 60.0)
    pipe.send("running")
    if index == 0:
        try:
            rank.dispatch(*mine, timeout_s=20.0)
            raise AssertionError("nothing was raised")
        except KeyboardInterrupt:
            seen_ns = time.monotonic_ns()
    else:
        while not comm.broken():
            time.sleep(0.001)
        seen_ns = time.monotonic_ns()
    torch.cuda.synchronize()
    rank.window.close()
    comm.close()
    return {"seen_ns": seen_ns}


def leave_open(index: int, num_ranks: int, pipe: Any) -> dict[str, Any]:
    """End the process with everything open and a call under way."""
    comm, gpu = connect(index, pipe)
    rank = ranks.Rank(comm, gpu, gpu.index)
    xs, ids, weights = ranks.inputs(11, num_ranks)
    mine = [part[index].cuda() for part in (xs, ids, weights)]
    kept = [rank.dispatch(*mine, capacity=200) for _ in range(2)]
    globals()["kept_for_exit"] = (rank, kept, mine)
    pipe.send("running")
    return {}


def run(body: Callable[[int, int, Any], dict[str, Any]], index: int, num_ranks: int, pipe: Any) -> None:
    """Body of a process."""
    try:
        pipe.send(body(index, num_ranks, pipe))
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"failed": repr(error)[:500]})


def start(body: Callable[[int, int, Any], dict[str, Any]], num_ranks: int) -> list[tuple[Any, Any]]:
    """Processes that have connected and say that they run."""
    context = mp.get_context("spawn")
    found = []
    for index in range(num_ranks):
        here, there = context.Pipe()
        process = context.Process(target=run, args=(body, index, num_ranks, there))
        process.start()
        found.append((process, here))
    endpoints = [receive(pipe) for _, pipe in found]
    for _, pipe in found:
        pipe.send(endpoints)
    for _, pipe in found:
        message = receive(pipe)
        if message != "running":
            raise AssertionError(str(message))
    return found


def receive(pipe: Any, timeout_s: float = 60.0) -> Any:
    """A message in time."""
    if not pipe.poll(timeout_s):
        raise TimeoutError("a rank hangs")
    return pipe.recv()


def kill_one(num_ranks: int, seed: int) -> dict[str, Any]:
    """One SIGKILL at a random moment."""
    chance = random.Random(seed)
    unused = [used_mib(gpu) for gpu in range(torch.cuda.device_count())]
    processes = start(survive, num_ranks)
    victim = chance.randrange(num_ranks)
    grave = victim % torch.cuda.device_count()
    time.sleep(chance.uniform(0.01, 0.4))
    killed_ns = time.monotonic_ns()
    os.kill(processes[victim][0].pid, signal.SIGKILL)
    answers = [receive(pipe) for index, (_, pipe) in enumerate(processes) if index != victim]
    for process, _ in processes:
        process.join(30)
    codes = [process.exitcode for index, (process, _) in enumerate(processes) if index != victim]
    problems = [answer["failed"] for answer in answers if "failed" in answer]
    good = [answer for answer in answers if "failed" not in answer]
    problems += [f"lost {answer['lost']}" for answer in good if answer["lost"] != [victim]]
    problems += [str(answer["differs"]) for answer in good if answer["differs"] or not answer["finite"]]
    if num_ranks <= torch.cuda.device_count():  # the victim's GPU was its alone
        problems += [str(answer["grave_mib"]) for answer in good if answer["grave_mib"][1] - unused[grave] > 64]
    else:  # its heap of 256 MiB goes when the others have rebuilt
        problems += [
            str(answer["grave_mib"]) for answer in good if answer["grave_mib"][0] - answer["grave_mib"][1] < 200
        ]
    problems += [f"exit codes {codes}" for _ in [0] if any(codes)]
    return {
        "victim": victim,
        "ok": not problems,
        "problems": problems,
        "detection_ms": [round((answer["seen_ns"] - killed_ns) / 1e6, 1) for answer in good],
        "calls": [answer["calls"] for answer in good],
        "grave_mib": [unused[grave], *(good[0]["grave_mib"] if good else [])],
    }


def interrupt(num_ranks: int) -> dict[str, Any]:
    """SIGINT to a rank that waits."""
    processes = start(interrupted, num_ranks)
    time.sleep(0.5)
    sent_ns = time.monotonic_ns()
    os.kill(processes[0][0].pid, signal.SIGINT)
    answers = [receive(pipe) for _, pipe in processes]
    for process, _ in processes:
        process.join(30)
    problems = [answer["failed"] for answer in answers if "failed" in answer]
    late = [round((answer["seen_ns"] - sent_ns) / 1e6, 1) for answer in answers if "failed" not in answer]
    return {"ok": not problems and max(late) < 200, "problems": problems, "after_ms": late}


def exits(num_ranks: int) -> dict[str, Any]:
    """Processes that end with everything open."""
    processes = start(leave_open, num_ranks)
    begin = time.monotonic()
    for process, _ in processes:
        process.join(30)
    codes = [process.exitcode for process, _ in processes]
    for process, _ in processes:
        if process.is_alive():
            process.kill()
    return {"ok": codes == [0] * num_ranks, "codes": codes, "s": round(time.monotonic() - begin, 2)}


def main() -> int:
    """Print a line for each check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    failed = 0
    checks: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("interrupt", lambda: interrupt(2)),
        ("exits", lambda: exits(2)),
        *[(f"kill {seed}", lambda seed=seed: kill_one(options.ranks, seed)) for seed in range(options.kills)],
    ]
    for name, check in checks:
        begin = time.monotonic()
        line: dict[str, Any] = {"check": name}
        try:
            line.update(check())
        except BaseException as error:
            traceback.print_exc()
            line.update(ok=False, error=repr(error)[:500])
        failed += not line["ok"]
        print(json.dumps({**line, "took_s": round(time.monotonic() - begin, 2)}), flush=True)
    for child in mp.active_children():
        child.kill()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
