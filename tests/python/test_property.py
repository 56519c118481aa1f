"""Guards against any wrong word: random cases on a pool of rank processes, compared bit for bit with weft.reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import property_cases
import pytest
import torch
from gradient_cases import build_gradients, compare_gradients, run_gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_cases import Call, Case, build, compare, run_plan
from rebuild_cases import LossPlan, run_after_loss

from pool import MAX_RANKS, Pool

NUM_EXAMPLES = int(os.environ.get("WEFT_TEST_EXAMPLES", "200"))
WITH_NODES = True  # whether some cases have nodes
MAX_ELEMENTS = 400_000  # of expert outputs of a call over all ranks: larger cases get a smaller hidden


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as ranks:
        yield ranks


def checked(pool: Pool, case: Case) -> None:
    """Run a case on its ranks; fail with every word that differs."""
    plans, expected = build(case)
    seen = pool.run(case.num_ranks, run_plan, plans)
    problems = compare(case, plans, expected, seen)
    assert not problems, "\n".join(problems)


@st.composite
def calls(draw: st.DrawFn, num_ranks: int, case_dtype: str, with_fp8: bool = True) -> Call:
    layout = draw(st.sampled_from(["rank_major", "expert_major", "masked"]))
    sizes = st.one_of(st.just(0), st.integers(0, 16), st.integers(0, 300))
    capacities = [None, "met", "exceeded", "ample", "zero", "eight"]
    repeats = [None, "plain", "float32", "quantized"] if with_fp8 else [None, "plain", "float32"]
    return Call(
        seed=draw(st.integers(0, 2**31)),
        tokens=tuple(draw(st.lists(sizes, min_size=num_ranks, max_size=num_ranks))),
        ids=draw(st.sampled_from(property_cases.IDS)),
        ids_are_int64=tuple(draw(st.booleans()) for _ in range(num_ranks)),
        has_weights=draw(st.booleans()),
        layout=layout,
        alignment=draw(st.sampled_from([1, 1, 2, 5, 16, 128])),
        capacity=draw(st.sampled_from(capacities)),
        rows=draw(st.sampled_from(property_cases.ROWS if with_fp8 else ["plain"])),
        repeat=draw(st.sampled_from(repeats)),
        weighted=draw(st.booleans()),
        side=draw(st.sampled_from([None, "pick", "row"] if layout == "rank_major" else [None, "pick"])),
        biases=tuple(draw(st.sampled_from(["none", "row", "full"])) for _ in range(num_ranks)),
        bias_is_float32=draw(st.booleans()),
        output_dtype=draw(st.sampled_from([case_dtype, case_dtype, "float32"])),
        wire=draw(st.sampled_from([None, None, "fp8"] if with_fp8 else [None])),
        heap_output=draw(st.booleans()),
        check_late=draw(st.booleans()),
        mode=draw(st.sampled_from(property_cases.MODES)),
        scale_layout=draw(st.sampled_from(["row_major", "column_major"])),
        zero_holes=draw(st.booleans()),
        columns_given=draw(st.booleans()),
        host_counts=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, MAX_RANKS))
    dtype = draw(st.sampled_from(list(property_cases.DTYPES)))
    with_fp8 = draw(st.booleans())
    top_k = draw(st.one_of(st.integers(1, 8), st.integers(1, 40)))
    some_calls = tuple(draw(st.lists(calls(num_ranks, dtype, with_fp8), min_size=1, max_size=3)))
    num_picks = max(sum(call.tokens) for call in some_calls) * top_k
    multiple = 16 if with_fp8 else 8
    widest = max(0, MAX_ELEMENTS // max(1, num_picks) // multiple // 2)
    return Case(
        num_ranks=num_ranks,
        num_local=draw(st.integers(1, 8)),
        top_k=top_k,
        hidden=multiple * (2 * draw(st.integers(0, min(widest, 20))) + 1),
        dtype=dtype,
        heap=draw(st.sampled_from(["plenty", "plenty", "none", "small", "full_on_one"])),
        calls=some_calls,
        sum_domain=(sums := draw(st.one_of(st.none(), st.integers(1, num_ranks)))),
        node_ranks=draw(st.one_of(st.none(), st.integers(1, num_ranks))) if WITH_NODES and sums is None else None,
    )


COMMON = settings(
    deadline=None,
    derandomize="CI" in os.environ or "WEFT_TEST_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(COMMON, max_examples=NUM_EXAMPLES)
@given(case=cases())
def test_every_word_is_the_references(pool: Pool, case: Case) -> None:
    checked(pool, case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(COMMON, max_examples=NUM_EXAMPLES // 4)
@given(case=cases())
def test_gradients_are_the_references(pool: Pool, case: Case) -> None:
    checked_gradients(pool, case)


def checked_gradients(pool: Pool, case: Case) -> None:
    """The first call of a case, made differentiable."""
    first = replace(case.calls[0], rows="plain", has_weights=True, output_dtype=case.dtype, repeat=None, wire=None)
    biases = ("none",) * case.num_ranks
    case = replace(case, calls=(replace(first, biases=biases, side="pick" if first.side else None),))
    given, expected = build_gradients(case)
    problems = compare_gradients(case, given, expected, pool.run(case.num_ranks, run_gradients, given))
    assert not problems, "\n".join(problems)


CALL = Call(
    seed=1,
    tokens=(5, 0, 17, 9),
    ids="mixed",
    ids_are_int64=(True, True, True, True),
    has_weights=True,
    layout="rank_major",
    alignment=1,
    capacity=None,
    rows="plain",
    repeat="plain",
    weighted=True,
    side="pick",
    biases=("row", "none", "full", "none"),
    bias_is_float32=True,
    output_dtype="bfloat16",
    wire=None,
    heap_output=True,
    check_late=False,
)
CASE = Case(num_ranks=4, num_local=3, top_k=4, hidden=48, dtype="bfloat16", heap="plenty", calls=(CALL,))


def with_call(**changed: object) -> Case:
    call = replace(CALL, **changed)  # type: ignore[arg-type]
    return replace(CASE, calls=(replace(call, capacity=call.capacity or "met") if call.layout == "masked" else call,))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("rows", property_cases.ROWS)
def test_layouts_and_rows(pool: Pool, layout: str, rows: str) -> None:
    checked(pool, with_call(layout=layout, rows=rows))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_nvfp4(pool: Pool, layout: str) -> None:
    """Two values a byte, and a scale per 16, as torch names them."""
    checked(pool, with_call(layout=layout, rows="nvfp4"))
    checked(pool, with_call(layout=layout, rows="nvfp4", capacity="exceeded", ids_are_int64=(True,) * 4))


def test_nvfp4_into_memory_that_torch_fills() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with Pool() as pool:  # of its own: its ranks take over how torch is set
            checked(pool, with_call(rows="nvfp4"))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("rows", [rows for rows in property_cases.ROWS if rows not in ("plain", "bytes")])
def test_column_major_scales(pool: Pool, layout: str, rows: str) -> None:
    """656 values have six scales: one int32 of UE8M0 is full, one is not."""
    for mode, capacity, heap in (
        (CALL.mode, None, "plenty"),
        (CALL.mode, "zero", "none"),
        ("latency", "ample", "plenty"),
        ("staged", "ample", "plenty"),
    ):
        case = with_call(
            layout=layout, rows=rows, repeat="quantized", capacity=capacity, mode=mode, scale_layout="column_major"
        )
        checked(pool, replace(case, hidden=656, heap=heap))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_column_major_scales_given(pool: Pool, layout: str) -> None:
    for mode, capacity in ((CALL.mode, None), ("staged", "ample")):
        case = with_call(
            layout=layout, rows="quantized_fp8", repeat="quantized", capacity=capacity, mode=mode, columns_given=True
        )
        checked(pool, replace(case, hidden=656))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_counts_on_the_host(pool: Pool, layout: str, mode: str) -> None:
    """Also where ranks have no tokens, and where the heap has no room."""
    case = with_call(layout=layout, mode=mode, alignment=4, host_counts=True, side=None)
    checked(pool, case)
    checked(pool, replace(case, heap="none"))


def test_holes_that_nobody_needs(pool: Pool) -> None:
    for rows, heap in (("plain", "plenty"), ("fp8", "none")):
        case = with_call(layout="expert_major", alignment=16, rows=rows, repeat="quantized", zero_holes=False)
        checked(pool, replace(case, heap=heap))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("capacity", ["met", "exceeded", "ample", "zero"])
def test_capacity_to_the_row(pool: Pool, layout: str, capacity: str) -> None:
    checked(pool, with_call(layout=layout, capacity=capacity, alignment=4, side=None))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("ids", property_cases.IDS)
def test_ids(pool: Pool, layout: str, ids: str) -> None:
    checked(pool, with_call(layout=layout, ids=ids, ids_are_int64=(False, True, False, True)))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("sum_domain", [1, 2, 3, 4])
def test_sums_of_domains(pool: Pool, layout: str, sum_domain: int) -> None:
    """Even ones and uneven ones; pulled and pushed; rows of whole and of broken groups of 128."""
    for hidden, wire, heap, output_dtype in (
        (48, None, "plenty", "bfloat16"), (2064, "fp8", "plenty", "bfloat16"), (144, "fp8", "none", "float32"),
    ):  # fmt: skip
        case = with_call(layout=layout, wire=wire, ids="distinct", tokens=(60, 0, 17, 9), output_dtype=output_dtype)
        case = replace(case, hidden=hidden, heap=heap, sum_domain=sum_domain)
        checked(pool, case)
        if wire is None:
            checked_gradients(pool, case)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("heap", ["none", "full_on_one"])
def test_heap_without_room(pool: Pool, layout: str, heap: str) -> None:
    checked(pool, replace(with_call(layout=layout, tokens=(300, 2, 0, 100)), heap=heap))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_rows_fit_the_heap_and_their_plan_does_not(pool: Pool, layout: str) -> None:
    case = with_call(layout=layout, tokens=(300, 2, 0, 300), capacity="eight")
    checked(pool, replace(case, heap="small", top_k=40, hidden=16))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("heap", ["plenty", "none", "full_on_one"])
def test_megabytes(pool: Pool, layout: str, heap: str) -> None:
    """Stores past the caches, and staging rings that go round several times."""
    for rows in ("plain", "fp8"):
        case = with_call(layout=layout, tokens=(300, 290, 3, 250), ids="distinct", rows=rows)
        checked(pool, replace(case, heap=heap, num_local=2, hidden=2064))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("mode", ["throughput", "latency"])
@pytest.mark.parametrize("hidden", [2880, 3072, 5120, 7168])
def test_rows_of_models(pool: Pool, layout: str, mode: str, hidden: int) -> None:
    """As wide as those of gpt-oss, MiniMax-M2, Llama 4 and DeepSeek-V3: what a warp does at once depends on it."""
    for rows in ("plain", "fp8", "quantized_fp8"):
        wire = "fp8" if rows == "fp8" else None
        case = with_call(layout=layout, mode=mode, rows=rows, wire=wire, tokens=(30, 0, 17, 1), side=None)
        checked(pool, replace(case, hidden=hidden))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("heap", ["plenty", "none", "full_on_one"])
@pytest.mark.parametrize("output_dtype", ["bfloat16", "float32"])
def test_fp8_on_the_wire(pool: Pool, layout: str, heap: str, output_dtype: str) -> None:
    """Rows of whole and of broken groups of 128; special values; rows in the heap, which are not pulled then."""
    for hidden, seed, tokens in ((16, 1, (5, 0, 17, 9)), (144, 2, (300, 2, 0, 100)), (2064, 3, (3, 200, 250, 0))):
        case = with_call(layout=layout, wire="fp8", output_dtype=output_dtype, seed=seed, tokens=tokens)
        checked(pool, replace(case, hidden=hidden, heap=heap))
    checked(pool, with_call(layout=layout, wire="fp8", capacity="exceeded", side=None, weighted=False))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_ranks_without_tokens(pool: Pool, layout: str) -> None:
    checked(pool, with_call(layout=layout, tokens=(0, 0, 0, 0)))
    checked(pool, with_call(layout=layout, tokens=(0, 0, 1, 0), ids="one_expert"))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_ids_out_of_range_are_told_once_by_the_next_call(pool: Pool, layout: str) -> None:
    checked(pool, with_call(layout=layout, check_late=True))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("mode", property_cases.MODES[1:])
def test_modes(pool: Pool, layout: str, mode: str) -> None:
    """Small batches, the others, both on one routing, and calls in two halves."""
    for rows in property_cases.ROWS:
        checked(pool, with_call(layout=layout, mode=mode, rows=rows, capacity="ample"))
    for capacity in (None, "met", "exceeded", "zero"):
        checked(pool, with_call(layout=layout, mode=mode, capacity=capacity, alignment=4, wire="fp8", check_late=True))
    checked(pool, with_call(layout=layout, mode=mode, tokens=(300, 2, 0, 100), capacity="exceeded", repeat="quantized"))
    checked(pool, with_call(layout=layout, mode=mode, tokens=(0, 1, 0, 0), capacity="ample"))
    checked_gradients(pool, with_call(layout=layout, mode="latency" if mode == "staged" else mode, alignment=4))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_each_layout(pool: Pool, layout: str, weighted: bool) -> None:
    checked_gradients(pool, with_call(layout=layout, weighted=weighted, alignment=4))


def test_one_rank_alone(pool: Pool) -> None:
    for layout in ("rank_major", "expert_major", "masked"):
        case = with_call(layout=layout, tokens=(300,), biases=("full",))
        checked(pool, replace(case, num_ranks=1))


def test_old_results_survive_later_calls(pool: Pool) -> None:
    layouts = ("rank_major", "expert_major", "masked")
    several = tuple(
        replace(CALL, seed=n, layout=layouts[n % 3], capacity="met" if n % 3 == 2 else None, tokens=(n, 40, 0, 7))
        for n in range(12)
    )
    checked(pool, replace(CASE, calls=several))


@pytest.mark.parametrize("by", ["close", "kill"])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_after_a_rebuild_picks_of_lost_ranks_are_absent(layout: str, by: str) -> None:
    lost, left = 1, (0, 2, 3)
    case = replace(with_call(layout=layout, tokens=(30, 0, 17, 9)), active_ranks=left)
    plans, expected = build(case)
    with Pool() as pool:  # of its own: it loses a rank
        losses = [LossPlan(lost, by, left, plan) for plan in plans]
        seen = pool.run(4, run_after_loss, losses, may_die=[lost] if by == "kill" else [])
    problems = compare(case, plans, expected, seen)
    assert not problems, "\n".join(problems)
