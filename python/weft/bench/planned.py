"""What `weft plan` says of a benchmark's calls on a machine, to stand beside their times."""

from __future__ import annotations

import dataclasses

from weft.bench.cases import Case
from weft.bench.options import Options
from weft.bench.ranks import Row
from weft.kernels.tuning import default_num_sms
from weft.planner import PRESETS, plan
from weft.planner.machines import preset

__all__ = ["PRESETS", "planned"]


def planned(options: Options, case: Case) -> Row:
    """`planned_us`, of the machine `planned_on`; null without one, and for calls that the planner does not know: it has
    rank_major rows of two bytes, or made FP8 in dispatch, with uniform routing.

    Raises:
        InvalidArgument: the machine is unknown.
    """
    found: Row = {"planned_on": options.preset, "planned_us": None}
    if options.preset is None:
        return found
    machine = dataclasses.replace(preset(options.preset), ranks_per_domain=options.node_ranks or options.ranks)
    is_wide = case.dtype == "fp32" or case.hidden % 128 != 0
    is_plain = (
        case.layout == "rank_major" and case.routing == "uniform" and case.mode != "latency" and not case.is_halved
    )
    if is_wide or not is_plain or case.op == "both" or options.ranks < 2 or case.quantize in ("fp8_ue8m0", "fp8_pow2"):
        return found
    num_sms = case.num_sms or default_num_sms(case.op, case.layout)
    made = plan(
        machine,
        num_ranks=options.ranks,
        num_tokens=case.tokens,
        hidden=case.hidden,
        num_experts=case.experts,
        top_k=case.top_k,
        num_sms=[num_sms],
    )
    dtype = "fp8" if case.op == "dispatch" and case.quantize == "fp8" else "bf16"
    found["planned_us"] = next(call.time_us for call in made.calls if (call.op, call.dtype) == (case.op, dtype))
    return found
