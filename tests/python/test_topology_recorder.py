"""Guards against recordings that lose a fact, or keep a name, a serial number or an address."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from pathlib import Path
from typing import Any

import machines
import pytest
from test_topology_parse import config

from weft.machine.placement import place
from weft.machine.topology import Machine, read, record
from weft.machine.topology.tree import to_hex

SECRETS = {
    "uuid": "8b1c2d3e-4f50-6172-8394-a5b6c7d8e9fa",
    "guid": "b8ce:f603:00aa:bbcc",
    "mac": "b8:ce:f6:aa:bb:cc",
    "address": "192.168.77.13",
    "host": "node17.cluster.example",
    "serial": "SERIALNO",
    "user": "job_alice",
    "interface": "enxb8cef6aabbcc",
}


def without_names(machine: Machine) -> Machine:
    """A machine without what a recording replaces or adds."""
    gpus = tuple(
        dataclasses.replace(
            gpu, uuid=None, fabric=dataclasses.replace(gpu.fabric, cluster_uuid=bool(gpu.fabric.cluster_uuid))
        )
        for gpu in machine.gpus
    )
    nics = tuple(
        dataclasses.replace(
            nic,
            node_guid=None,
            card=None,
            ports=tuple(
                dataclasses.replace(port, gids=tuple(dataclasses.replace(gid, value="") for gid in port.gids))
                for port in nic.ports
            ),
        )
        for nic in machine.nics
    )
    return dataclasses.replace(machine, root="", gpus=gpus, nics=nics, recorded=None)


@pytest.mark.parametrize("name", machines.NAMES)
def test_a_recording_says_the_same(name: str, tmp_path: Path) -> None:
    target = record(machines.MACHINES / name, tmp_path / "recording")
    assert target == tmp_path / "recording" / "tree.json"
    again = read(tmp_path / "recording")
    assert without_names(again) == without_names(machines.machine(name))
    assert place(again) == place(machines.machine(name))
    cards = [nic.card for nic in machines.machine(name).nics]
    assert [cards.index(card) for card in cards] == [
        [nic.card for nic in again.nics].index(nic.card) for nic in again.nics
    ]


def test_recording_of_this_machine(tmp_path: Path) -> None:
    machine = read()
    text = record("/", tmp_path).read_text()
    again = read(tmp_path)
    volatile = dataclasses.replace(machine.limits, shm_free_bytes=None)
    assert dataclasses.replace(again.limits, shm_free_bytes=None) == volatile
    assert (again.cpus, again.netdevs, again.system) == (machine.cpus, machine.netdevs, machine.system)
    assert again.recorded
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert not re.search(r"\b(?!10\.)(?:\d{1,3}\.){3}\d{1,3}\b", text)


def secret_tree() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((machines.MACHINES / "dual-port-roce" / "tree.json").read_text())
    text = json.dumps(tree)
    text = text.replace("0200:0000:0000:0001", SECRETS["guid"])
    text = text.replace("0000:0000:0000:0000:0000:ffff:0a00:0001", "0000:0000:0000:0000:0000:ffff:c0a8:4d0d")
    text = text.replace("00000000-0000-4000-8000-000000000001", SECRETS["uuid"])
    text = text.replace("ens24f0np0", SECRETS["interface"])
    tree = json.loads(text)
    tree["etc"] = {"hostname": SECRETS["host"]}
    tree["proc"]["self"] = {
        "status": f"Name:\t{SECRETS['user']}\nCpus_allowed_list:\t0-255\nMems_allowed_list:\t0-1",
        "cgroup": f"0::/{SECRETS['user']}",
        "environ": f"HOST={SECRETS['host']}",
    }
    tree["proc"]["cmdline"] = f"ip={SECRETS['address']} root=UUID={SECRETS['uuid']}"
    version = tree["proc"]["driver"]["nvidia"]["version"]
    tree["proc"]["driver"]["nvidia"]["version"] = (
        f"{version}  ({SECRETS['user']}@{SECRETS['host']})  Thu\nGCC version: 9"
    )
    tree["proc"]["devices"] = f"1 mem\n240 {SECRETS['user']}\n234 nvidia-caps-imex-channels"
    tree["proc"]["modules"] += f"\n{SECRETS['user']} 1 0 - Live 0x0"
    tree["sys"]["module"] = {SECRETS["user"]: {}, "nvidia_peermem": {}}
    tree["sys"]["class"]["net"][f"wg-{SECRETS['user']}"] = {"@link": f"/sys/devices/virtual/net/wg-{SECRETS['user']}"}
    virtual = tree["sys"]["devices"].setdefault("virtual", {}).setdefault("net", {})
    virtual[f"wg-{SECRETS['user']}"] = {"operstate": "up", "address": SECRETS["mac"]}
    device = next(entry for entry in _walk(tree) if "infiniband" in entry and "config" in entry)
    device["config"] = to_hex(config(devcap2=1 << 8, acs=4))
    device["vpd"] = SECRETS["serial"]
    next(iter(device["infiniband"].values()))["node_desc"] = f"{SECRETS['host']} mlx5_0"
    tree["weft"]["nvml.json"]["@json"]["gpus"][0]["serial"] = SECRETS["serial"]
    return tree


def _walk(node: dict[str, Any]) -> Any:
    yield node
    for entry in node.values():
        if isinstance(entry, dict):
            yield from _walk(entry)


def test_no_secret_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(json.dumps(secret_tree()))
    text = record(tmp_path, tmp_path / "recording").read_text()
    for name, secret in SECRETS.items():
        assert secret not in text, name
        assert secret.encode().hex() not in text, name
    assert "c0a8:4d0d" not in text
    before, after = read(tmp_path), read(tmp_path / "recording")
    gids = [[gid.kind for port in nic.ports for gid in port.gids] for nic in before.nics]
    assert gids == [[gid.kind for port in nic.ports for gid in port.gids] for nic in after.nics]
    assert after.nics[0].ports[0].gids[3].type == "RoCE v2"
    first, second = (nic.card for nic in after.nics[:2])
    assert first == second  # one card, also under its new name
    assert after.nics[0].node_guid != after.nics[1].node_guid
    assert place(before) == place(after)


def test_equal_values_stay_equal_and_different_ones_differ(tmp_path: Path) -> None:
    record(machines.MACHINES / "dual-port-roce", tmp_path)
    before = [nic.node_guid for nic in machines.machine("dual-port-roce").nics]
    after = [nic.node_guid for nic in read(tmp_path).nics]
    assert len(set(after)) == len(set(before)) == 16
    values = [gid.value for nic in read(tmp_path).nics for port in nic.ports for gid in port.gids]
    assert len(set(values)) == 32  # two addresses a port, each in two types
