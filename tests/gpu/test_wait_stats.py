"""Guards against kernels that note waits for the wrong rank, or for all ranks what the last one took."""

from __future__ import annotations

import time

import pytest
import torch
from test_streams import NUM_RANKS, TOKENS, TOP_K, inputs, make, on_device, run

import weft

LATE, LATE_S, STEPS = 2, 0.05, 4


@pytest.mark.parametrize("mode", ["latency", "throughput"])
@pytest.mark.parametrize("is_graphed", [False, True])
def test_the_late_rank_is_waited_for_longest(mode: str, is_graphed: bool) -> None:
    """One lane waits for each peer: those that came in time must not be charged with the time of the last."""

    def work(comm: weft.Communicator) -> list[float]:
        ep = make(comm)
        parts = on_device(comm, inputs(1))

        def step() -> None:
            r = ep.dispatch(*parts, layout="expert_major", capacity=NUM_RANKS * TOKENS * TOP_K, mode=mode)
            ep.combine(r.x, r.handle, mode=mode)

        step()
        call, graph, stream = step, torch.cuda.CUDAGraph(), torch.cuda.Stream(comm.device)
        torch.cuda.current_stream(comm.device).synchronize()
        with torch.cuda.stream(stream):
            if is_graphed:
                graph.capture_begin(capture_error_mode="thread_local")
                step()
                graph.capture_end()
                call = graph.replay
            call()
            stream.synchronize()
            before = ep.stats()["wait_us"]
            for _ in range(STEPS):
                if comm.rank == LATE:
                    time.sleep(LATE_S)
                call()
                stream.synchronize()
            after = ep.stats()["wait_us"]
        if is_graphed:
            graph.reset()
        ep.close()
        return [now - then for now, then in zip(after, before, strict=True)]

    waits = run(work)
    slept_us = STEPS * LATE_S * 1e6
    for rank, mine in enumerate(waits):
        assert mine[rank] == 0
        if rank == LATE:
            assert max(mine) < slept_us / 4, waits
        else:
            assert mine[LATE] > slept_us * 0.8, waits
            assert all(us < mine[LATE] / 4 for peer, us in enumerate(mine) if peer != LATE), waits
