"""Guards against a host that differs from the others and is not named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_lines import ROOT, rows_of, weft_command

import weft
from weft.machine.doctor import Finding, fleet


def finding(check: str, found: str, status: str = "ok") -> Finding:
    return Finding("network", check, status, found, "why")  # type: ignore[arg-type]


def test_the_odd_host_is_named_behind_what_most_have() -> None:
    alike = (finding("nics", "8 x infiniband"), finding("mtu", "4200"))
    hosts = {
        "one": alike,
        "two": (finding("nics", "7 x infiniband"), finding("mtu", "4200")),
        "three": alike,
        "four": (finding("nics", "8 x infiniband"), finding("mtu", "1500", "warn")),
    }
    of_mtu, of_nics = fleet.differences(hosts)
    assert [of_mtu.check, of_nics.check] == ["mtu", "nics"], "another state comes first"
    ok = fleet.Variant("ok", "8 x infiniband", ("one", "three", "four"))
    assert of_nics.variants == (ok, fleet.Variant("ok", "7 x infiniband", ("two",)))
    assert of_mtu.variants[1] == fleet.Variant("warn", "1500", ("four",))
    assert fleet.differences({"one": alike, "three": alike}) == ()


def test_several_answers_of_a_check_are_compared_as_a_whole() -> None:
    bad = finding("ports", "port 2 is down", "fail")
    good = finding("ports", "port 1 is up")
    (found,) = fleet.differences({"one": (good, bad), "two": (good,), "three": (finding("mtu", "4200"),)})[:1]
    assert [(each.status, each.found, each.hosts) for each in found.variants] == [
        ("fail", "port 1 is up; port 2 is down", ("one",)),
        ("ok", "port 1 is up", ("two",)),
        ("n/a", "not checked", ("three",)),
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of three hosts, of which one has fewer links up."""
    folder = tmp_path_factory.mktemp("fleet")
    files = {}
    for host, machine in (("node1", "dual-port-roce"), ("node2", "dual-port-roce"), ("node3", "container-one-socket")):
        root = str(ROOT / "tests/data/machines" / machine)
        files[host] = str(folder / f"{host}.json")
        Path(files[host]).write_text(weft_command("doctor", "--root", root, "--json").stdout, encoding="utf-8")
    return files


def test_hosts_that_are_alike(recorded: dict[str, str], tmp_path: Path) -> None:
    done = weft_command("doctor", "--fleet", recorded["node1"], recorded["node2"], "--json")
    *hosts, summary = rows_of(done.stdout)
    assert [(row["kind"], row["host"]) for row in hosts] == [("host", "node1"), ("host", "node2")]
    assert summary["differences"] == 0
    assert done.returncode == (1 if sum(row["failed"] for row in hosts) else 0)


def test_a_host_that_differs_is_shown(recorded: dict[str, str]) -> None:
    done = weft_command("doctor", "--fleet", *recorded.values(), "--json")
    rows = [row for row in rows_of(done.stdout) if row["kind"] == "difference"]
    assert rows
    assert all(["node3"] in [variant["hosts"] for variant in row["variants"]] for row in rows)
    assert done.returncode == 1, "locked-memory fails on node3"
    text = weft_command("doctor", "--fleet", *recorded.values()).stdout
    assert "node3: fail: locked-memory: " in text
    assert f"3 hosts: {len(rows)} checks differ, " in text


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("", "one.json has no checks; write it with `weft doctor --json`"),
        ("host one\n", "one.json:1: no JSON"),
        ('{"kind": "check", "group": "cpu"}\n', "one.json:1: a check of another version of Weft"),
        (
            json.dumps(
                {"kind": "check", **dict.fromkeys(("group", "check", "found", "why", "cost", "fix"), ""), "status": "?"}
            ),
            "one.json:1: a check of another version of Weft",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(lines: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(lines, encoding="utf-8")
    with pytest.raises(weft.InvalidArgument) as error:
        fleet.read_hosts([tmp_path / "one.json", tmp_path / "two.json"])
    assert text in str(error.value)


def test_hosts_must_be_several_and_have_names(recorded: dict[str, str], tmp_path: Path) -> None:
    one = Path(recorded["node1"])
    with pytest.raises(weft.InvalidArgument, match="got 1 of their files; give two or more"):
        fleet.read_hosts([one])
    with pytest.raises(weft.InvalidArgument, match="two files are called node1"):
        fleet.read_hosts([one, one])
    with pytest.raises(weft.InvalidArgument, match=r"two\.json can't be read"):
        fleet.read_hosts([one, tmp_path / "two.json"])
    assert "is given without --fleet" in weft_command("doctor", recorded["node1"]).stderr
