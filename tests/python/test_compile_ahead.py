"""Guards against ranks of `weft bench` that compile, one after the other, what should be there before they start."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weft.bench.ahead import of_cases
from weft.bench.cases import EXPERTS, TOP_K, Case, cases
from weft.bench.options import SuiteOptions
from weft.call import check_options
from weft.call.options import CombineOptions, DispatchOptions
from weft.kernels import prebuild
from weft.kernels.tuning import DEFAULT_NUM_SMS, Table
from weft.limits import MAX_SMALL_TOKENS

ARCH = "sm_90"
SUITES = ("targets", "routings", "tokens", "sms", "small")
TABLES = (
    Table(),
    Table(most_tokens_else=0, num_sms=((8, 16),), num_sms_else=24),
    Table(most_tokens=((("dispatch", "rank_major", "bytes"), 512), (("combine", "rank_major", "plain"), 512))),
    Table(most_tokens=((("dispatch", "masked", "bytes"), 512),), most_tokens_else=0),  # the handle decides for combine
)


def calls_of(case: Case, table: Table, ranks: int, hidden: int) -> Iterator[tuple[str, Any]]:
    """What Weft itself makes of the calls of a case on GPUs."""
    ep: Any = SimpleNamespace(
        engine="nvlink",
        calls=SimpleNamespace(has_nodes=False, has_domains=False),
        most_num_sms=132,
        node_ranks=0,
        num_ranks=ranks,
        num_local_experts=EXPERTS // ranks,
        top_k=TOP_K,
        hidden=hidden,
        max_tokens_per_rank=case.tokens,
        small_tokens=min(case.tokens, MAX_SMALL_TOKENS),
        deadline_s=30.0,
        num_sms=DEFAULT_NUM_SMS,
        has_num_sms=False,
        num_windows=1,
        table=table,
    )
    form = "bytes" if case.rows == "fp8" else "plain" if case.quantize == "none" else "quantized"
    quantize = None if case.quantize == "none" else case.quantize
    capacity = 4096 if case.sizes == "capacity" else None
    how = {"num_sms": case.num_sms or None, "mode": case.mode}
    rows = {"layout": case.layout, "alignment": case.alignment, "quantize": quantize, "capacity": capacity}
    first = check_options.first_call(ep, form, DispatchOptions(**rows, **how))  # type: ignore[arg-type]
    yield "dispatch", first
    if case.source is not None:
        combine = CombineOptions(wire=case.wire, **how)  # type: ignore[arg-type]
        yield "combine", check_options.combine_call(ep, check_options.form_of(None, case.wire), first, combine)


@pytest.mark.parametrize("tokens", [128, 4096])
@pytest.mark.parametrize("table", TABLES, ids=["default", "throughput", "by form", "by handle"])
def test_what_the_suites_launch_is_compiled(table: Table, tokens: int) -> None:
    options = SuiteOptions(suites=SUITES, device="cuda", tokens=tokens, hidden=1024)
    chosen = [case for case in cases(SUITES, tokens=tokens, hidden=1024) if case.op != "step"]
    for case in chosen:
        ahead = {launch.source(ARCH) for launch in of_cases([case], options, table)}
        for op, call in calls_of(case, table, options.ranks, options.hidden):
            num_sms = {"small_num_sms": (call.num_sms,)} if call.is_small else {"num_sms": call.num_sms}
            shape = prebuild.KernelShape(ranks=options.ranks, hidden=1024, tokens=case.tokens, **num_sms)  # type: ignore[arg-type]
            rows = "fp8 rows" if case.rows == "fp8" else "plain" if case.quantize == "none" else case.quantize
            named = {"rows": rows} if op == "dispatch" else {"wire": case.wire, "has_push": case.link_kind == "push"}
            source = prebuild.call_source(shape, case.layout, ARCH, is_small=call.is_small, **named)  # type: ignore[arg-type]
            assert source in ahead, (case, op, dataclasses.asdict(call))
