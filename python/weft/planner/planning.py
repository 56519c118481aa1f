"""`weft.plan`: what to expect of a machine. Needs neither torch nor a GPU nor ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument
from weft.limits import MAX_GPU_RANKS, MAX_SMALL_TOKENS, MAX_TOKENS_PER_RANK
from weft.memory import Part
from weft.planner import measured, traffic
from weft.planner.machines import Machine, preset
from weft.planner.model import Load, load_of
from weft.planner.published import row_bytes
from weft.planner.resources import Network, memory_of, network_of
from weft.planner.weft_rates import CALLS, Call, weft_time

__all__ = ["MAX_RANKS", "MODES", "Plan", "PlannedCall", "plan"]

MODES = ("throughput", "latency")
MAX_RANKS = 512
MODEL, MEASURED = "model", "measured"
_LEAST_EXPERTS = 256
_SMS = {"throughput": (8, 16, 24), "latency": (32,)}
_SMALL_TOKENS_OF_FEW_SMS = 32


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """What to expect of one call. Times in us, rates in GB/s of a rank.

    Attributes:
        op, dtype, num_sms: the call; dtype is that of its rows on the way.
        time_us: everything inside the public call, of the busiest rank.
        basis: "model", or "measured" where Weft was measured with this GPU and shape; `measured_at` names the commit
            and file then. model_us: the model's time, also then.
        published_gb_per_s: as published tables count: rows to the own domain (within one domain: to the own rank)
            included; in latency mode a copy for every expert.
        wire_gb_per_s: bytes that leave the domain (within one domain: the rank), or come from there if these are
            more, / time.
        nvlink_gb_per_s: bytes of the busiest rank on NVLink / time.
        binds: NIC, NVLink or SM, whichever the model says takes longest; network_us, nvlink_us, sm_us: how long each.
    """

    op: str
    dtype: str
    num_sms: int
    time_us: float
    model_us: float
    basis: str
    measured_at: str
    published_gb_per_s: float
    wire_gb_per_s: float
    nvlink_gb_per_s: float
    binds: str
    network_us: float
    nvlink_us: float
    sm_us: float
    start_us: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to expect of a job on a machine; `weft.plan` makes it.

    Attributes:
        machine: a `weft.planner.machines.Machine`.
        num_ranks, num_domains, ranks_per_domain; num_tokens, hidden, num_experts, top_k; mode, routing.
        ranks_per_token, domains_per_token: distinct ranks and domains that a token reaches on average.
        imbalance: rows of the busiest rank / mean.
        calls: `PlannedCall` by operation and number of SMs.
        memory: `weft.memory.Part` by part, bytes on each rank, the total last.
        network: connections, signals and rings for the first of `num_sms`; None within one domain.
    """

    machine: Machine
    mode: str
    num_ranks: int
    num_domains: int
    ranks_per_domain: int
    num_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    routing: str
    ranks_per_token: float
    domains_per_token: float
    imbalance: float
    calls: tuple[PlannedCall, ...]
    memory: tuple[Part, ...]
    network: Network | None

    def to_rows(self) -> list[dict[str, Any]]:
        """JSON objects: one of kind "plan" for each call, then one of kind "plan_resources"."""
        common = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("machine", "calls", "memory", "network")
        }
        common = {"machine": self.machine.name, **common}
        rows = [{"kind": "plan", **common, **dataclasses.asdict(call)} for call in self.calls]
        resources: dict[str, Any] = {part.name: part.num_bytes for part in self.memory}
        if self.network is not None:
            resources.update(dataclasses.asdict(self.network))
        assumed = list(self.machine.assumed)
        basis = MODEL if self.network is not None or self.ranks_per_domain > MAX_GPU_RANKS else "as weft size"
        return [*rows, {"kind": "plan_resources", **common, "basis": basis, **resources, "assumed": assumed}]


def plan(
    machine: str | Machine = "dgx-h100",
    *,
    num_ranks: int = 16,
    num_tokens: int | None = None,
    hidden: int = 7168,
    num_experts: int | None = None,
    top_k: int | None = None,
    mode: str = "throughput",
    num_sms: Sequence[int] | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    histogram: Sequence[float] | None = None,
    trace: str | Path | None = None,
) -> Plan:
    """What to expect of Weft's dispatch and combine on a machine before renting it: times, rates, what binds, memory,
    connections. A model, but where Weft was measured. Local, no device is touched, no torch is imported.

    Args:
        machine: name of a preset (`weft.planner.PRESETS`) or a `weft.planner.Machine`.
        num_ranks: 2 to 512, one a GPU.
        num_tokens: T of each rank; 4096, in latency mode 128 (at most 512).
        hidden, num_experts, top_k: H, E, K; without E the least multiple of the ranks from 256 on, K = 8.
        mode: "throughput" or "latency" (kernels for small batches).
        num_sms: SMs of a call, any number of figures; without it some usual ones.
        num_groups, topk_groups: picks fall on `topk_groups` of `num_groups` equal runs of experts.
        histogram: picks that each of the E experts got; E follows from it.
        trace: a file of `weft.routing.record`; E and K follow from it. Needs numpy.
            Without groups, histogram and trace every set of K experts is equally likely.

    Raises:
        InvalidArgument: a value that is not allowed, or more than one kind of routing.
    """
    chosen = preset(machine) if isinstance(machine, str) else machine
    if mode not in MODES:
        raise InvalidArgument(f"mode={mode!r}: allowed are {', '.join(MODES)}")
    is_small = mode == "latency"
    num_tokens = (128 if is_small else 4096) if num_tokens is None else num_tokens
    _check_range("num_ranks", num_ranks, 2, MAX_RANKS)
    _check_range("num_tokens", num_tokens, 1, MAX_SMALL_TOKENS if is_small else MAX_TOKENS_PER_RANK)
    _check_range("hidden", hidden, 128, 1 << 20)
    if hidden % 128:
        raise InvalidArgument(f"hidden={hidden}: must be a multiple of 128, the values of an FP8 scale")
    size = chosen.domain_size(num_ranks)
    if size < num_ranks and not chosen.nic:
        raise InvalidArgument(f"num_ranks={num_ranks}: {chosen.name} has no NIC, so allowed is 2 to {size}")
    groups = None if num_groups is None and topk_groups is None else (num_groups, topk_groups)
    reach = _reach(num_ranks, size, (num_experts, top_k), groups, (histogram, trace))
    sms = _check_sms(num_sms, chosen, mode, num_tokens, size == num_ranks)
    loads = {call: load_of(reach, num_tokens=num_tokens, row_bytes=row_bytes(call.dtype, hidden)) for call in CALLS}
    calls = tuple(
        _planned(chosen, call, loads[call], s, reach=reach, hidden=hidden, mode=mode) for call in CALLS for s in sms
    )
    load, widest = loads[CALLS[-1]], row_bytes("bf16", hidden)
    network = network_of(chosen, load, top_k=reach.top_k, num_blocks=sms[0], row_bytes=widest, is_small=is_small)
    busiest = num_ranks * num_tokens * max(reach.by_rank)
    return Plan(
        machine=chosen,
        mode=mode,
        num_ranks=num_ranks,
        num_domains=num_ranks // size,
        ranks_per_domain=size,
        num_tokens=num_tokens,
        hidden=hidden,
        num_experts=reach.num_experts,
        top_k=reach.top_k,
        routing=reach.routing,
        ranks_per_token=reach.ranks,
        domains_per_token=reach.domains,
        imbalance=max(reach.by_rank) * num_ranks / reach.ranks if reach.ranks else 1.0,
        calls=calls,
        memory=memory_of(load, network, hidden=hidden, top_k=reach.top_k, busiest_rows=busiest),
        network=network,
    )


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgument(f"{name}={value!r}: allowed is {least} to {most}")


def _check_sms(
    num_sms: Sequence[int] | None, machine: Machine, mode: str, num_tokens: int, is_one_domain: bool
) -> tuple[int, ...]:
    if num_sms is None:
        few = mode == "latency" and is_one_domain and num_tokens > _SMALL_TOKENS_OF_FEW_SMS
        return (64,) if few else _SMS[mode]
    for number in num_sms:
        _check_range("num_sms", number, 1, machine.num_sms)
    if not num_sms:
        raise InvalidArgument("num_sms is empty; it needs at least one number")
    return tuple(num_sms)


def _reach(
    num_ranks: int,
    size: int,
    shape: tuple[int | None, int | None],
    groups: tuple[int | None, int | None] | None,
    recorded: tuple[Sequence[float] | None, str | Path | None],
) -> traffic.Reach:
    (num_experts, top_k), (histogram, trace) = shape, recorded
    if sum(kind is not None for kind in (groups, histogram, trace)) > 1:
        raise InvalidArgument("groups, histogram and trace: allowed is one of them")
    if trace is not None:
        reach = traffic.from_trace(trace, num_ranks, size)
    elif histogram is not None:
        reach = traffic.from_histogram(histogram, 8 if top_k is None else top_k, num_ranks, size)
    else:
        num_experts = num_ranks * math.ceil(_LEAST_EXPERTS / num_ranks) if num_experts is None else num_experts
        top_k = 8 if top_k is None else top_k
        if groups is None:
            return traffic.uniform(num_experts, top_k, num_ranks, size)
        if groups[0] is None or groups[1] is None:
            raise InvalidArgument(f"num_groups={groups[0]}, topk_groups={groups[1]}: both are needed")
        return traffic.group_limited(num_experts, top_k, num_ranks, size, num_groups=groups[0], topk_groups=groups[1])
    for name, given, found in (("num_experts", num_experts, reach.num_experts), ("top_k", top_k, reach.top_k)):
        if given is not None and given != found:
            raise InvalidArgument(f"{name}={given}: the {reach.routing} has {found}")
    return reach


def _planned(
    machine: Machine, call: Call, load: Load, num_sms: int, *, reach: traffic.Reach, hidden: int, mode: str
) -> PlannedCall:
    is_small = mode == "latency"
    times = weft_time(load, machine, call, num_sms=num_sms, is_small=is_small)
    found = None
    if reach.routing == "uniform" and not load.is_network:
        found = measured.find(
            gpu=machine.gpu,
            ranks=load.num_ranks,
            mode=mode,
            op=call.op,
            dtype=call.dtype,
            sms=num_sms,
            tokens=load.num_tokens,
            hidden=hidden,
            experts=load.num_experts,
            top_k=reach.top_k,
        )
    time_us = times.total_us if found is None else found.time_us
    counted = load.copies if is_small else load.domain_rows if load.is_network else load.rank_rows

    def rate(rows: float) -> float:
        return rows * load.row_bytes / time_us / 1e3

    return PlannedCall(
        op=call.op,
        dtype=call.dtype,
        num_sms=num_sms,
        time_us=time_us,
        model_us=times.total_us,
        basis=MODEL if found is None else MEASURED,
        measured_at="" if found is None else f"{found.commit}, {found.file}",
        published_gb_per_s=rate(counted),
        wire_gb_per_s=rate(load.network_rows if load.is_network else load.nvlink_rows),
        nvlink_gb_per_s=rate(load.nvlink_rows),
        binds=times.binds,
        network_us=times.network_us,
        nvlink_us=times.nvlink_us,
        sm_us=times.sm_us,
        start_us=times.start_us,
    )
