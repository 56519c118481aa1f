"""Guards against kernels that lost an order: a release, an acquire, a fence between proxies, a wait for bulk stores.

Whether a kernel has all of them, test_nvrtc_kernels.py asks of every kernel that it compiles. Here are mistakes that
this must see: the mutants of config/mutants.h in a kernel of each kind, and changes of one place in a header.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nvrtc
import orders
import pytest
import sass

from weft.kernels import prebuild
from weft.kernels.prebuild import KernelShape

OPTIONS = sass.options("compute_90")  # PTX alone, in half of the time
KINDS = (
    "dispatch rank_major, plain, int64 ids",
    "dispatch expert_major, plain, int64 ids",
    "dispatch masked, fp8, int64 ids",
    "combine rank_major from the heap, plain",
    "combine rank_major, plain",
    "combine rank_major, fp8",
    "combine by expert, fp8",
    "small dispatch masked, fp8, int64 ids",
    "small combine by expert, plain",
)
TO_RANKS, BY_EXPERT = "dispatch rank_major, plain, handle", "dispatch expert_major, plain, handle"
QUANTISED = "dispatch rank_major, fp8, handle"
FIRST_BY_EXPERT = "dispatch masked, plain, int32 ids"
PULLED, PUSHED, SUMS = (
    "combine rank_major from the heap, plain",
    "combine rank_major, plain",
    "combine by expert, plain",
)
FP8_ROWS = "combine rank_major, fp8"
SIDE = "combine rank_major from the heap, plain, side"
SMALL_SENDS = "small combine rank_major, plain, sends"
# Header; text that is there once; what takes its place; kernel; chain of which there is less.
MISTAKES = {
    "wait only until stores have read": (
        "ptx/bulk.cuh",
        '"cp.async.bulk.wait_group 0;"',
        '"cp.async.bulk.wait_group.read 0;"',
        TO_RANKS,
        orders.FULL_WAIT,
    ),
    "dispatch: no fence behind the last stores": (
        "kernels/dispatch/stages.cuh",
        "    ptx::fence_proxy_async_global();\n",
        "",
        TO_RANKS,
        orders.DRAIN,
    ),
    "dispatch: the fence comes before the wait": (
        "kernels/dispatch/stages.cuh",
        "    ptx::bulk_wait_all();\n    ptx::fence_proxy_async_global();\n",
        "    ptx::fence_proxy_async_global();\n    ptx::bulk_wait_all();\n",
        TO_RANKS,
        orders.DRAIN,
    ),
    "dispatch: no fence behind what is quantised": (
        "kernels/dispatch/quantize.cuh",
        "ptx::fence_proxy_async_shared();",
        "",
        QUANTISED,
        orders.FENCE_SHARED_SYNC,
    ),
    "dispatch by expert: items are noted that are only read": (
        "kernels/dispatch/stages.cuh",
        "ptx::bulk_wait<kPending>();",
        "ptx::bulk_wait_read<kPending>();",
        BY_EXPERT,
        orders.FULL_WAIT,
    ),
    "dispatch by expert: tokens are told without a fence between proxies": (
        "kernels/dispatch/tell.cuh",
        "ptx::fence_proxy_async_global();",
        "",
        BY_EXPERT,
        orders.FENCE_GLOBAL,
    ),
    "dispatch by expert: tokens are told without a fence of the system": (
        "kernels/dispatch/tell.cuh",
        "ptx::fence_sys();",
        "",
        BY_EXPERT,
        orders.FENCE_SYS,
    ),
    "dispatch by expert: rows that have come are loaded without a fence": (
        "kernels/dispatch/fan.cuh",
        "if (lane == 0) ptx::fence_proxy_async_global();",
        "",
        BY_EXPERT,
        orders.SYNC_FENCE,
    ),
    "dispatch by expert: zeros are stored without a fence": (
        "kernels/dispatch/fan.cuh",
        "ptx::fence_proxy_async_shared();",
        "",
        BY_EXPERT,
        orders.FENCE_SHARED_SYNC,
    ),
    "dispatch by expert: a queue is taken over without an acquire": (
        "kernels/dispatch/send.cuh",
        "ptx::ld_acquire_sys(this->queue_word(longest))",
        "ptx::ld_relaxed_sys(this->queue_word(longest))",
        BY_EXPERT,
        orders.ACQUIRE,
    ),
    "dispatch by expert: a planned chunk is told without a release": (
        "ptx/memory.h",
        '"red.release.sys.global.add.u64 ',
        '"red.relaxed.sys.global.add.u64 ',
        FIRST_BY_EXPERT,
        orders.RELEASE,
    ),
    "dispatch by expert: one of the headers is sent without a release": (
        "kernels/dispatch/tell.cuh",
        "this->peers().notify(Phase::kSend, flight, lane, static_cast<i32>(blockIdx.x));",
        "this->peers().post_token(flight, lane, 0);",
        BY_EXPERT,
        orders.RELEASE,
    ),
    "the owner word is given back without a release": (
        "transport/flight.cuh",
        "ptx::st_release_sys(&words->owner, 0);",
        "ptx::st_relaxed_sys(&words->owner, 0);",
        TO_RANKS,
        orders.RELEASE,
    ),
    "combine: rows of other kernels are loaded without a fence": (
        "kernels/combine/entry.cuh",
        "ptx::fence_proxy_async();",
        "",
        PULLED,
        orders.FENCE,
    ),
    "combine: pushed rows are loaded without a fence": (
        "kernels/combine/reduce.cuh",
        "ptx::fence_proxy_async();\n",
        "",
        PUSHED,
        orders.ACQUIRE_FENCE,
    ),
    "combine: progress is posted without a fence": (
        "kernels/combine/push.cuh",
        "ptx::fence_proxy_async();",
        "",
        PUSHED,
        orders.FENCE_POST,
    ),
    "combine: rows are noted that are only read": (
        "kernels/combine/push.cuh",
        "ptx::bulk_wait<kPending>();",
        "ptx::bulk_wait_read<kPending>();",
        PUSHED,
        orders.WAIT_NOTE,
    ),
    "combine: sums are noted that are only read": (
        "kernels/combine/push.cuh",
        "ptx::bulk_wait<0>();",
        "ptx::bulk_wait_read<0>();",
        SUMS,
        orders.WAIT_NOTE,
    ),
    "combine: sums are stored without a fence": (
        "kernels/combine/push.cuh",
        "ptx::fence_proxy_async_shared();",
        "",
        SUMS,
        orders.FENCE_SHARED_STORE,
    ),
    "combine: FP8 rows are noted that other lanes have yet to store": (
        "kernels/combine/quantize.cuh",
        "  __device__ void tell(u32 index) {\n    __syncwarp();\n",
        "  __device__ void tell(u32 index) {\n",
        FP8_ROWS,
        orders.SYNC_NOTE,
    ),
    "progress is posted without a release": (
        "sync/header.h",
        "{ ptx::st_release_sys(word, pack_progress(turn, n)); }",
        "{ ptx::st_relaxed_sys(word, pack_progress(turn, n)); }",
        SIDE,
        orders.RELEASE,
    ),
    "progress is waited for without an acquire": (
        "sync/header.h",
        "static_cast<void>(ptx::ld_acquire_sys(word));",
        "",
        SIDE,
        orders.ACQUIRE,
    ),
    "small combine: the last header is sent without a release": (
        "kernels/small/combine_entry.cuh",
        "peers.notify(Phase::kReduce, flight, b_.lane, block);",
        "peers.post_token(flight, b_.lane, 0);",
        SMALL_SENDS,
        orders.RELEASE,
    ),
}


# Of each kernel, and of each thing that may be missing; .ci/long has all kinds and mistakes.
OFTEN = (
    "dispatch rank_major, plain, int64 ids",
    "dispatch expert_major, plain, int64 ids",
    "combine rank_major, plain",
    "small dispatch masked, fp8, int64 ids",
    "small combine by expert, plain",
    "wait only until stores have read",
    "dispatch: no fence behind the last stores",
    "dispatch by expert: tokens are told without a fence between proxies",
    "dispatch by expert: tokens are told without a fence of the system",
    "combine: pushed rows are loaded without a fence",
    "progress is waited for without an acquire",
    "small combine: the last header is sent without a release",
)


def often(names: Iterable[str]) -> list[Any]:
    """Parameters of a test, marked long but for those of OFTEN."""
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in names]


@functools.cache
def sources() -> dict[str, str]:
    """Of all kernels of the reference shape."""
    return dict(prebuild.kernels(KernelShape(), prebuild.ARCHITECTURES["sm_90"]))


@functools.cache
def unmet(name: str, *options: str) -> dict[str, int]:
    """As orders.unmet, of that kernel compiled with more options, which go first."""
    return orders.unmet(name, nvrtc.compile_source(sources()[name], [*options, *OPTIONS]).ptx)


@pytest.mark.parametrize("name", often(KINDS))
def test_every_header_is_released_and_acquired(name: str) -> None:
    """Without the mutants nothing is missing; with one just what it takes away, of every header."""
    sent, heard = orders.headers(name)
    assert sent > 0
    assert heard > 0
    assert unmet(name) == {}
    assert unmet(name, "-DWEFT_MUTANT_RELAXED_SEND") == {orders.RELEASE: -sent}
    assert unmet(name, "-DWEFT_MUTANT_RELAXED_WAIT") == {orders.ACQUIRE: -heard}


@pytest.mark.parametrize("mistake", often(MISTAKES))
def test_a_lost_order_is_seen(mistake: str, tmp_path: Path) -> None:
    """A header with the mistake goes before the right one."""
    header, text, instead, name, chain = MISTAKES[mistake]
    right = (sass.INCLUDE / "weft" / header).read_text()
    assert right.count(text) == 1
    changed = tmp_path / "weft" / header
    changed.parent.mkdir(parents=True)
    changed.write_text(right.replace(text, instead))
    assert unmet(name) == {}
    assert unmet(name, f"--include-path={tmp_path}").get(chain, 0) < 0
