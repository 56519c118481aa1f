"""Guards against GPU windows that reuse memory too early, lose it, hang, or break what is beside them, on one GPU.

python tests/gpu/window_checks.py [NAME ...] runs the checks on threads of one process and on processes; one JSON object
a line, exit 1 if one failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
import window_ranks as ranks

from weft import _load, errors, reference

native = _load.native()
_CYCLES_PER_MS = 1_800_000


def expect(condition: bool, what: str) -> None:
    """A check that stays when asserts are off."""
    if not condition:
        raise AssertionError(what)


def raised(call: Callable[[], Any]) -> BaseException:
    """What a call raises; None is a failure."""
    try:
        call()
    except errors.Error as error:
        return error
    raise AssertionError("nothing was raised")


def sleep(milliseconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))


def all_sizes(gpu: Any) -> dict[str, Any]:
    """Rank-major dispatch on 1 to 16 ranks, three layouts, exact and with capacity, compared with the reference."""
    failures = []
    for num_ranks in (1, 2, 4, 8, 16):

        def body(comm: Any, gpu: Any, num_ranks: int = num_ranks) -> list[str]:
            rank = ranks.Rank(comm, gpu, gpu.index)
            bad = []
            for seed, (layout, alignment, capacity) in enumerate(
                [
                    ("rank_major", 1, -1),
                    ("rank_major", 1, 40),
                    ("expert_major", 8, -1),
                    ("expert_major", 1, 500),
                    ("masked", 1, 24),
                    ("rank_major", 1, -1),
                ]
            ):
                xs, ids, weights = ranks.inputs(seed, num_ranks)
                kept = None if capacity < 0 else capacity
                want = reference.dispatch(
                    xs, ids, weights, num_experts=32, layout=layout, alignment=alignment, capacity=kept
                )[comm.rank]
                mine = [part[comm.rank].cuda() for part in (xs, ids, weights)]
                got = rank.dispatch(*mine, layout, alignment=alignment, capacity=capacity)
                bad += [
                    f"{num_ranks} {comm.rank} {layout} {capacity}: {part}"
                    for part in ranks.differences(got, want, layout)
                ]
            rank.window.check()
            rank.window.close()
            comm.close()
            return bad

        for found in ranks.thread_ranks(num_ranks, body, gpu):
            failures += found
    expect(not failures, str(failures[:8]))
    return {}


def staged(gpu: Any) -> dict[str, Any]:
    """The heap of rank 1 is full: its rows come through the landing; the others' do not notice."""

    def body(comm: Any, gpu: Any) -> list[str]:
        rank = ranks.Rank(comm, gpu, gpu.index)
        stream = torch.cuda.current_stream().cuda_stream
        taken = rank.window.empty([32 << 20], 0, stream) if comm.rank == 1 else None
        bad = []
        for seed, (layout, capacity) in enumerate(
            [("rank_major", -1), ("expert_major", -1), ("masked", 30), ("rank_major", 90), ("expert_major", 400)]
        ):
            xs, ids, weights = ranks.inputs(seed + 50, 4)
            kept = None if capacity < 0 else capacity
            want = reference.dispatch(xs, ids, weights, num_experts=32, layout=layout, capacity=kept)[comm.rank]
            mine = [part[comm.rank].cuda() for part in (xs, ids, weights)]
            got = rank.dispatch(*mine, layout, capacity=capacity)
            if got["in_heap"] == (comm.rank == 1):
                bad.append(f"{layout}: in_heap is {got['in_heap']} on rank {comm.rank}")
            bad += [f"{comm.rank} {layout} {capacity}: {part}" for part in ranks.differences(got, want, layout)]
        del taken
        rank.window.close()
        comm.close()
        return bad

    failures = [each for found in ranks.thread_ranks(4, body, gpu) for each in found]
    expect(not failures, str(failures[:8]))
    return {}


def release_order(gpu: Any) -> dict[str, Any]:
    """A place that one stream still writes is not written by another before; the same stream does not wait."""

    def body(comm: Any, gpu: Any) -> dict[str, Any]:
        window = ranks.Rank(comm, gpu, gpu.index, heap_bytes=1 << 20).window
        first, second, third = (torch.cuda.Stream() for _ in range(3))

        def tensor(stream: torch.cuda.Stream) -> torch.Tensor:
            made = window.empty([1 << 20], 0, stream.cuda_stream)
            expect(made is not None, "no room")
            return torch.from_dlpack(made)

        with torch.cuda.stream(first):
            one = tensor(first)
            place = one.data_ptr()
            sleep(30)
            one.fill_(1)
            del one
            again = tensor(first)
            expect(again.data_ptr() == place, "another place")
            sleep(30)
            again.fill_(2)
            del again
        with torch.cuda.stream(second):
            two = tensor(second)
            expect(two.data_ptr() == place, "another place")
            two.fill_(3)
            second.synchronize()
            expect(int(two[0]) == 3, "the first stream wrote last")
        # Read on a third stream while it is released on the second: only record_stream tells.
        with torch.cuda.stream(third):
            third.wait_stream(second)
            sleep(30)
            copy = two.clone()
        expect(native.gpu_record_stream(two.data_ptr(), third.cuda_stream), "no heap knows its tensor")
        del two
        with torch.cuda.stream(second):
            tensor(second).fill_(9)
        torch.cuda.synchronize()
        expect(int(copy.min()) == 3, "a recorded stream read what came later")
        expect(int(copy.max()) == 3, "a recorded stream read what came later")
        expect(window.heap_used == 0, "something is left in the heap")
        window.close()
        comm.close()
        return {}

    ranks.thread_ranks(1, body, gpu)
    return {}


def captured(gpu: Any) -> dict[str, Any]:
    """Graphs: replays give new results, their blocks are never given to others, a rebuild does not void them."""

    def body(comm: Any, gpu: Any) -> list[str]:
        rank = ranks.Rank(comm, gpu, gpu.index)
        xs, ids, weights = ranks.inputs(7, 2)
        mine = [part[comm.rank].cuda() for part in (xs, ids, weights)]
        rank.dispatch(*mine, capacity=100)
        comm.exchange(1, b"", 30.0)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        bad: list[str] = []
        got: dict[str, Any] = {}
        for turn in range(2):  # one after the other: a capture begins by synchronising the GPU
            if turn == comm.rank:
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                    got = rank.dispatch(*mine, capacity=100)
            comm.exchange(10 + turn, b"", 30.0)
        places = {got[name].data_ptr() for name in ("x", "topk_weights", "topk_idx", "recv_plan")}

        def replay(value: int) -> None:
            want = reference.dispatch(
                [torch.full_like(x, value) for x in xs], ids, weights, num_experts=32, capacity=100
            )[comm.rank]
            mine[0].fill_(value)
            got["x"].fill_(float("nan"))
            graph.replay()
            bad.extend(f"{comm.rank} replay {value}: {part}" for part in ranks.differences(got, want, "rank_major"))

        for seed in (1, 2, 3):
            replay(seed)
        other = rank.dispatch(*mine, capacity=100)
        expect(
            places.isdisjoint({other["x"].data_ptr(), other["topk_weights"].data_ptr()}),
            "a graph's block was given away",
        )
        del other
        rank.window.check()
        torch.cuda.current_stream().synchronize()
        comm.rebuild([0, 1], 30.0)
        comm.exchange(2, b"", 30.0)
        replay(4)
        # A tensor of the old epoch is alive: the heap moves, and the graph says so instead of writing into it.
        held = rank.dispatch(*mine, capacity=100)
        kept = held["x"].clone()
        torch.cuda.current_stream().synchronize()
        comm.rebuild([0, 1], 30.0)
        graph.replay()
        torch.cuda.current_stream().synchronize()
        error = raised(rank.window.check)
        expect(isinstance(error, errors.InvalidState) and "captured" in str(error), repr(error))
        expect(
            torch.equal(held["x"].view(torch.uint8), kept.view(torch.uint8)), "a tensor of the old epoch was written"
        )
        comm.exchange(3, b"", 30.0)
        want = reference.dispatch([torch.full_like(x, 4) for x in xs], ids, weights, num_experts=32)[comm.rank]
        bad.extend(f"after all: {part}" for part in ranks.differences(rank.dispatch(*mine), want, "rank_major"))
        comm.exchange(4, b"", 30.0)
        rank.window.close()
        comm.close()
        return bad

    failures = [each for found in ranks.thread_ranks(2, body, gpu) for each in found]
    expect(not failures, str(failures[:8]))
    return {}


def captured_alone(gpu: Any) -> dict[str, Any]:
    """A capture in torch's strictest mode, in which most calls of the driver are forbidden."""

    def body(comm: Any, gpu: Any) -> list[str]:
        rank = ranks.Rank(comm, gpu, gpu.index)
        xs, ids, weights = ranks.inputs(9, 1)
        mine = [part[0].cuda() for part in (xs, ids, weights)]
        dropped = rank.dispatch(*mine, capacity=100)
        del dropped
        graph = torch.cuda.CUDAGraph()
        held = rank.dispatch(*mine, capacity=100)
        with torch.cuda.graph(graph):
            first = rank.dispatch(*mine, capacity=100)
            del held  # let go on a stream beside the capture
            second = rank.dispatch(*mine, "expert_major", capacity=400)
        bad = []
        for value in (1, 2):
            mine[0].fill_(value)
            graph.replay()
            for got, layout, capacity in ((first, "rank_major", 100), (second, "expert_major", 400)):
                want = reference.dispatch(
                    [torch.full_like(xs[0], value)], ids, weights, num_experts=32, layout=layout, capacity=capacity
                )[0]
                bad += [f"{layout} {value}: {part}" for part in ranks.differences(got, want, layout)]
        rank.window.check()
        expect(rank.window.empty([20 << 20], 0, 0) is not None, "the block that was let go is lost")
        rank.window.close()
        comm.close()
        return bad

    failures = ranks.thread_ranks(1, body, gpu)[0]
    expect(not failures, str(failures[:8]))
    return {}


def host_time(gpu: Any) -> dict[str, Any]:
    """Microseconds of the host for a call with a capacity, the tensors that this script makes for it included."""

    def body(comm: Any, gpu: Any) -> float:
        rank = ranks.Rank(comm, gpu, gpu.index)
        xs, ids, weights = ranks.inputs(9, 1, max_tokens=1)
        mine = [part[0].cuda() for part in (xs, ids, weights)]
        rounds = []
        for _ in range(20):
            torch.cuda.current_stream().synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                rank.dispatch(*mine, capacity=8)
            rounds.append((time.perf_counter() - begin) / 20 * 1e6)
        rank.window.close()
        comm.close()
        return sorted(rounds)[10]

    return {"call_us": round(ranks.thread_ranks(1, body, gpu)[0], 1)}


def streams(gpu: Any) -> dict[str, Any]:
    """Calls of one window from several streams are ordered."""

    def body(comm: Any, gpu: Any) -> list[str]:
        rank = ranks.Rank(comm, gpu, gpu.index)
        several = [torch.cuda.Stream() for _ in range(3)]
        bad = []
        kept = []
        for seed in range(12):
            xs, ids, weights = ranks.inputs(seed, 2)
            want = reference.dispatch(xs, ids, weights, num_experts=32, capacity=130)[comm.rank]
            with torch.cuda.stream(several[seed % 3]):
                mine = [part[comm.rank].cuda() for part in (xs, ids, weights)]
                sleep(3 if seed % 2 else 0)
                kept.append((several[seed % 3], rank.dispatch(*mine, capacity=130), want, mine))
        for stream, got, want, _ in kept:
            with torch.cuda.stream(stream):
                bad += ranks.differences(got, want, "rank_major")
        del kept
        rank.window.check()
        rank.window.close()
        comm.close()
        return bad

    failures = [each for found in ranks.thread_ranks(2, body, gpu) for each in found]
    expect(not failures, str(failures[:8]))
    return {}


def mismatch(gpu: Any) -> dict[str, Any]:
    """Ranks that call different things say so on every rank, and go on."""

    def body(comm: Any, gpu: Any) -> list[str]:
        rank = ranks.Rank(comm, gpu, gpu.index)
        xs, ids, weights = ranks.inputs(3, 2)
        mine = [part[comm.rank].cuda() for part in (xs, ids, weights)]
        rank.dispatch(*mine)
        error = raised(lambda: rank.dispatch(*mine, alignment=1 + comm.rank))
        expect(isinstance(error, errors.InvalidArgument), repr(error))
        expect("ranks called different things" in str(error), str(error))
        want = reference.dispatch(xs, ids, weights, num_experts=32)[comm.rank]
        bad = ranks.differences(rank.dispatch(*mine), want, "rank_major")
        rank.window.close()
        comm.close()
        return [*bad, str(error)] if comm.rank == 0 and bad else bad

    failures = [each for found in ranks.thread_ranks(2, body, gpu) for each in found]
    expect(not failures, str(failures[:8]))
    return {}


def late_peer(gpu: Any) -> dict[str, Any]:
    """A peer that does not come: PeerTimeout on all at the deadline, then rebuild, and everything works again."""

    def body(comm: Any, gpu: Any) -> dict[str, Any]:
        rank = ranks.Rank(comm, gpu, gpu.index)
        xs, ids, weights = ranks.inputs(3, 3)
        mine = [part[comm.rank].cuda() for part in (xs, ids, weights)]
        rank.dispatch(*mine)
        torch.cuda.current_stream().synchronize()
        begin = time.monotonic()
        if comm.rank != 1:
            error = raised(lambda: rank.dispatch(*mine, timeout_s=0.5))
            waited = time.monotonic() - begin
            expect(isinstance(error, errors.PeerTimeout), repr(error))
            expect(0.45 < waited < 1.5, f"after {waited} s")
        else:
            time.sleep(1.0)
            error = raised(lambda: rank.dispatch(*mine, timeout_s=0.5))
            expect(isinstance(error, errors.PeerTimeout), repr(error))
        expect(tuple(getattr(error, "peers", ())) == (1,), repr(error))
        expect(isinstance(raised(lambda: rank.dispatch(*mine)), errors.PeerTimeout), "not broken")
        torch.cuda.current_stream().synchronize()
        comm.rebuild([0, 1, 2], 30.0)
        want = reference.dispatch(xs, ids, weights, num_experts=30)[comm.rank]
        bad = ranks.differences(rank.dispatch(*mine), want, "rank_major")
        expect(not bad, str(bad))
        rank.window.close()
        comm.close()
        return {}

    ranks.SMALL["num_experts"] = 30
    try:
        ranks.thread_ranks(3, body, gpu)
    finally:
        ranks.SMALL["num_experts"] = 32
    return {}


def closed_peer(gpu: Any) -> dict[str, Any]:
    """A peer closes: who waits for it gets PeerLost, the others go on with rebuild."""

    def body(comm: Any, gpu: Any) -> dict[str, Any]:
        rank = ranks.Rank(comm, gpu, gpu.index)
        xs, ids, weights = ranks.inputs(5, 4)
        mine = [part[comm.rank].cuda() for part in (xs, ids, weights)]
        rank.dispatch(*mine)
        torch.cuda.current_stream().synchronize()
        if comm.rank == 2:
            time.sleep(0.3)
            rank.window.close()
            comm.close()
            return {}
        begin = time.monotonic()
        error = raised(lambda: rank.dispatch(*mine, timeout_s=20.0))
        expect(isinstance(error, errors.PeerLost), repr(error))
        expect(time.monotonic() - begin < 3, "too late")
        left = [0, 1, 3]
        comm.rebuild(left, 30.0)
        want = reference.dispatch(xs, ids, weights, num_experts=32, active_ranks=left)[comm.rank]
        bad = ranks.differences(rank.dispatch(*mine), want, "rank_major")
        expect(not bad, str(bad))
        rank.window.close()
        comm.close()
        return {}

    ranks.thread_ranks(4, body, gpu)
    return {}


def memory_returns(gpu: Any) -> dict[str, Any]:
    """Closing and rebuilding give everything back."""

    def body(comm: Any, gpu: Any) -> None:
        rank = ranks.Rank(comm, gpu, gpu.index, heap_bytes=256 << 20)
        for _ in range(3):
            comm.rebuild([0, 1], 30.0)
        comm.exchange(1, b"", 30.0)
        used.append(torch.cuda.mem_get_info()[0])
        comm.exchange(2, b"", 30.0)
        rank.window.close()
        comm.close()

    used: list[int] = []
    torch.cuda.synchronize()
    ranks.thread_ranks(2, body, gpu)
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        ranks.thread_ranks(2, body, gpu)
    after = torch.cuda.mem_get_info()[0]
    expect(before - min(used) < (2 * 300) << 20, f"a window of two ranks takes {(before - min(used)) >> 20} MiB")
    expect(before - after < 8 << 20, f"{(before - after) >> 20} MiB are lost")
    return {"window_mib": (before - min(used)) >> 20, "lost_mib": (before - after) >> 20}


def too_many_blocks(gpu: Any) -> dict[str, Any]:
    """More blocks than SMs would deadlock: refused with numbers."""

    def body(comm: Any, gpu: Any) -> str:
        rank = ranks.Rank(comm, gpu, gpu.index, num_blocks=64)
        xs, ids, weights = ranks.inputs(5, 4)
        mine = [part[comm.rank].cuda() for part in (xs, ids, weights)]
        error = raised(lambda: rank.dispatch(*mine, num_blocks=40))
        expect(isinstance(error, errors.InvalidArgument), repr(error))
        rank.dispatch(*mine, num_blocks=gpu.num_sms // 4)
        torch.cuda.current_stream().synchronize()
        rank.window.close()
        comm.close()
        return str(error)

    return {"text": ranks.thread_ranks(4, body, gpu)[0]}


CHECKS: list[Callable[[Any], dict[str, Any]]] = [
    release_order,
    memory_returns,
    all_sizes,
    staged,
    streams,
    mismatch,
    late_peer,
    closed_peer,
    too_many_blocks,
    captured,
    captured_alone,
    host_time,
]


def main() -> int:
    """Run the checks named on the command line, or all."""
    wanted = sys.argv[1:]
    torch.cuda.init()
    gpu = native.Gpu(0, **ranks.paths())
    failed = 0
    for check in CHECKS:
        if wanted and check.__name__ not in wanted:
            continue
        begin = time.monotonic()
        line: dict[str, Any] = {"check": check.__name__}
        try:
            line.update(ok=True, **check(gpu))
        except BaseException as error:  # told in the line
            traceback.print_exc()
            line.update(ok=False, error=repr(error)[:500])
            failed += 1
        print(json.dumps({**line, "s": round(time.monotonic() - begin, 2)}), flush=True)
        if failed:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(json.dumps({"check": "context", "ok": False, "error": str(error)[:300]}), flush=True)
                break
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
