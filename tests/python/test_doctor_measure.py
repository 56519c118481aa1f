"""Guards against measured figures that are judged wrongly, or that are missing and judged all the same."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_machines import NUM_GPUS, machine

from weft.machine.doctor import Facts, Finding, diagnose, measure, measure_gpus

ADDRESSES = [entry.pci.address for entry in machine().gpus]
NOMINAL = 18 * 26.562
NEAR = "launch and wait 6.0 us, from pinned memory 55 GB/s"
FAR = "launch and wait 9.0 us, from pinned memory 40 GB/s"


def square(value: float, **odd: float) -> list[list[float | None]]:
    """The same figure for all pairs but those named like p01=3.0."""
    return [
        [None if one == other else odd.get(f"p{one}{other}", value) for other in range(NUM_GPUS)]
        for one in range(NUM_GPUS)
    ]


def figures(**changes: Any) -> dict[str, Any]:
    near_first = {"launch_us": [6.0, 6.0, 9.0, 9.0], "pinned_gb_per_s": [55.0, 55.0, 40.0, 40.0]}
    near_second = {name: values[::-1] for name, values in near_first.items()}
    whole = {"devices": ADDRESSES, "copy_gb_per_s": square(396.0), "copy_us": square(7.0), "flag_us": square(1.2)}
    return {**whole, "from_nodes": {"0": near_first, "1": near_second}, **changes}


def found(measured: dict[str, Any] | None) -> dict[str, list[Finding]]:
    answers: dict[str, list[Finding]] = {}
    for finding in diagnose(Facts(machine(), live=True, measured=measured), measure.CHECKS):
        answers.setdefault(finding.check, []).append(finding)
    return answers


def test_good_figures_are_told() -> None:
    texts = {check: [(one.status, one.found) for one in answers] for check, answers in found(figures()).items()}
    assert texts == {
        "copy-rate": [("ok", f"396 to 396 GB/s over 12 directions, 83 % of {NOMINAL:.0f} nominal")],
        "copy-latency": [("ok", "7.0 to 7.0 us a copy of 16 bytes, back to back")],
        "flag-latency": [("ok", "1.20 to 1.20 us a round trip of a flag")],
        "wrong-node": [
            ("ok", f"own node: {NEAR}; wrong node: {FAR}"),
        ],
    }


@pytest.mark.parametrize(
    ("rate", "status", "words"),
    [
        (350.0, "warn", "GPU 0 to GPU 1: 350 GB/s, other pairs 396"),
        (300.0, "warn", "GPU 0 to GPU 1: 300 GB/s of 478 nominal"),
        (50.0, "fail", "GPU 0 to GPU 1: 50 GB/s of 478 nominal"),
    ],
)
def test_a_slow_pair_is_named(rate: float, status: str, words: str) -> None:
    (only,) = found(figures(copy_gb_per_s=square(396.0, p01=rate)))["copy-rate"]
    assert (only.status, only.found) == (status, words)
    assert only.cost
    assert only.fix


def test_all_pairs_slow() -> None:
    answers = found(figures(copy_gb_per_s=square(200.0)))["copy-rate"]
    assert [answer.status for answer in answers] == ["warn"] * 12


def test_devices_are_matched_by_address_not_by_number() -> None:
    from_one_node = {"0": {"launch_us": [9.0, 6.0], "pinned_gb_per_s": [40.0, 55.0]}}
    measured = figures(devices=[ADDRESSES[3], ADDRESSES[0]], from_nodes=from_one_node)
    measured["from_nodes"]["1"] = {"launch_us": [6.0, 9.0], "pinned_gb_per_s": [55.0, 40.0]}
    assert found(measured)["wrong-node"][0].found.startswith("own node: launch and wait 6.0 us")


def test_all_figures_of_the_wrong_node_are_told() -> None:
    links = {"copy_gb_per_s": [396.0] * 4, "copy_us": [7.0, 7.0, 9.0, 9.0], "flag_us": [1.2] * 4}
    nodes = figures()["from_nodes"]
    measured = figures(
        from_nodes={"0": nodes["0"] | links, "1": nodes["1"] | {**links, "copy_us": [9.0, 9.0, 7.0, 7.0]}}
    )
    (told,) = found(measured)["wrong-node"]
    own, wrong = told.found.split("; wrong node: ")
    assert own.endswith(", from pinned memory 55 GB/s, to the next GPU 396 GB/s, 16 bytes 7.0 us, a flag 1.20 us")
    assert wrong.endswith(", from pinned memory 40 GB/s, to the next GPU 396 GB/s, 16 bytes 9.0 us, a flag 1.20 us")


def test_gpus_of_unknown_nodes_are_not_called_far() -> None:
    whole = machine()
    lost = dataclasses.replace(whole, gpus=tuple(dataclasses.replace(entry, numa_node=None) for entry in whole.gpus))
    (told,) = [one for one in diagnose(Facts(lost, measured=figures()), measure.CHECKS) if one.check == "wrong-node"]
    assert (told.status, told.found) == ("n/a", "the GPUs' nodes are not known")


def test_a_slow_flag_is_a_warning() -> None:
    assert found(figures(flag_us=square(1.2, p23=9.0)))["flag-latency"][0].status == "warn"


@pytest.mark.parametrize(
    "measured",
    [
        None,
        {"error": "torch sees no GPU"},
        {},
        {"devices": ["0000:03:00.0"]},
        figures(copy_gb_per_s=None, flag_us=None),
    ],
)
def test_what_was_not_measured_is_not_judged(measured: dict[str, Any] | None) -> None:
    answers = found(measured)
    assert answers["copy-rate"][0].status == "n/a"
    assert answers["flag-latency"][0].status == "n/a"
    if measured and "error" in measured:
        assert "torch sees no GPU" in answers["copy-rate"][0].found


class FakeTensor:
    """Enough of a tensor for the measurements: where it is, how large, and a clock that copies move on."""

    def __init__(self, torch: FakeTorch, size: int, device: int | None) -> None:
        self.torch, self.size, self.device, self.values = torch, size, device, [0, 0]

    def copy_(self, other: FakeTensor, non_blocking: bool = False) -> FakeTensor:
        assert non_blocking
        self.torch.now_ms += other.size / 400e6 if other.device is not None else other.size / 50e6
        return self

    def fill_(self, value: int) -> FakeTensor:
        return self

    def zero_(self) -> FakeTensor:
        self.values = [0, 0]
        return self

    def add_(self, value: int) -> FakeTensor:
        return self

    def __getitem__(self, idx: int) -> int:
        return self.values[idx]


class FakeTorch:
    """Two GPUs: 400 GB/s between them, 50 from the host, flags that take 1.5 us (or never arrive)."""

    uint8 = int32 = float32 = None

    def __init__(self, *, deaf: bool = False, has_compiler: bool = True) -> None:
        self.now_ms, self.deaf, self.cuda = 0.0, deaf, self
        if has_compiler:
            self._compile_kernel = lambda source, name: self.kernel

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, idx: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x13 + 16 * idx, pci_device_id=0)

    def device(self, idx: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: int | None = None) -> None:
        pass

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now_ms)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def empty(self, size: int, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> FakeTensor:
        device = None if device == "cpu" else device
        assert (device is None) == pin_memory
        return FakeTensor(self, size, device)

    def zeros(self, size: int, dtype: Any = None, device: int | None = None) -> FakeTensor:
        return FakeTensor(self, size * 4, device)

    def kernel(self, grid: Any, block: Any, args: list[Any]) -> None:
        mine, theirs, rounds, first = args
        assert (mine.device == theirs.device) == (rounds == 0)
        mine.values[1] = int(self.deaf)
        self.now_ms += rounds * 1.5e-3 * first


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    seen: list[list[int]] = []
    monkeypatch.setattr(measure_gpus.os, "sched_setaffinity", lambda pid, cpus: seen.append(cpus))
    return seen


def test_what_the_child_measures(bound: list[list[int]]) -> None:
    result = measure_gpus._measure(FakeTorch(), {"0": [0, 1], "1": [2]})
    assert result["devices"] == ["0000:13:00.0", "0000:23:00.0"]
    assert result["copy_gb_per_s"] == [[None, pytest.approx(400)], [pytest.approx(400), None]]
    assert result["flag_us"] == [[None, pytest.approx(1.5)], [None, None]]
    assert result["from_nodes"]["1"]["pinned_gb_per_s"] == [pytest.approx(50)] * 2
    for name, value in (("copy_gb_per_s", 400), ("flag_us", 1.5)):
        assert result["from_nodes"]["1"][name] == [pytest.approx(value)] * 2
    assert len(result["from_nodes"]["0"]["copy_us"]) == 2
    assert bound == [[0, 1], [2]]
    assert "problems" not in result
    assert set(measure_gpus._measure(FakeTorch(), {"0": [0]})["from_nodes"]["0"]) == {"launch_us", "pinned_gb_per_s"}
    deaf = measure_gpus._measure(FakeTorch(deaf=True), {"0": [0], "1": [1]})["from_nodes"]["0"]
    assert "copy_us" in deaf
    assert "flag_us" not in deaf


def test_what_can_not_be_measured_leaves_the_rest(bound: list[list[int]]) -> None:
    for torch, words in ((FakeTorch(deaf=True), "don't see"), (FakeTorch(has_compiler=False), "_compile_kernel")):
        result = measure_gpus._measure(torch, {"0": [0]})
        assert result["flag_us"] is None
        assert words in result["problems"]["flag_us"]
        assert result["copy_us"]
        assert result["from_nodes"]


def test_a_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    measure_gpus.main(["{}"])
    assert "torch can't be imported" in json.loads(capsys.readouterr().out)["error"]
