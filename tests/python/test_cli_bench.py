"""Guards against a benchmark that times wrong results, or figures whose meaning nobody wrote down."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_lines import DOC, ROOT, assert_documented, rows_of, weft_command
from typer.testing import CliRunner

import weft
import weft.deep_ep
from weft import routing
from weft.bench.deep_ep import Overhead, Timed, names_in
from weft.bench.options import Options
from weft.cli import app
from weft.cli.bench_deep_ep import run_deep_ep
from weft.cli.output import command_output
from weft.planner import PRESETS

SMALL = [
    "--tokens",
    "40",
    "--hidden",
    "64",
    "--experts",
    "8",
    "--top-k",
    "3",
    "--iters",
    "3",
    "--warmup",
    "1",
    "--json",
]


@pytest.fixture
def quick_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch anew, to time it, takes a second or more; one test does it."""
    monkeypatch.setattr("weft.bench.report._import_seconds", lambda: 1.0)


@pytest.fixture(autouse=True)
def no_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else goes through this machine's."""
    monkeypatch.setattr("weft.machine.port_counters.read", dict)


@pytest.mark.usefixtures("quick_import")
def test_a_port_that_carried_something_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one."""
    values = iter([5, 9])
    waits = "counters/port_xmit_wait"
    monkeypatch.setattr("weft.machine.port_counters.read", lambda: {"mlx5_0/1": {waits: next(values)}})
    rows = bench("--ranks", "2", "--no-baseline")
    row = {"kind": "port", "port": "mlx5_0/1", "sent_bytes": None, "received_bytes": None}
    assert rows[-1] == {**row, "grown": {waits: 4}}
    assert "port" not in {each["kind"] for each in rows[:-1]}


def bench(*args: str) -> list[dict[str, Any]]:
    """In this process: torch need not be imported again."""
    result = CliRunner().invoke(app, ["bench", *SMALL, *args])
    assert result.exit_code == 0, result.output
    return rows_of(result.stdout)


@pytest.mark.slow
def test_a_process_prints_rows_that_are_complete() -> None:
    done = weft_command("bench", *SMALL)
    assert done.returncode == 0, done.stderr
    check_rows([row for row in rows_of(done.stdout) if row["kind"] != "port"])


def test_who_is_late_names_the_rank_that_was_delayed() -> None:
    flags = ("--who-is-late", "--ranks", "4", "--late-rank", "1", "--late-us", "200000", "--device", "cpu")
    rows = bench(*flags)
    assert_documented(rows)
    waits = [row["wait_us"] for row in rows[1:5]]
    assert [row["kind"] for row in rows] == ["machine"] + ["waits"] * 4 + ["who_is_late"]
    assert all(mine[rank] == 0 for rank, mine in enumerate(waits))
    assert (rows[-1]["latest"], rows[-1]["late_rank"]) == (1, 1)
    assert min(waits[0][1], waits[2][1], waits[3][1]) > 150_000 > max(waits[1])
    table = CliRunner().invoke(app, ["bench", *SMALL[:-1], *flags])
    assert "rank 1 came 200000 us late; rank 1 was waited for longest" in table.output


def test_who_is_late_without_a_delay_names_nobody() -> None:
    rows = bench("--who-is-late", "--ranks", "2", "--late-us", "0", "--layout", "masked")
    assert rows[-1]["late_rank"] is None


def test_deep_ep_is_timed_beside_the_calls_of_weft(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--deep-ep", "--ranks", "2", "--device", "cpu")
    rows = bench(*flags)
    assert_documented(rows)
    assert [row["kind"] for row in rows] == ["machine"] + ["deep_ep"] * 11
    assert {row["call"].split(".")[0] for row in rows[1:]} == {"Buffer", "ElasticBuffer", "HybridEPBuffer"}
    for row in rows[1:]:
        assert min(row["weft_us"], row["deep_ep_us"]) > 0
        assert row["over_us"] == row["deep_ep_us"] - row["weft_us"]
        assert row["weft_kernels"] is row["deep_ep_kernels"] is None
    monkeypatch.setenv("COLUMNS", "80")
    table = CliRunner().invoke(app, ["bench", *SMALL[:-1], *flags])
    assert all(row["call"] in table.output for row in rows[1:]), table.output


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_deep_ep_cuts_no_name(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With kernels, as on a GPU: where it is narrow these are left out."""
    name = "HybridEPBuffer.combine_with_unpermute"
    found = Overhead((Timed(name, 12345.6, 23456.7, ["a"] * 13, ["b"] * 37),), "nvlink")
    monkeypatch.setattr("weft.bench.deep_ep.deep_ep", lambda _: found)
    monkeypatch.setenv("COLUMNS", str(width))
    with command_output(json_lines=False) as output:
        run_deep_ep(output, Options())
    text = capsys.readouterr().out
    assert name in text
    assert ("37" in text) == (width == 120)
    assert ("too narrow for Weft's kernels, its kernels: COLUMNS=120 shows all" in text) == (width == 80)


def test_names_of_kernels_in_a_trace() -> None:
    """In the order in which they ran; copies are none."""
    events = [
        {"cat": "kernel", "ts": 9.5, "name": "void at::native::fill<int>(int, T)"},
        {"cat": "gpu_memcpy", "ts": 2, "name": "Memcpy DtoD"},
        {"cat": "kernel", "ts": 3, "name": "weft::dispatch_kernel<weft::Config{}>(weft::Args)"},
        {"ph": "M", "name": "process_name"},
    ]
    assert names_in(events) == ["weft::dispatch_kernel", "at::native::fill"]


def test_a_wrong_sum_of_deep_ep_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = weft.deep_ep.Buffer.combine
    monkeypatch.setattr(weft.deep_ep.Buffer, "combine", lambda *args, **more: (right(*args, **more)[0] + 1,))
    result = CliRunner().invoke(app, ["bench", *SMALL, "--deep-ep", "--ranks", "2", "--device", "cpu"])
    assert result.exit_code == 1
    assert "Buffer.combine is not the sum of Weft's own call" in result.output


@pytest.mark.parametrize(
    "flags",
    [["--quantize", "fp8"], ["--dtype", "fp32"], ["--trace", "x.npz"], ["--layout", "masked"], ["--mode", "latency"]],
)
def test_deep_ep_refuses(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *SMALL, "--deep-ep", *flags])
    assert result.exit_code == 2
    assert flags[0].strip("-") in rows_of(result.stdout)[0]["text"]


@pytest.mark.parametrize(
    ("flags", "named"), [(["--late-rank", "4"], "late_rank is 4"), (["--trace", "x.npz"], "trace")]
)
def test_who_is_late_refuses(flags: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", *SMALL, "--who-is-late", *flags])
    assert result.exit_code == 2
    assert named in rows_of(result.stdout)[0]["text"]


@pytest.mark.usefixtures("quick_import")
@pytest.mark.parametrize(
    "more",
    [
        ["--layout", "expert_major", "--alignment", "16", "--routing", "zipf"],
        ["--layout", "masked", "--quantize", "fp8", "--dtype", "fp32"],
        ["--quantize", "fp8_ue8m0", "--routing", "empty_rank", "--ranks", "2"],
    ],
)
def test_layouts_and_formats_have_the_same_rows(more: list[str]) -> None:
    check_rows(bench(*more))


def check_rows(all_rows: list[dict[str, Any]]) -> None:
    """Complete, documented, and consistent."""
    machine, startup, *rows = all_rows
    assert_documented([machine, startup, *rows])
    assert (machine["kind"], startup["kind"]) == ("machine", "startup")
    assert machine["memory_copy_gb_per_s"] > 0
    assert [(row["library"], row["op"], row["source"]) for row in rows] == [
        ("weft", "dispatch", None),
        ("all_to_all_single", "dispatch", None),
        ("weft", "combine", "heap"),
        ("all_to_all_single", "combine", None),
        ("weft", "combine", "ordinary"),
        ("weft", "both", "heap"),
        ("all_to_all_single", "both", None),
    ]
    for row in rows:
        assert row["time_us"] > 0
        assert row["time_p99_us"] >= row["time_us"]
        assert row["ratio_vs_all_to_all"] > 0
        assert row["ratio_vs_memory_copy"] == pytest.approx(row["memory_copy_bound_us"] / row["time_us"])


@pytest.mark.usefixtures("quick_import")
def test_bytes_follow_the_counting_rules() -> None:
    """One rank sends nothing over a wire; with all tokens to rank 0 rank 1 sends every row once."""
    alone = bench("--ranks", "1", "--no-baseline")[2:]
    assert all(row["wire_bytes"] == 0 for row in alone)
    assert all(row["ratio_vs_all_to_all"] is None for row in alone)
    machine, _, *rows = bench("--ranks", "2", "--routing", "all_to_one", "--no-baseline")
    row_bytes = 64 * 2
    for row in rows:
        calls = 2 if row["op"] == "both" else 1
        assert row["wire_bytes"] == row["logical_bytes"] == 40 * row_bytes * calls
    copy_rate = machine["memory_copy_gb_per_s"] * 1e9
    bound = {row["op"]: row["memory_copy_bound_us"] for row in rows}
    assert bound["dispatch"] == pytest.approx(80 * row_bytes / copy_rate * 1e6)
    assert bound["combine"] == pytest.approx((80 + 80) / 2 * row_bytes / copy_rate * 1e6)
    assert bound["both"] == pytest.approx(bound["dispatch"] + bound["combine"])


@pytest.mark.usefixtures("quick_import")
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = weft.ExpertParallel.combine

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        y = combine(self, *args, **options)
        y.view(torch.int16).view(-1)[0] ^= 1
        return y

    monkeypatch.setattr(weft.ExpertParallel, "combine", wrong)
    result = CliRunner().invoke(app, ["bench", *SMALL, "--ranks", "1", "--no-baseline"])
    assert result.exit_code == 1
    (row,) = rows_of(result.stdout)
    assert row["type"] == "Mismatch"
    assert "combine" in row["text"]


@pytest.mark.usefixtures("quick_import")
def test_a_trace_sets_the_shape(tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    with weft.routing.record(file):
        weft.spawn(dispatch_once, num_ranks=2)
    row = bench("--ranks", "2", "--trace", str(file))[-1]
    assert (row["experts"], row["top_k"], row["routing"]) == (6, 3, "trace")


def dispatch_once(comm: weft.Communicator) -> None:
    topk_idx, topk_weights = weft.routing.uniform(5 + comm.rank, 6, 3, rank=comm.rank, num_ranks=2)
    with weft.ExpertParallel(comm, num_experts=6, top_k=3, hidden=16, max_tokens_per_rank=8) as ep:
        ep.dispatch(torch.zeros((5 + comm.rank, 16), dtype=torch.bfloat16), topk_idx, topk_weights)


def test_tables_of_the_docs_are_those_of_the_result_files() -> None:
    """Figures that nobody measured would be easy to write."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.updated(DOC) == DOC
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        assert_documented(tables.read_rows(file))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("flags", [[], ["--suite", "small"], ["--tokens", "16"], ["--who-is-late"], ["--deep-ep"]])
def test_without_a_gpu_nothing_is_printed_before_the_error(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cuda", "--ranks", "2", *flags])
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith("error: device cuda is not supported")


def test_ranks_in_nodes_have_the_planners_time_beside_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row crosses once to the other node, however many of its ranks it has picks on."""
    monkeypatch.setattr("weft.bench.report._import_seconds", lambda: 1.0)
    monkeypatch.setenv("COLUMNS", "200")
    flags = ("--nodes", "2", "--ranks", "4", "--device", "cpu", "--preset", "dgx-h100", "--hidden", "128")
    rows = bench(*flags)
    assert_documented(rows)
    machine, _, *calls = rows
    assert (machine["isolation"], machine["engine"]) == ("process", "cpu")
    assert [(row["op"], row["source"], row["library"]) for row in calls] == [
        ("dispatch", None, "weft"),
        ("combine", "heap", "weft"),
        ("combine", "ordinary", "weft"),
        ("both", "heap", "weft"),
    ]
    ids = [routing.uniform(40, 8, 3, rank=rank, num_ranks=4, seed=0)[0] for rank in range(4)]
    most = max(int((ids[rank] // 4 != rank // 2).any(dim=1).sum()) for rank in range(4))
    assert [row["network_bytes"] for row in calls] == [most * 256 * ways for ways in (1, 1, 1, 2)]
    for row in calls:
        assert row["network_gb_per_s"] == pytest.approx(row["network_bytes"] / row["time_us"] / 1e3)
        assert (row["nodes"], row["planned_on"]) == (2, "dgx-h100")
    shape = {"num_ranks": 4, "num_tokens": 40, "hidden": 128, "num_experts": 8, "top_k": 3, "num_sms": [16]}
    plan = weft.plan(dataclasses.replace(PRESETS["dgx-h100"], ranks_per_domain=2), **shape)
    planned = {call.op: call.time_us for call in plan.calls if call.dtype == "bf16"}
    assert plan.num_domains == 2
    assert [row["planned_us"] for row in calls] == [planned["dispatch"], *[planned["combine"]] * 2, None]
    table = CliRunner().invoke(app, ["bench", *SMALL[:-1], *flags])
    assert "2 nodes of 2 ranks, all on this machine: no network was there" in table.output
    assert "planned" in table.output


@pytest.mark.usefixtures("quick_import")
@pytest.mark.parametrize(
    ("flags", "nodes"),
    [(["--ranks", "4", "--nodes", "2"], 2), (["--tokens", "520", "--quantize", "fp8", "--hidden", "128"], 1)],
)
def test_halves_are_timed_apart(flags: list[str], nodes: int) -> None:
    """Also with more tokens than a small batch has otherwise. Of what is refused the row says why."""
    rows = bench("--ranks", "2", "--device", "cpu", "--halves", "--no-baseline", *flags)
    assert_documented(rows)
    machine, _, *calls = rows
    assert machine["network"] == ("copies" if nodes > 1 else None)
    whole, halved, graphed = calls[:4], calls[4:6], calls[6:]
    assert [(row["op"], row["source"]) for row in halved + graphed] == [
        ("dispatch", None),
        ("combine", "ordinary"),
    ] * 2
    for row in whole:
        assert (row["is_halved"], row["is_graphed"], row["send_us"], row["receive_us"]) == (False, False, None, None)
        assert row["wire_gb_per_s"] is not None
    for row in halved:
        assert (row["is_halved"], row["is_graphed"], row["nodes"], row["unsupported"]) == (True, False, nodes, None)
        assert row["time_us"] >= max(row["send_us"], row["receive_us"]) > 0
        assert row["wire_bytes"] > 0
        assert (row["network_bytes"] is not None) == (nodes > 1)
        rates = ("wire_gb_per_s", "logical_gb_per_s", "network_gb_per_s", "ratio_vs_memory_copy", "ratio_vs_all_to_all")
        assert {row[name] for name in (*rates, "work_us", "must_us")} == {None}
    for row in graphed:
        assert (row["is_halved"], row["is_graphed"]) == (True, True)
        assert row["unsupported"] == "a CUDA graph is not supported: have cpu, need a GPU"
        assert "time_us" not in row


@pytest.mark.usefixtures("quick_import")
def test_the_table_of_halves_says_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flags = [*SMALL[:-1], "--device", "cpu", "--ranks", "1", "--no-baseline", "--halves", "--layout", "masked"]
    table = CliRunner().invoke(app, ["bench", *flags])
    assert table.exit_code == 0, table.output
    assert "receive us" in table.output
    assert "weft dispatch, halves, graph: a CUDA graph is not supported" in table.output
    assert "in which rows arrive" not in table.output  # nothing is hidden on a CPU
    assert "must us" not in table.output


@pytest.mark.usefixtures("quick_import")
def test_a_wrong_half_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = weft.Staged.wait

    def wrong(self: Any) -> Any:
        y = wait(self)
        y.view(torch.int16).view(-1)[0] ^= 1
        return y

    monkeypatch.setattr(weft.Staged, "wait", wrong)
    result = CliRunner().invoke(app, ["bench", *SMALL, "--ranks", "1", "--no-baseline", "--halves"])
    assert result.exit_code == 1
    (row,) = rows_of(result.stdout)
    assert row["type"] == "Mismatch"
    assert "combine" in row["text"]


def test_without_nodes_nothing_crosses_and_nothing_is_planned() -> None:
    """Ranks that are threads give the same results."""
    calls = bench("--ranks", "2", "--isolation", "thread", "--device", "cpu")[2:]
    assert {row["library"] for row in calls} == {"weft"}
    assert {(row["nodes"], row["network_bytes"], row["planned_us"]) for row in calls} == {(1, None, None)}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--nodes", "3", "--ranks", "4"], "nodes=3: allowed are divisors of ranks=4"),
        (["--nodes", "2", "--baseline"], "nodes=2: the baseline is of ranks that are processes on one node"),
        (["--isolation", "thread", "--baseline"], "isolation='thread': the baseline"),
        (["--preset", "dgx-h101"], "dgx-h101"),
        (["--nodes", "2", "--deep-ep"], "--nodes: only where calls of one shape are timed"),
        (["--nodes", "2", "--suite", "targets"], "--nodes: only where calls of one shape are timed"),
        (["--preset", "dgx-h100", "--control"], "--preset: only where calls of one shape are timed"),
        (["--halves", "--suite", "small"], "--halves: only where calls of one shape are timed"),
        (["--halves", "--deep-ep"], "--halves: only where calls of one shape are timed"),
        (["--halves", "--who-is-late"], "--halves: only where calls of one shape are timed"),
        (["--halves", "--mode", "throughput"], "mode='throughput' with halves"),
        (["--halves", "--mode", "latency", "--tokens", "513"], "mode='latency' with tokens=513"),
    ],
)
def test_flags_of_one_shape_that_are_refused(flags: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", *SMALL, "--device", "cpu", *flags])
    assert result.exit_code == 2, result.output
    assert named in rows_of(result.stdout)[-1]["text"]
