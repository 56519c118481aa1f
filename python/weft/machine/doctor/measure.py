"""What the machine really does: NVLink rates of all pairs, latencies, and the price of the wrong NUMA node.

`run` measures in a child process (measure_gpus.py, which imports torch); the checks here judge its figures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from weft.machine.child import ask
from weft.machine.doctor.model import Answer, Check, Facts, fail, ok, skip, warn

__all__ = ["CHECKS", "run"]

_SECONDS = 90.0
_MAIN = "from weft.machine.doctor.measure_gpus import main; main()"
_GOOD, _SLOW, _UNLIKE = 0.7, 0.4, 0.9  # of the nominal rate, of it again, of the median pair
_FLAG_US = 4.0
# What is measured from each NUMA node, a figure a GPU.
_FROM_NODE = {
    "launch_us": "launch and wait {:.1f} us",
    "pinned_gb_per_s": "from pinned memory {:.0f} GB/s",
    "copy_gb_per_s": "to the next GPU {:.0f} GB/s",
    "copy_us": "16 bytes {:.1f} us",
    "flag_us": "a flag {:.2f} us",
}


def run(facts: Facts) -> Mapping[str, Any]:
    """Measure this machine: about two seconds, and the start of torch and CUDA. Never raises: `{"error": text}`.

    From each NUMA node on which this process has CPUs, if there are two.
    """
    allowed = set(facts.machine.cpus.allowed)
    nodes = {node.idx: sorted(allowed & set(node.cpus)) for node in facts.machine.cpus.cpu_nodes}
    usable = {node: cpus for node, cpus in nodes.items() if cpus}
    answer = ask(_MAIN, arguments=[json.dumps(usable)], seconds=_SECONDS)
    return answer if isinstance(answer, dict) else {"error": "no figures"}


def _figures(facts: Facts, name: str) -> tuple[Any, list[Answer]]:
    """One part of the figures, or the answer that says why it is not there."""
    if facts.measured is None:
        return None, [skip("not measured")]
    if "error" in facts.measured:
        return None, [skip(f"not measured: {facts.measured['error']}")]
    if len(facts.measured.get("devices", ())) < 2 and name != "from_nodes":
        return None, [skip("one GPU")]
    value = facts.measured.get(name)
    if not value:
        return None, [skip(f"not measured: {facts.measured.get('problems', {}).get(name, 'nothing to measure')}")]
    return value, []


def _links(facts: Facts) -> Iterable[Answer]:
    rates, answers = _figures(facts, "copy_gb_per_s")
    if answers:
        return answers
    pairs = {(one, other): rate for one, row in enumerate(rates) for other, rate in enumerate(row) if rate}
    nominal = {pair: value for pair in pairs if (value := _nominal(facts, *pair))}
    median = statistics.median(pairs.values())
    for (one, other), rate in pairs.items():
        share = rate / nominal[one, other] if (one, other) in nominal else 1.0
        found = f"GPU {one} to GPU {other}: {rate:.0f} GB/s"
        fix = "nvidia-smi nvlink -s; nvidia-smi nvlink -e  # links that are down, errors; other load on the GPUs?"
        if share < _GOOD:
            judge = fail if share < _SLOW else warn
            answers.append(
                judge(
                    f"{found} of {nominal[one, other]:.0f} nominal",
                    cost=f"{100 - 100 * share:.0f} % of the link",
                    fix=fix,
                )
            )
        elif rate < _UNLIKE * median:
            cost = f"{100 - 100 * rate / median:.0f} % slower than other pairs, and every call waits for it"
            answers.append(warn(f"{found}, other pairs {median:.0f}", cost=cost, fix=fix))
    if answers:
        return answers
    text = f"{min(pairs.values()):.0f} to {max(pairs.values()):.0f} GB/s over {len(pairs)} directions"
    if nominal:
        best = max(nominal.values())
        text += f", {100 * min(pairs.values()) / best:.0f} % of {best:.0f} nominal"
    return [ok(text)]


def _nominal(facts: Facts, one: int, other: int) -> float | None:
    """GB/s of the links between two devices of the measurement; None where NVML does not say."""
    by_address = {gpu.pci.address: gpu for gpu in facts.gpus}
    addresses = (facts.measured or {}).get("devices", ())
    first, second = by_address.get(addresses[one]), by_address.get(addresses[other])
    pair = facts.machine.pair(first.idx, second.idx) if first and second else None
    if first is None or pair is None or not pair.num_nvlinks:
        return None
    speeds = [link.speed_mbps for link in first.nvlinks or () if link.active and link.speed_mbps]
    return statistics.mean(speeds) * pair.num_nvlinks / 1000 if speeds else None


def _copy_latency(facts: Facts) -> Iterable[Answer]:
    table, answers = _figures(facts, "copy_us")
    if answers:
        return answers
    values = [value for row in table for value in row if value]
    return [ok(f"{min(values):.1f} to {max(values):.1f} us a copy of 16 bytes, back to back")]


def _flag_latency(facts: Facts) -> Iterable[Answer]:
    table, answers = _figures(facts, "flag_us")
    if answers:
        return answers
    values = [value for row in table for value in row if value]
    found = f"{min(values):.2f} to {max(values):.2f} us a round trip of a flag"
    if max(values) > _FLAG_US:
        cost = f"{max(values) - 1.24:.1f} us more than on 4 x H200 (1.24 measured); a call waits for a round or two"
        return [warn(found, cost=cost, fix="nvidia-smi topo -m  # is the slow pair joined by NVLink?")]
    return [ok(found)]


def _wrong_node(facts: Facts) -> Iterable[Answer]:
    nodes, answers = _figures(facts, "from_nodes")
    if answers:
        return answers
    addresses = (facts.measured or {}).get("devices", ())
    home = {gpu.pci.address: gpu.numa_node for gpu in facts.gpus}
    near: dict[str, list[float]] = {name: [] for name in _FROM_NODE}
    far: dict[str, list[float]] = {name: [] for name in _FROM_NODE}
    for node, values in nodes.items():
        for idx, address in enumerate(addresses):
            side = near if len(nodes) == 1 or home.get(address) == int(node) else far
            for name in side:
                side[name] += values.get(name, ())[idx : idx + 1]
    if not near["launch_us"]:
        known = any(home.get(address) is not None for address in addresses)
        return [skip("this process has no CPU on the node of any GPU" if known else "the GPUs' nodes are not known")]
    if not far["launch_us"]:
        return [ok(f"{_medians(near)}; one NUMA node")]
    return [ok(f"own node: {_medians(near)}; wrong node: {_medians(far)}")]


def _medians(figures: Mapping[str, list[float]]) -> str:
    return ", ".join(_FROM_NODE[name].format(statistics.median(values)) for name, values in figures.items() if values)


CHECKS = (
    Check("measured", "copy-rate", "The all-to-all is as fast as the slowest link.", _links),
    Check("measured", "copy-latency", "Small batches are made of latencies.", _copy_latency),
    Check("measured", "flag-latency", "Every call waits for flags of all peers, a round trip or two.", _flag_latency),
    Check("measured", "wrong-node", "What a process on the far socket pays.", _wrong_node),
)
