"""Guards against ranks that never meet again: late or interrupted constructors, rebuilds begun at different times."""

import time
from pathlib import Path
from typing import Any

import pytest

import weft

SHAPE = {"num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8}


def _await(path: Path) -> None:
    """Until another rank has made this file."""
    end = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.005)


def _late_constructor(comm: Any, gave_up: Path) -> list[str]:
    said = []
    if comm.rank == 1:
        _await(gave_up)
    try:
        weft.ExpertParallel(comm, **SHAPE, deadline_s=1.0)  # equal: the late rank may compare it
    except weft.PeerTimeout as error:
        said.append(str(error))
    gave_up.touch()
    comm.rebuild([0, 1])
    with weft.ExpertParallel(comm, **SHAPE) as ep:
        ep.warmup()
    return said


def test_a_constructor_that_timed_out_breaks_everyone_and_rebuild_mends_it(tmp_path: Path) -> None:
    """The rank that came late must not pass on what the other left behind."""
    for said in weft.spawn(_late_constructor, num_ranks=2, args=(tmp_path / "gave_up",), device="cpu"):
        assert len(said) == 1
        assert "rank 1 did not answer rank 0 in a constructor or rebuild before its deadline" in said[0]


def _retries(comm: Any, with_window: bool, gave_up: Path) -> int:
    ep = weft.ExpertParallel(comm, **SHAPE) if with_window else None
    if comm.rank == 1:
        _await(gave_up)
    for attempt in range(100):
        try:
            comm.rebuild([0, 1], deadline_s=0.5 if comm.rank == 0 and attempt < 2 else 60.0)
        except weft.PeerTimeout:
            if attempt == 1:
                gave_up.touch()
            continue
        with weft.ExpertParallel(comm, **SHAPE) if ep is None else ep as again:
            again.warmup()
        return attempt
    raise AssertionError("the ranks never met")


@pytest.mark.parametrize("with_window", [False, True])
def test_rebuilds_begun_at_different_times_meet(with_window: bool, tmp_path: Path) -> None:
    """One rank has given up and tried again several times before the other comes."""
    first, second = weft.spawn(_retries, num_ranks=2, args=(with_window, tmp_path / "gave_up"), device="cpu")
    assert first >= 2
    assert second == 0


def _different_windows(comm: Any) -> tuple[bool, str]:
    kept = weft.ExpertParallel(comm, **SHAPE)
    other = weft.ExpertParallel(comm, **{**SHAPE, "hidden": 32})
    if comm.rank == 0:
        other.close()
    comm.rebuild([0, 1])
    kept.warmup()
    try:
        other.warmup()
    except weft.InvalidState as error:
        return comm.epoch == 2, str(error)
    return False, ""


def test_a_window_that_one_rank_closed_is_dropped_by_rebuild() -> None:
    """Closing is local, so it must not keep the ranks from going on."""
    (ok_0, text_0), (ok_1, text_1) = weft.spawn(_different_windows, num_ranks=2, device="cpu")
    assert ok_0
    assert ok_1
    assert "closed" in text_0
    assert "another rank closed this window before the last rebuild; make a new ExpertParallel" in text_1


def test_close_gives_the_memory_back() -> None:
    """A model that makes and drops layers must not grow."""

    def count(comm: Any) -> list[int]:
        seen = []
        for hidden in range(16, 16 * 9, 16):
            with weft.ExpertParallel(comm, **{**SHAPE, "hidden": hidden}) as ep:
                ep.warmup()
            with open("/proc/self/maps") as maps:
                seen.append(sum("memfd" in line for line in maps))
        return seen

    for seen in weft.spawn(count, num_ranks=2, device="cpu"):
        assert max(seen) == min(seen)
