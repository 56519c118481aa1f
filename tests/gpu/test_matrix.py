"""Guards against any wrong word on GPUs: the matrix of tests/python/test_property.py, compared bit for bit with
weft.reference, into memory full of poison.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_property
from test_property import (  # noqa: F401  the cases of the cpu engine, collected here with this module's `pool`
    test_capacity_to_the_row,
    test_column_major_scales,
    test_column_major_scales_given,
    test_counts_on_the_host,
    test_every_word_is_the_references,
    test_fp8_on_the_wire,
    test_gradients_are_the_references,
    test_gradients_of_each_layout,
    test_heap_without_room,
    test_holes_that_nobody_needs,
    test_ids,
    test_ids_out_of_range_are_told_once_by_the_next_call,
    test_layouts_and_rows,
    test_megabytes,
    test_modes,
    test_nvfp4,
    test_old_results_survive_later_calls,
    test_one_rank_alone,
    test_ranks_without_tokens,
    test_rows_fit_the_heap_and_their_plan_does_not,
    test_rows_of_models,
)

import weft
from gpu_ranks import NUM_GPUS

test_property.MAX_RANKS = 8
test_property.WITH_NODES = False  # the cpu engine alone has them


@pytest.fixture(scope="module", params=["processes", "threads"])
def pool(request: pytest.FixtureRequest) -> Any:
    """Processes where there are GPUs for them; threads that share one, or all, of the GPUs."""
    if request.param == "processes" and NUM_GPUS < 2:
        pytest.skip("processes that all share one GPU take turns on it: slow, see test_processes.py")
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("num_ranks", [8, 16])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_many_ranks(threads: Any, num_ranks: int, layout: str) -> None:
    """8 and 16 ranks, as threads, on however many GPUs there are."""
    from dataclasses import replace

    sizes = tuple((7 * rank) % 41 for rank in range(num_ranks))
    for rows, wire in (("plain", None), ("fp8", "fp8")):
        case = test_property.with_call(
            layout=layout,
            tokens=sizes,
            rows=rows,
            wire=wire,
            biases=("row",) * num_ranks,
            ids_are_int64=(True,) * num_ranks,
        )
        test_property.checked(threads, replace(case, num_ranks=num_ranks, num_local=2))


def test_wide_rows_travel_in_pieces(threads: Any) -> None:
    """fp32 rows of a bf16 object are wider than a row of the landing; with and without room in the heap."""
    from dataclasses import replace

    for heap in ("plenty", "none"):
        for layout in ("rank_major", "expert_major", "masked"):
            case = test_property.with_call(layout=layout, repeat="float32", output_dtype="float32")
            test_property.checked(threads, replace(case, hidden=2064, heap=heap))
    case = test_property.with_call(rows="bytes_with_side")
    test_property.checked(threads, replace(case, hidden=8))
    assert weft.limits().max_gpu_ranks == 16
