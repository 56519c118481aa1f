"""Guards against a plan that promises what the design and the measurements don't: times, rates, memory, connections."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planner_simulator import Setup, Simulation

import weft
from weft.memory import Shape, parts
from weft.planner import PRESETS, Machine, traffic
from weft.planner.compare import compare
from weft.planner.measured import measurements
from weft.planner.published import row_bytes

ROOT = Path(__file__).resolve().parents[2]


def figures(planned: weft.planner.Plan) -> dict[tuple[str, str, int], weft.planner.PlannedCall]:
    return {(call.op, call.dtype, call.num_sms): call for call in planned.calls}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_every_preset_plans_from_2_to_512_ranks(name: str, num_ranks: int, mode: str) -> None:
    planned = weft.plan(name, num_ranks=num_ranks, mode=mode)
    assert planned.num_domains * planned.ranks_per_domain == num_ranks
    assert planned.ranks_per_domain == min(num_ranks, {"gb200-nvl72": 64}.get(name, 8))
    assert (planned.network is None) == (planned.num_domains == 1)
    for call in planned.calls:
        assert call.binds in (("NIC", "NVLink", "SM") if planned.network else ("NVLink", "SM"))
        assert 0 < call.wire_gb_per_s <= (PRESETS[name].nic if planned.network else PRESETS[name].nvlink_push)
        assert call.published_gb_per_s > call.wire_gb_per_s
        assert call.basis == "model" or call.measured_at
    assert planned.memory[-1].num_bytes >= max(part.num_bytes for part in planned.memory[:-1])


# Goals of the scale-out design: us at 4, 8, 16 SMs, and GB/s as tables count. With top-4 groups a token reaches 3.98
# nodes, since the gate takes the groups of the best experts; the design's times have 3.63, of groups drawn by lot.
DESIGN = [
    ("dispatch", "fp8", 16, None, (1170, 702, 676), (51.6, 86.0, 89.2)),
    ("dispatch", "bf16", 16, None, (2241, 1333, 1284), (52.2, 87.8, 91.2)),
    ("combine", "bf16", 16, None, (2436, 1371, 1284), (48.1, 85.4, 91.2)),
    ("dispatch", "fp8", 32, None, (1822, 1758, 1758), (60.0, 62.2, 62.3)),
    ("dispatch", "bf16", 32, None, (3506, 3382, 3381), (60.5, 62.8, 62.8)),
    ("combine", "bf16", 32, None, (3554, 3382, 3381), (59.7, 62.7, 62.8)),
    ("dispatch", "fp8", 64, 4, (2089, 2054, 2054), (52.6, 53.5, 53.5)),
    ("dispatch", "bf16", 64, 4, (4024, 3956, 3955), (53.0, 53.9, 53.9)),
    ("combine", "bf16", 64, 4, (4025, 3956, 3955), (52.9, 53.9, 53.9)),
]


@pytest.mark.parametrize(("op", "dtype", "num_ranks", "top", "times", "rates"), DESIGN)
def test_large_calls_are_as_designed(
    op: str, dtype: str, num_ranks: int, top: int | None, times: tuple[int, ...], rates: tuple[float, ...]
) -> None:
    groups = {"num_groups": num_ranks // 8, "topk_groups": top} if top else {}
    found = figures(weft.plan(num_ranks=num_ranks, num_sms=(4, 8, 16), **groups))
    more = 3.983 / 3.629 if top else 1.0
    for num_sms, time_us, rate in zip((4, 8, 16), times, rates, strict=True):
        call = found[op, dtype, num_sms]
        assert call.time_us == pytest.approx(time_us * more, rel=1e-2 if top else 1e-3)
        assert call.published_gb_per_s == pytest.approx(rate, rel=1e-2 if top else 2e-3)
        is_bound_by_stores = num_ranks == 16 and num_sms == 4
        assert call.binds == ("SM" if is_bound_by_stores else "NIC")


def simulated(planned: weft.planner.Plan, dtype: str, **options: object) -> tuple[float, float]:
    """us, share of NIC: the event simulation of the plan's dispatch (or a combine of as many bytes)."""
    size = planned.ranks_per_domain
    setup = {
        "domains": planned.domains_per_token,
        "ranks": planned.ranks_per_token,
        "num_domains": planned.num_domains,
        "ranks_per_domain": size,
        "row_bytes": row_bytes(dtype),
        "num_tokens": planned.num_tokens,
        "num_blocks": planned.calls[0].num_sms,
        **options,
    }
    return Simulation(Setup(**setup)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_ranks", "num_experts", "top"), [(16, 256, 0), (32, 256, 4), (64, 256, 4), (64, 512, 0)])
@pytest.mark.parametrize("num_sms", [4, 8, 16])
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_formula_is_what_events_give(num_ranks: int, num_experts: int, top: int, num_sms: int, dtype: str) -> None:
    groups = {"num_groups": num_ranks // 8, "topk_groups": top} if top else {}
    planned = weft.plan(num_ranks=num_ranks, num_experts=num_experts, num_sms=(num_sms,), **groups)
    assert planned.network is not None
    rings = {"chunk_rows": planned.network.chunk_rows, "slots": planned.network.slots}
    time_us, busy = simulated(planned, dtype, **rings)
    call = figures(planned)["dispatch", dtype, num_sms]
    assert call.time_us == pytest.approx(time_us, rel=0.051)
    if num_sms == 8:
        assert 0.90 <= busy <= 0.985


@pytest.mark.parametrize("num_ranks", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("op", "dtype", "place_us"), [("dispatch", "fp8", 17.0), ("combine", "bf16", 11.0)])
def test_small_batches_are_what_events_give(num_ranks: int, op: str, dtype: str, place_us: float) -> None:
    """With 1 or 2 rows a chunk within 8 %; chunks of 4 rows, for backends with few puts, take up to 19 % longer."""
    planned = weft.plan(num_ranks=num_ranks, mode="latency")
    call = figures(planned)[op, dtype, 32]
    for chunk_rows, off in ((1, 0.08), (2, 0.08), (4, 0.20)):
        options = {"chunk_rows": chunk_rows, "place_us": place_us, "rings_first": True}
        assert call.time_us == pytest.approx(simulated(planned, dtype, **options)[0], rel=off)


@pytest.mark.parametrize(
    ("num_ranks", "dispatch", "combine"), [(128, (153, 162), (271, 289)), (256, (168, 175), (302, 314))]
)
def test_low_latency_is_compared_uniform_with_uniform(
    num_ranks: int, dispatch: tuple[int, int], combine: tuple[int, int]
) -> None:
    """Published routing is uniform over all experts; so is Weft's beside it, even if the plan is group-limited."""
    limited = weft.plan("h800-deepep", num_ranks=num_ranks, mode="latency", num_groups=8, topk_groups=4)
    found = compare(limited)
    assert {one.op for one in found} == {"dispatch", "combine"}
    published = {(128, "dispatch"): 192, (128, "combine"): 369, (256, "dispatch"): 194, (256, "combine"): 360}
    for one in found:
        assert one.routing == "uniform"
        assert one.basis == "model"
        assert one.published_us == published[num_ranks, one.op]
        low, high = dispatch if one.op == "dispatch" else combine
        assert low <= one.weft_us <= high
    limited_us = figures(limited)["dispatch", "fp8", 32].time_us
    assert limited_us < 0.95 * next(one.weft_us for one in found if one.op == "dispatch")


def test_both_calls_at_16_ranks_and_32_experts() -> None:
    found = compare(weft.plan(num_ranks=16, num_experts=32, mode="latency"))
    both = [one for one in found if one.op == "dispatch + combine"]
    assert {one.system: round(one.published_us, 1) for one in both} == {"DeepEP main": 372.7, "NIXL PR": 368.2}
    assert all(one.weft_us <= 160 and one.num_experts == 32 for one in both)


def test_weft_is_behind_where_the_model_says_so() -> None:
    """Combine on 4 SMs at EP16: 48 against 52 GB/s of Hybrid-EP's kernel. The page says it too."""
    found = compare(weft.plan(num_ranks=16))
    behind = [one for one in found if one.ratio < 1]
    assert [(one.system, one.op, one.num_sms, one.measured) for one in behind] == [
        ("Hybrid-EP", "combine", 4, "kernel")
    ]
    assert "combine on 4 SMs at EP16" in " ".join((ROOT / "docs" / "planner.md").read_text(encoding="utf-8").split())


def test_later_ports_and_blocks() -> None:
    """The simulator's ports and skew do something: two ports take as long as one, a late block at most its lateness."""
    planned = weft.plan(num_ranks=16, num_sms=(8,))
    one, _ = simulated(planned, "fp8")
    two, _ = simulated(planned, "fp8", ports=2)
    late, _ = simulated(planned, "fp8", late_us=100.0)
    slots, _ = simulated(planned, "fp8", slots=2)
    assert two == pytest.approx(one, rel=0.05)
    assert one < late <= one + 101
    assert slots > 1.08 * one


def test_measurements_are_those_of_the_result_files() -> None:
    assert len(measurements()) >= 50
    for entry in measurements():
        rows = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / entry.file).read_text().splitlines()]
        machine = next(row for row in rows if row["kind"] == "machine")
        assert machine["commit"].startswith(entry.commit)
        assert entry.gpu in machine["device_name"]
        wanted = {"name": entry.case, "tokens": entry.tokens, "ranks": entry.ranks, "hidden": entry.hidden}
        wanted |= {"experts": entry.experts, "top_k": entry.top_k, "op": entry.op, "layout": entry.layout}
        found = [row for row in rows if row["kind"] == "case" and all(row.get(k) == v for k, v in wanted.items())]
        times = [row["time_us"] for row in found if entry.sms in (row["num_sms"], row.get("sms"))]
        assert any(entry.time_us == pytest.approx(time_us, abs=0.06) for time_us in times), entry


def test_a_measurement_takes_the_place_of_the_model() -> None:
    call = figures(weft.plan("hgx-h200", num_ranks=4))["dispatch", "fp8", 16]
    assert (call.basis, call.time_us) == ("measured", 262.4)
    assert "gpu_bench_6c3371c" in call.measured_at
    assert call.model_us == pytest.approx(262.4, rel=0.05)
    for other in (
        weft.plan("hgx-h200", num_ranks=4, top_k=4),
        weft.plan("hgx-h200", num_ranks=4, num_tokens=4095),
        weft.plan("hgx-h200", num_ranks=4, num_groups=8, topk_groups=4),
        weft.plan("b200-8", num_ranks=4),
    ):
        assert all(call.basis == "model" for call in other.calls)


def test_the_model_is_near_what_was_measured() -> None:
    """Where bytes decide: half within 5 %, all within 21 % (FP8 on few SMs). Below T = 4096 kernels for large calls
    wait for the host, which is not in the model."""
    off = []
    for entry in measurements():
        name = {"H100": "dgx-h100", "H200": "hgx-h200"}[entry.gpu]
        planned = weft.plan(name, num_ranks=entry.ranks, num_tokens=entry.tokens, mode=entry.mode, num_sms=(entry.sms,))
        call = figures(planned)[entry.op, entry.dtype, entry.sms]
        assert call.basis == "measured"
        off.append(abs(call.model_us / entry.time_us - 1))
        if entry.mode == "latency" or entry.tokens >= 4096:
            assert off[-1] < 0.21, entry
        if entry.dtype == "bf16" and entry.tokens == 4096 and entry.sms >= 8:
            assert off[-1] < 0.11, entry
    assert sorted(off)[len(off) // 2] < 0.05


def test_memory_within_a_domain_is_that_of_weft_size() -> None:
    planned = weft.plan(num_ranks=8)
    shape = Shape(ranks=8, tokens=4096, hidden=7168, experts=256, top_k=8, engine="nvlink")
    assert planned.memory == parts(shape)


@pytest.mark.parametrize(
    ("num_ranks", "chunk_rows", "slots", "mega_bytes", "signals"),
    [(16, 16, 4, 7.4, 42), (64, 16, 4, 51, 294), (512, 4, 2, 58, 1638)],
)
def test_rings_are_as_designed(num_ranks: int, chunk_rows: int, slots: int, mega_bytes: float, signals: int) -> None:
    planned = weft.plan(num_ranks=num_ranks, num_sms=(8,))
    network = planned.network
    assert network is not None
    assert (network.chunk_rows, network.slots) == (chunk_rows, slots)
    assert network.ring_bytes / 2 / 1e6 == pytest.approx(mega_bytes, rel=0.03)
    peers = num_ranks // 8 - 1
    assert network.peers == peers
    assert network.qps == 4 * peers
    assert network.qps_full == 4 * (num_ranks - 1)
    assert network.signals == (signals if slots == 4 else peers * (8 * (slots + 1) + 2))
    assert network.routing_bytes == 2 * 2 * peers * 72 * 1024


def test_a_busy_expert_takes_longer() -> None:
    even = weft.plan(num_ranks=32, histogram=[1.0] * 256)
    busy = weft.plan(num_ranks=32, histogram=[8.0] * 32 + [1.0] * 224)
    assert busy.imbalance > 2
    assert even.imbalance == pytest.approx(1.0)
    for key, call in figures(busy).items():
        assert call.time_us > 1.1 * figures(even)[key].time_us


def test_a_machine_of_ones_own() -> None:
    machine = Machine(
        name="mine", gpu="X", description="two NICs of 25 GB/s", nic=25.0, latency_us=30.0, ranks_per_domain=4
    )
    planned = weft.plan(machine, num_ranks=16, num_experts=64)
    assert (planned.num_domains, planned.ranks_per_domain) == (4, 4)
    assert all(call.wire_gb_per_s < 25 for call in planned.calls)
    alone = Machine(name="alone", gpu="X", description="no NIC", nic=0.0)
    assert weft.plan(alone, num_ranks=8).network is None
    with pytest.raises(weft.InvalidArgument, match="no NIC"):
        weft.plan(alone, num_ranks=16)
    with pytest.raises(weft.InvalidArgument, match="nic_ports=0"):
        Machine(name="wrong", gpu="X", description="", nic_ports=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"machine": "dgx"}, "preset='dgx': allowed are dgx-h100"),
        ({"num_ranks": 1}, "num_ranks=1: allowed is 2 to 512"),
        ({"num_ranks": 1024}, "num_ranks=1024"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"mode": "latency", "num_tokens": 1000}, "allowed is 1 to 512"),
        ({"hidden": 100}, "hidden=100"),
        ({"num_experts": 100}, "num_experts=100: must be a positive multiple of num_ranks=16"),
        ({"top_k": 0}, "top_k=0"),
        ({"num_sms": (0,)}, "num_sms=0"),
        ({"num_sms": (133,)}, "allowed is 1 to 132"),
        ({"num_sms": ()}, "num_sms is empty"),
        ({"num_groups": 8}, "topk_groups=None: both"),
        ({"num_groups": 7, "topk_groups": 2}, "num_groups=7"),
        ({"num_groups": 8, "topk_groups": 9}, "topk_groups=9"),
        ({"num_groups": 8, "topk_groups": 4, "histogram": [1.0] * 256}, "allowed is one of them"),
        ({"histogram": [1.0] * 256, "num_experts": 512}, "num_experts=512: the histogram has 256"),
        ({"trace": "/nowhere/trace"}, "no such trace"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(weft.InvalidArgument, match=text):
        weft.plan(**options)  # type: ignore[arg-type]


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import weft; "
        "p = weft.plan('gb200-nvl72', num_ranks=144, num_groups=8, topk_groups=4); p.to_rows(); "
        "from weft.planner.compare import compare; compare(weft.plan(num_ranks=16)); "
        "weft.plan(num_ranks=16, histogram=[1.0] * 256); print(p.num_domains)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2\n"


def test_reach_counts_domains_of_one_rank() -> None:
    reach = traffic.uniform(16, 2, 4, 1)
    assert reach.ranks == pytest.approx(reach.domains)
    assert reach.ranks_per_domain == 1
