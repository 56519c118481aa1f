"""Guards against kernels that hang, or break the window, when a peer does not come or calls something else."""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import dispatch_cases
import pytest
import torch
from combine_cases import CombineCase, CombineRunner, reseeded
from dispatch_cases import Case, Given, Round, Runner, put_inputs, run_case
from kernels import Compiler, Mutant
from machine import RED_ZONE, Launch, Streams, sleeping
from world import CACHE_LINE, OBJECT, PRINT, Shape

KERNELS = ("dispatch", "small_dispatch", "combine", "small_combine")
DEADLINE, ABORTED, MISMATCH, BAD_PEER_WORD, NO_ROOM = 1, 2, 3, 4, 5  # transport::ErrorCause
TIMEOUT_NS, LATE_NS = 3_000_000_000, 2_000_000_000  # long for a busy machine
LATE, ODD = 2, 1  # ranks: that does not come, that calls something else


WINDOW = Shape(num_ranks=3, num_experts=6, top_k=2, max_tokens=16, small_tokens=16)


def prepared(compiler: Compiler, kernel: str, num_rounds: int, capacity: int = -1) -> tuple[Runner, list[Round]]:
    """Streams of so many rounds; the last launch of each is that of the kernel."""
    is_small = kernel.startswith("small_")
    case = Case(shape=WINDOW, tokens=(16, 5, 9), is_small=is_small, num_rounds=num_rounds, capacity=capacity)
    if kernel.endswith("combine"):
        runner: Runner = CombineRunner(compiler, CombineCase(dispatch=case))
    else:
        runner = Runner(compiler, case)
    return runner, [runner.add_round() for _ in range(num_rounds)]


def words(runner: Runner, rank: int) -> dict[str, int]:
    """What a rank's window says about an error."""
    world, layout = runner.world, runner.world.layout
    return {
        "cause": world.memory.word(world.host[rank] + layout["host.error"], "u4"),
        "culprit": world.memory.word(world.host[rank] + layout["host.error.culprit"], "i4"),
        "broken": world.memory.word(world.control[rank] + layout["control.broken"]),
        "owner": world.memory.word(world.control[rank] + layout["control.owner"]),
        "sequence": world.memory.word(world.control[rank] + layout["control.sequence"]),
    }


def callers(runner: Runner, rank: int) -> tuple[int, int]:
    """Who called (transport::pack_caller) in the operation that was given up: the rank, and the culprit."""
    memory, layout, host = runner.memory, runner.world.layout, runner.world.host[rank]
    culprit = words(runner, rank)["culprit"]
    return memory.word(host + layout["host.error_caller"]), memory.word(host + layout["host.seen_caller"] + 8 * culprit)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_peer_that_does_not_come(compiler: Compiler, kernel: str) -> None:
    """The kernels end at the deadline, say who was late, and leave the window broken."""
    runner, _ = prepared(compiler, kernel, 1)
    runner.streams[LATE].pop()
    runner.world.set_timeout(TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in (0, ODD):
            wanted = {"cause": DEADLINE, "culprit": LATE, "broken": DEADLINE, "owner": 1}
            assert words(runner, rank) == wanted | {"sequence": runner.num_operations - 1}
    finally:
        runner.memory.close()


BEGIN = "    if (flight.is_dead) return;\n    init_shared();\n"
SILENT = Mutant(
    "a block says nothing", "weft/kernels/dispatch/entry.cuh", BEGIN, f"    if (blockIdx.x == 1) return;\n{BEGIN}"
)
BROKEN = Mutant(
    "a block finds its window broken",
    SILENT.path,
    BEGIN,
    "    if (blockIdx.x == 1) {\n      if (threadIdx.x == 0) ptx::st_relaxed_sys(&a.view.words()->broken, u64{2});\n"
    f"      return;\n    }}\n{BEGIN}",
)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("mutant", [SILENT, BROKEN], ids=lambda mutant: mutant.name)
def test_a_block_that_does_not_count(compiler: Compiler, layout: str, mutant: Mutant) -> None:
    """The other blocks of its GPU end, at once if it has said why, else at the deadline, and send nothing."""
    case = Case(shape=Shape(max_tokens=40), tokens=(40, 40), layout=layout, num_rounds=1)
    runner = Runner(compiler, case, mutant)
    runner.add_round()
    runner.world.set_timeout(TIMEOUT_NS if mutant is SILENT else 10 * TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=20).run()
        for rank in runner.ranks:
            seen = words(runner, rank)
            wanted = {"cause": DEADLINE, "culprit": rank, "broken": DEADLINE, "owner": 1}
            if mutant is BROKEN:  # block 0 may have begun before that, or say what it finds
                assert (seen["cause"], seen["culprit"]) in ((0, 0), (ABORTED, -1))
                wanted = {**seen, "broken": ABORTED}
            assert seen == wanted | {"sequence": 0}
    finally:
        runner.memory.close()


GOES_WRONG = Mutant(
    "a block goes wrong when it has added some tokens",
    "weft/kernels/combine/reduce.cuh",
    "      const i32 mine = b_.lane",
    f"      if (b_.a.view.rank == {LATE} && turn == 5) b_.leave();\n      const i32 mine = b_.lane",
)
MANY = Case(
    shape=Shape(num_ranks=3, num_experts=12, top_k=3, max_tokens=120, landing_row_bytes=2048),
    tokens=(120, 90, 110),
    num_rounds=1,
)


@pytest.mark.parametrize("wire_is_fp8", [False, True])
def test_what_is_told_is_there_after_a_failure(compiler: Compiler, wire_is_fp8: bool) -> None:
    """Rows that a block leaves out after a failure are not told (R9)."""
    case = CombineCase(dispatch=MANY, hidden=512, wire_is_fp8=wire_is_fp8)
    num_told = 0
    for seed in range(3):
        runner = CombineRunner(compiler, reseeded(case, seed), GOES_WRONG)
        runner.add_round()
        runner.world.set_timeout(TIMEOUT_NS // 3)
        try:
            Streams(runner.memory, runner.streams, seed=seed, timeout_s=60).run()
            told = rows_told(runner)
            num_told += len(told)
            assert [place for place, row in told.items() if (row == row[0]).all()] == []  # poison
        finally:
            runner.memory.close()
    assert num_told > 0


def rows_told(runner: CombineRunner) -> dict[tuple[int, int], Any]:
    """By owner and token, the landing of every row that rank LATE has told others of in the last operation."""
    world, memory, layout, shape = runner.world, runner.memory, runner.world.layout, runner.case.shape
    plan_at = runner.streams[LATE][-1].fields["recv_plan"]
    plan = memory.tensor(plan_at, (shape.recv_plan_len("rank_major", layout["plan_header"]),), torch.int32)
    rows = plan[layout["plan_header"] :].view(shape.num_ranks, shape.max_tokens)
    row_bytes, num_blocks = runner.wire_row_bytes(), runner.case.num_blocks
    found = {}
    for owner in (0, ODD):
        for block in range(num_blocks):
            cell = LATE * shape.num_blocks + block
            word = memory.word(world.control[owner] + layout["control.progress"] + 2 * cell * CACHE_LINE)
            if word >> 24 & 0xFFFFFF != runner.num_operations:
                continue
            for token in range(block, runner.case.tokens[owner], num_blocks)[: word & 0xFFFFFF]:
                if rows[owner, token] >= 0:
                    place = layout["landing_rows"] + (token * shape.num_ranks + LATE) * row_bytes
                    found[owner, token] = memory.view(world.heap[owner] + place, row_bytes).copy()
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_broken_window_says_so_again(compiler: Compiler, kernel: str) -> None:
    """One peer calls something else and another does not come: the host may read of the first alone and go on."""
    runner, _ = prepared(compiler, kernel, 2)
    first = [stream[: len(stream) // 2] for stream in runner.streams]
    second = [stream[len(stream) // 2 :] for stream in runner.streams]
    launch = first[ODD][-1]
    first[ODD][-1] = dataclasses.replace(launch, fields={**launch.fields, "print": PRINT + 1})
    first[LATE].pop()
    second[LATE] = []
    runner.world.set_timeout(TIMEOUT_NS)
    memory, layout, host = runner.memory, runner.world.layout, runner.world.host
    try:
        Streams(memory, first, seed=1, timeout_s=60).run()
        for rank in (0, ODD):
            seen = words(runner, rank)
            assert (seen["cause"], seen["broken"]) == (MISMATCH, DEADLINE)
            memory.set_word(host[rank] + layout["host.error"], 0)
            memory.set_word(host[rank] + layout["host.num_errors_read"], 1)
        of_late = memory.view(runner.world.control[LATE], layout["control_bytes"])
        before = of_late.copy()
        Streams(memory, second, seed=1, timeout_s=60).run()
        assert bool((of_late == before).all()), "nothing is sent"
        for rank in (0, ODD):
            seen = words(runner, rank)
            assert (seen["cause"], seen["culprit"], seen["broken"]) == (DEADLINE, -1, DEADLINE)
            assert seen["sequence"] == runner.num_operations // 2 - 1
    finally:
        memory.close()


def repeated(runner: Runner, rounds: list[Round], ranks: tuple[int, ...]) -> list[list[Launch]]:
    """Streams in which each of the ranks repeats the dispatch of its round: its inputs, into the same memory."""
    streams: list[list[Launch]] = [[] for _ in runner.ranks]
    for rank in ranks:
        given, result = rounds[rank].given[rank], dataclasses.replace(rounds[rank].received[rank])
        inputs = put_inputs(runner.memory, given.x, given.scales, given.ids, None)
        room = max(result.num_rows, 1)
        if runner.case.is_small:
            runner.streams = streams
            runner._add_small(rank, inputs, result, result.num_rows, is_cached=True)
        else:
            streams[rank] += runner.dispatcher.launch(rank, inputs, result, room=room, is_cached=True)
    return streams


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.long
def test_a_repetition_without_a_rank_that_was_there(compiler: Compiler, layout: str, *, is_small: bool) -> None:
    """A graph may be replayed after a rebuild: nothing goes to the rank that has left."""
    case = Case(shape=WINDOW, tokens=(16, 16, 16), num_rounds=1, layout=layout, is_small=is_small)
    runner = Runner(compiler, case)
    made = runner.add_round()
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        runner.world.set_members((0, 1))
        streams = repeated(runner, [made] * 3, (0, 1))
        Streams(runner.memory, streams, seed=1, timeout_s=60).run()
        for rank in (0, 1):
            assert all(words(runner, rank)[word] == 0 for word in ("cause", "broken", "owner"))
    finally:
        runner.memory.close()


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.long
def test_ranks_that_repeat_different_dispatches(
    compiler: Compiler, layout: str, monkeypatch: pytest.MonkeyPatch, *, is_small: bool
) -> None:
    """The call is given up, and no row goes where another result begins."""
    shape = Shape(max_tokens=32, small_tokens=32)
    case = Case(shape=shape, tokens=(32, 32), num_rounds=2, layout=layout, is_small=is_small)
    runner = Runner(compiler, case)
    rounds, real, num_local = [], dispatch_cases.random_given, case.shape.num_experts // 2
    for to in (1, 0):  # all rows go to one rank, then all to the other

        def given(*args: Any, to: int = to) -> Given:
            made = real(*args)
            made.ids.remainder_(num_local).add_(to * num_local)
            return made

        monkeypatch.setattr(dispatch_cases, "random_given", given)
        rounds.append(runner.add_round())
    memory, world = runner.memory, runner.world
    num_bytes = 0 if is_small else 1 << 15  # small batches have ordinary tensors
    try:
        Streams(memory, runner.streams, seed=1, timeout_s=60).run()
        streams = repeated(runner, rounds, (0, 1))  # rank 1 that in which it gets nothing
        behind = world.heap[1] + (world.reserve(1, num_bytes) if num_bytes else 0)
        before = memory.tensor(behind, (num_bytes,), torch.uint8).clone()
        Streams(memory, streams, seed=1, timeout_s=60).run()
        assert torch.equal(memory.tensor(behind, (num_bytes,), torch.uint8), before)
        for rank in (0, 1):
            wanted = {"cause": MISMATCH, "culprit": 1 - rank, "broken": 0, "owner": 0, "sequence": 3}
            assert words(runner, rank) == wanted
    finally:
        memory.close()


@pytest.mark.parametrize("odd", [{"print": PRINT + 1}, {"object": OBJECT + 1}], ids=["print", "object"])
@pytest.mark.parametrize("capacity", [-1, 20])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_peer_that_calls_something_else(compiler: Compiler, kernel: str, capacity: int, odd: dict[str, int]) -> None:
    """All ranks give up the call, know which objects called, and the next one is right. So it is with a layer of equal
    shape."""
    runner, rounds = prepared(compiler, kernel, 2, capacity)
    at = len(runner.streams[ODD]) // 2 - 1
    launch = runner.streams[ODD][at]
    runner.streams[ODD][at] = dataclasses.replace(launch, fields={**launch.fields, **odd})
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in runner.ranks:
            mine, other = callers(runner, rank)
            assert (mine >> 16, other >> 16) == tuple(
                odd.get("object", OBJECT) if each == ODD else OBJECT for each in (rank, words(runner, rank)["culprit"])
            )
            assert (mine & 0xFFFF) == (other & 0xFFFF) == (1 if kernel.endswith("combine") else 0)  # the handle
            seen = words(runner, rank)
            assert (seen.pop("culprit") == ODD) == (rank != ODD)
            assert seen == {"cause": MISMATCH, "broken": 0, "owner": 0, "sequence": runner.num_operations}
        if isinstance(runner, CombineRunner):
            runner.num_looked = 1
        assert runner.differences(rounds[1]) == []
    finally:
        runner.memory.close()


def with_odd_place(compiler: Compiler, layout: str, **odd: int) -> tuple[Runner, list[Round]]:
    """Two dispatches; in the first one rank ODD says this of its place, and no landing would do instead."""
    runner = Runner(
        compiler,
        Case(shape=WINDOW, tokens=(16, 5, 9), num_rounds=2, layout=layout, capacity=30 if layout == "masked" else -1),
    )
    rounds = [runner.add_round() for _ in range(2)]
    for rank, stream in enumerate(runner.streams):
        changed = {"fits_landing": 0, **(odd if rank == ODD else {})}
        stream[0] = dataclasses.replace(stream[0], fields={**stream[0].fields, **changed})
    return runner, rounds


def are_untouched(runner: Runner, round_: Round) -> bool:
    """Whether no row of it has come."""
    memory, num_bytes = runner.memory, runner.wire.wire_bytes
    rows = [memory.tensor(each.x, (each.num_rows * num_bytes,), torch.uint8) for each in round_.received]
    return all(len(each) > 0 and bool((each == memory.poison).all()) for each in rows)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_a_rank_without_room(compiler: Compiler, layout: str) -> None:
    """All ranks give up the call and send nothing, and the next one is right."""
    runner, rounds = with_odd_place(compiler, layout, place_rows=0)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in runner.ranks:
            wanted = {"cause": NO_ROOM, "culprit": ODD, "broken": 0, "owner": 0, "sequence": 2}
            assert words(runner, rank) == wanted
        assert are_untouched(runner, rounds[0])
        assert runner.differences(rounds[1]) == []
    finally:
        runner.memory.close()


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_a_place_outside_of_the_heap(compiler: Compiler, layout: str) -> None:
    """No rank sends anything (R19), and the windows are broken."""
    runner, rounds = with_odd_place(compiler, layout, place_x=1 << 40)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        for rank in runner.ranks:
            wanted = {"cause": BAD_PEER_WORD, "culprit": ODD, "broken": BAD_PEER_WORD, "owner": 1, "sequence": 0}
            assert words(runner, rank) == wanted
        assert all(are_untouched(runner, each) for each in rounds)
    finally:
        runner.memory.close()


COUNTS = {
    "tokens": Mutant(
        "a rank says more tokens than any may have",
        "weft/kernels/dispatch/count.cuh",
        "static_cast<i64>(a.num_tokens)",
        f"i64{{rank() == {ODD} ? {WINDOW.max_tokens + 1} : a.num_tokens}}",
    ),
    "picks": Mutant(
        "a rank says a negative number of picks",
        "weft/kernels/dispatch/count.cuh",
        "count = idx < kExperts ? this->mine()[idx]",
        f"count = idx == 0 && rank() == {ODD} ? -1 : idx < kExperts ? this->mine()[idx]",
    ),
    "rows": Mutant(
        "a rank says more rows than it may have tokens",
        "weft/kernels/dispatch/count.cuh",
        "s.total[idx - kExperts];",
        f"s.total[idx - kExperts] + (rank() == {ODD} ? {WINDOW.max_tokens + 1} : 0);",
    ),
    "few": Mutant(
        "a rank says a negative number of tokens",
        "weft/kernels/small/dispatch_send.cuh",
        "static_cast<i64>(a.num_tokens)",
        f"i64{{rank() == {ODD} ? -1 : a.num_tokens}}",
    ),
    "many": Mutant(
        "a rank says a token more than any may have",
        "weft/kernels/small/dispatch_send.cuh",
        "static_cast<i64>(a.num_tokens)",
        f"i64{{rank() == {ODD} ? {WINDOW.max_tokens + 1} : a.num_tokens}}",
    ),
    "most picks": Mutant(
        "a rank says a pick more for an expert than its tokens may have",
        "weft/kernels/dispatch/count.cuh",
        "count = idx < kExperts ? this->mine()[idx]",
        f"count = idx == 0 && rank() == {ODD} ? {WINDOW.max_tokens * WINDOW.top_k + 1}"
        " : idx < kExperts ? this->mine()[idx]",
    ),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tokens", "rank_major"),
        ("tokens", "expert_major"),
        ("picks", "expert_major"),
        ("picks", "rank_major"),
        ("most picks", "expert_major"),
        ("rows", "rank_major"),
        ("few", "rank_major"),
        ("few", "masked"),
        ("many", "expert_major"),
    ],
)
def test_a_count_that_makes_no_sense(compiler: Compiler, name: str, layout: str) -> None:
    """The others send nothing, tell their hosts of no rows, end, and say whose it is (R19)."""
    case = Case(
        shape=WINDOW,
        tokens=(16, 16, 16),
        num_rounds=1,
        num_blocks=1,  # else one that comes late says nothing: another has found it
        layout=layout,
        is_small=name in ("few", "many"),
        capacity=30 if layout == "masked" else -1,
    )
    runner = Runner(compiler, case, COUNTS[name])
    runner.add_round()
    runner.world.set_timeout(TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        # Picks for experts of rank 0 are counted by it alone in rank_major.
        for rank in (0,) if (name, layout) == ("picks", "rank_major") else (0, LATE):
            wanted = {"cause": BAD_PEER_WORD, "culprit": ODD, "broken": BAD_PEER_WORD, "owner": 1, "sequence": 0}
            assert words(runner, rank) == wanted
            assert runner.memory.word(runner.world.host[rank] + runner.world.layout["host.counted_ticket"]) == 0
    finally:
        runner.memory.close()


def test_as_many_picks_as_there_may_be(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one expert, from all ranks: no count is taken for a bad one."""
    real = dispatch_cases.random_given

    def given(*args: Any) -> Given:
        made = real(*args)
        made.ids.zero_()
        return made

    monkeypatch.setattr(dispatch_cases, "random_given", given)
    case = Case(shape=WINDOW, tokens=(16, 16, 16), num_rounds=1, layout="expert_major", num_duplicates=16)
    assert run_case(compiler, case) == []


def test_a_row_just_outside_of_a_peers_tensor(compiler: Compiler) -> None:
    """A rank says of its tensor a row less than its peers pull: who would pull that one stops and says why (R19)."""
    case = Case(shape=WINDOW, tokens=(16, 16, 16), num_rounds=1)
    runner = CombineRunner(compiler, CombineCase(dispatch=case, hidden=64, heap_ranks=(0, ODD, LATE)))
    runner.add_round()
    launch = runner.streams[ODD][-1]
    fields = {**launch.fields, "num_rows": launch.fields["num_rows"] - 1}
    runner.streams[ODD][-1] = dataclasses.replace(launch, fields=fields)
    runner.world.set_timeout(TIMEOUT_NS)
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        seen = words(runner, LATE)  # whose row is the last of a rank_major result
        assert seen == {"cause": BAD_PEER_WORD, "culprit": ODD, "broken": BAD_PEER_WORD, "owner": 1, "sequence": 1}
    finally:
        runner.memory.close()


@pytest.mark.parametrize("is_small", [False, True])
def test_a_handle_with_wrong_sizes(compiler: Compiler, is_small: bool) -> None:
    """Gaps are zeroed in the result alone, wherever its words say that they are (R19)."""
    runner = Runner(
        compiler,
        Case(shape=WINDOW, tokens=(16, 5, 9), layout="expert_major", is_small=is_small, is_repeated=True),
    )
    repeated = runner.add_round().repeated
    assert repeated is not None
    memory, result, num_bytes = runner.memory, repeated[ODD], runner.wire.wire_bytes
    num_around = RED_ZONE // num_bytes
    assert num_around > 0
    counts = memory.put(torch.full((2,), -num_around, dtype=torch.int32))
    offsets = memory.put(torch.tensor([0, 0, result.num_rows + num_around], dtype=torch.int32))
    launch = runner.streams[ODD][-1]
    runner.streams[ODD][-1] = dataclasses.replace(
        launch, fields={**launch.fields, "counts": counts, "offsets": offsets}
    )
    try:
        Streams(memory, runner.streams, seed=1, timeout_s=60).run()
        for first in (-num_around, result.num_rows):
            around = memory.view(result.x + first * num_bytes, num_around * num_bytes)
            assert (around == memory.poison).all()
    finally:
        memory.close()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_late_peer_is_noted(compiler: Compiler, kernel: str, tmp_path: Path) -> None:
    """The others have waited for its headers as long as it was late for a launch of this kernel, the last one."""
    runner, _ = prepared(compiler, kernel, 2)
    runner.streams[LATE].insert(-1, sleeping(tmp_path, LATE_NS))
    memory, layout = runner.memory, runner.world.layout
    for launch in itertools.chain(*runner.streams):
        launch.program.result()  # compiled
    try:
        begin = time.monotonic_ns()
        Streams(memory, runner.streams, seed=1, timeout_s=60).run()
        num_ns = time.monotonic_ns() - begin
        for rank in runner.ranks:
            first = runner.world.control[rank] + layout["control.waited_ns"]
            waited = [memory.word(first + 8 * peer) for peer in runner.ranks]
            assert waited[rank] == 0
            assert rank == LATE or waited[LATE] == max(waited) > LATE_NS / 2
            assert waited[LATE] < num_ns, "one block measures, not each"  # waits for two peers may overlap
    finally:
        memory.close()
