"""Guards against parsers that raise, misread or take "unknown" for a value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.machine.topology import AccessControl, AtomicOps, Distance, PciDevice, parse
from weft.machine.topology.config_space import minimal_config, parse_config
from weft.machine.topology.distance import distance
from weft.machine.topology.natural import natural_key
from weft.machine.topology.pci import atomics_on_path


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("", ()),
        ("5\n", (5,)),
        ("3-1", None),
        ("0-99999999999", None),
        ("a", None),
        ("1,,2", (1, 2)),
        ("-1", None),
        ("٣", None),
        (None, None),
    ],
)
def test_cpu_lists(text: str | None, cpus: tuple[int, ...] | None) -> None:
    assert parse.cpu_list(text) == cpus


@given(st.sets(st.integers(0, 1 << 16)))
def test_cpu_lists_come_back(cpus: set[int]) -> None:
    assert parse.cpu_list(parse.format_cpus(cpus)) == tuple(sorted(cpus))


@given(st.text() | st.from_regex(r"[0-9a-fxX:.\- ,()]{0,40}", fullmatch=True))
def test_no_parser_raises(text: str) -> None:
    for function in (
        parse.cpu_list,
        parse.integer,
        parse.leading_number,
        parse.transfer_rate,
        parse.port_word,
        parse.pci_address,
        parse.gid_kind,
        parse.word_list,
        parse.key_values,
        natural_key,
        parse.address_key,
    ):
        function(text)
    address = parse.pci_address(text)
    assert address is None or parse.pci_address(address) == address
    rate = parse.leading_number(text)
    assert rate is None or rate > 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("32.0 GT/s PCIe", 32.0), ("2.5 GT/s PCIe", 2.5), ("Unknown", None), ("0", None), ("32", None), (None, None)],
)
def test_link_speeds(text: str | None, value: float | None) -> None:
    assert parse.transfer_rate(text) == value


def test_rates_and_states() -> None:
    assert parse.leading_number("400 Gb/sec (4X NDR)") == 400.0
    assert parse.leading_number("2.5 Gb/sec (1X SDR)") == 2.5
    assert parse.leading_number("0 Gb/sec") is None
    assert parse.port_word("4: ACTIVE") == "ACTIVE"
    assert parse.port_word("ACTIVE") is None


def test_pci_addresses_of_nvml_and_sysfs_are_one() -> None:
    assert parse.pci_address("00000000:1B:00.0") == "0000:1b:00.0"
    assert parse.pci_address("0000FFFF:FF:1F.7") == "ffff:ff:1f.7"
    assert parse.pci_address("1b:00.0") == "0000:1b:00.0"
    assert parse.pci_address("0000:1b:20.0") is None
    assert parse.pci_address(7) is None


@pytest.mark.parametrize(
    ("gid", "kind"),
    [
        ("fe80:0000:0000:0000:0200:0000:0000:0001", "link-local"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0001", "ipv4"),
        ("fec0:0000:0000:0000:0200:0000:0000:0001", "other"),
        ("fe80:0000:0000:0000:0000:0000:0000:0000", None),
        ("0000:0000:0000:0000:0000:0000:0000:0000", None),
        ("nonsense", None),
    ],
)
def test_gids(gid: str, kind: str | None) -> None:
    assert parse.gid_kind(gid) == kind


def config(*, version: int = 2, devcap2: int = 0, devctl2: int = 0, acs: int | None = None, size: int = 4096) -> bytes:
    """A space with a power-management capability before the PCIe one, another one before ACS, and a serial number."""
    data = bytearray(4096)
    data[0x06], data[0x34] = 0x10, 0x40
    data[0x40:0x42] = bytes((0x01, 0x60))
    data[0x60:0x64] = bytes((0x10, 0, version | 6 << 4, 0))
    data[0x84:0x88] = devcap2.to_bytes(4, "little")
    data[0x88:0x8A] = devctl2.to_bytes(2, "little")
    data[0x100:0x104] = (0x0001 | 1 << 16 | 0x150 << 20).to_bytes(4, "little")
    data[0x150:0x154] = (0x0003 | 1 << 16 | 0x200 << 20).to_bytes(4, "little")
    data[0x154:0x15C] = b"SERIALNO"
    if acs is not None:
        data[0x200:0x208] = (0x000D | 1 << 16).to_bytes(4, "little") + b"\x1f\0" + acs.to_bytes(2, "little")
    return bytes(data[:size])


def test_atomics_and_acs_of_a_configuration_space() -> None:
    facts = parse_config(config(devcap2=1 << 6 | 0b110 << 7, devctl2=1 << 7, acs=0b11101))
    assert facts.port_type == "downstream"
    assert facts.atomics == AtomicOps(True, False, True, True, False, True)
    assert facts.acs == AccessControl(True, True, True, True)
    assert facts.acs.redirect
    assert parse_config(config(acs=1)).acs == AccessControl(True, False, False, False)


def test_what_can_not_be_seen_is_unknown_not_no() -> None:
    for data in (config(size=64), config(version=1), None, b"", b"\xff" * 64):
        facts = parse_config(data)
        assert facts.atomics.completer_64 is None
        assert facts.atomics_why
    assert "64 bytes" in parse_config(config(size=64)).atomics_why
    partly = parse_config(config(devcap2=1 << 8, size=256))
    assert partly.atomics.completer_64
    assert partly.acs is None
    assert "extended" in partly.acs_why


@given(st.binary(max_size=4096) | st.binary(max_size=300).map(lambda tail: config()[: 4096 - len(tail)] + tail))
def test_configuration_spaces_of_garbage(data: bytes) -> None:
    facts = parse_config(data)
    kept = parse_config(minimal_config(data))
    assert (kept.atomics, kept.port_type) == (facts.atomics, facts.port_type)


def test_loops_in_the_capability_lists_end() -> None:
    data = bytearray(config())
    data[0x41] = 0x40
    data[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert parse_config(bytes(data)).port_type is None


def test_a_recorded_space_keeps_what_is_read_and_no_serial_number() -> None:
    data = config(devcap2=1 << 8, devctl2=1 << 6, acs=0b01100)
    kept = minimal_config(data)
    assert len(kept) == len(data)
    assert parse_config(kept) == parse_config(data)
    assert b"SERIALNO" in data
    assert b"SERIALNO" not in kept


def device(address: str, *above: str, node: int | None = 0) -> PciDevice:
    return PciDevice(address, above, numa_node=node)


def test_distances() -> None:
    gpu = device("0000:05:00.0", "pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0")
    beside = device("0000:06:00.0", "pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:01.0")
    deeper = device("0000:09:00.0", *beside.path, "0000:07:00.0", "0000:08:00.0")
    other_port = device("0000:0b:00.0", "pci0000:00", "0000:00:02.0")
    other_root = device("0000:81:00.0", "pci0000:80", "0000:80:01.0")
    far = device("0000:c1:00.0", "pci0000:c0", node=1)
    unknown = device("0000:d1:00.0", "pci0000:d0", node=None)
    found = [distance(gpu, other) for other in (gpu, beside, deeper, other_port, other_root, far, unknown, None)]
    names = ["SELF", "PIX", "PXB", "PHB", "NODE", "SYS", "UNKNOWN", "UNKNOWN"]
    assert [each.name for each in found] == names
    assert distance(gpu, unknown, 0, 1) is Distance.SYS
    assert all(distance(other, gpu) == distance(gpu, other) for other in (beside, deeper, other_port, far))


def test_atomics_get_to_the_root_only_if_every_port_lets_them() -> None:
    def port(address: str, kind: str, **ops: bool) -> PciDevice:
        return PciDevice(address, port_type=kind, atomics=AtomicOps(**{"egress_blocked": False, **ops}))

    nic = device("0000:05:00.0", "pci0000:00", "root", "up", "down")
    good = {
        "root": port("root", "root port", completer_64=True),
        "up": port("up", "upstream", routing=True),
        "down": port("down", "downstream", routing=True, egress_blocked=True),  # counts for upstream ports only
    }
    assert atomics_on_path(nic, good) is True
    assert atomics_on_path(nic, {**good, "root": port("root", "root port", completer_64=False)}) is False
    assert atomics_on_path(nic, {**good, "up": port("up", "upstream", routing=True, egress_blocked=True)}) is False
    assert atomics_on_path(nic, {**good, "down": port("down", "downstream", routing=False)}) is False
    assert atomics_on_path(nic, {**good, "up": PciDevice("up")}) is None
    assert atomics_on_path(device("0101:00:00.0", "pci0101:00"), {}) is None
