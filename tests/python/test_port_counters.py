"""Guards against counters of NICs that are misread: another unit, no number, a driver that began anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.bench_command import _print_ports
from weft.cli.output import Output
from weft.machine import port_counters

DATA, WAITS = "counters/port_xmit_data", "counters/port_xmit_wait"


def write(root: Path, port: str, values: dict[str, str]) -> None:
    """Files of a port."""
    device, number = port.split("/")
    for name, text in values.items():
        file = root / device / "ports" / number / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of those of the machine."""
    monkeypatch.setattr(port_counters, "_DEVICES", tmp_path)
    return tmp_path


def test_words_become_bytes_and_only_what_grew_is_told(devices: Path) -> None:
    quiet = {DATA: "7\n", WAITS: "3\n"}
    write(devices, "mlx5_0/1", {DATA: "100\n", "counters/port_rcv_data": "10\n", WAITS: "5\n"})
    write(devices, "mlx5_1/1", quiet)
    write(devices, "efa_0/1", {"hw_counters/tx_bytes": "1\n", "hw_counters/rx_bytes": "2\n"})
    before = port_counters.read()
    write(devices, "mlx5_0/1", {DATA: "150\n", "counters/port_rcv_data": "12\n", WAITS: "9\n"})
    write(devices, "efa_0/1", {"hw_counters/tx_bytes": "31\n", "hw_counters/rx_bytes": "2\n"})
    assert port_counters.growth(before, port_counters.read()) == [
        {"kind": "port", "port": "efa_0/1", "sent_bytes": 30, "received_bytes": 0, "grown": {}},
        {"kind": "port", "port": "mlx5_0/1", "sent_bytes": 200, "received_bytes": 8, "grown": {WAITS: 4}},
    ]


def test_what_cannot_be_read_is_left_out(devices: Path) -> None:
    """A file without a number, a port that comes, one that goes, a counter that began anew."""
    write(devices, "a/1", {DATA: "N/A\n", WAITS: "90\n", "counters/link_downed": "1\n"})
    write(devices, "gone/1", {WAITS: "1\n"})
    before = port_counters.read()
    assert before["a/1"] == {WAITS: 90, "counters/link_downed": 1}
    after = {"a/1": {WAITS: 2, "counters/link_downed": 2}, "new/1": {WAITS: 8}}
    row = {"kind": "port", "port": "a/1", "sent_bytes": None, "received_bytes": None}
    assert port_counters.growth(before, after) == [{**row, "grown": {"counters/link_downed": 1}}]
    assert port_counters.growth({}, {}) == []


def test_the_page_names_every_counter() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaleout.md").read_text(encoding="utf-8")
    assert [name for name in port_counters.MEANINGS if name not in page] == []


def test_lines_for_readers(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"port": "mlx5_0/1", "sent_bytes": 2_500_000_000, "received_bytes": None, "grown": {WAITS: 4}}
    _print_ports(Output(json_lines=False), [row])
    said = capsys.readouterr().out
    assert "port mlx5_0/1: 2.50 GB sent\n" in said
    assert "port_xmit_wait +4: something to send" in said
