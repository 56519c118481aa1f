"""Guards the demo as a whole: several ranks must learn what one rank learns, also after one of them was killed, and
leave nothing behind.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import weft
from weft.demo import DemoConfig, run_demo
from weft.demo.exchange import SumOverRanks
from weft.demo.run import Start
from weft.demo.show import show_report

TINY = DemoConfig(
    steps=12,
    layers=2,
    hidden=32,
    heads=2,
    context=16,
    sequences_per_rank=2,
    experts=16,
    expert_hidden=16,
    generate=8,
    device="cpu",
)


def changed(**values) -> DemoConfig:
    return DemoConfig(**{**vars(TINY), **values})


def children() -> set[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}


@pytest.fixture(autouse=True)
def nothing_left():
    """No test leaves a process, a shared memory file or an open file behind."""
    torch.set_num_threads(1)
    before = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert children() == before[0]
    assert not [name for name in os.listdir("/dev/shm") if "weft" in name]
    assert len(os.listdir("/proc/self/fd")) <= before[1] + 2  # modules imported meanwhile may keep some


def test_losses_agree_with_plain_torch(capfd):
    report = run_demo(TINY)
    assert report.problems == []
    assert max(report.differences[:5]) < 1e-4
    assert len(report.losses) == 12
    assert [rank.rank for rank in report.ranks] == [0, 1, 2, 3]
    assert len({rank.losses for rank in report.ranks}) == 1
    assert len({rank.loads for rank in report.ranks}) == 1
    assert sum(map(sum, report.load(0, 1))) == 2 * 4 * 32 * 4  # layers, ranks, tokens, picks
    assert all(rank.traffic.num_tokens == 12 * 2 * 32 for rank in report.ranks)
    assert all(rank.traffic.rows_sent > 0 and rank.traffic.bytes_sent > 0 for rank in report.ranks)
    assert all(rank.generated.startswith(b"The ") and len(rank.generated) == 12 for rank in report.ranks)
    assert "engine=cpu" in report.ranks[0].engine
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_other_numbers_of_ranks(num_ranks):
    report = run_demo(changed(num_ranks=num_ranks, steps=4))
    assert report.problems == []
    assert max(report.differences[:5]) < 1e-4


@pytest.mark.parametrize(("num_ranks", "victim"), [(4, 0), (4, 2), (2, 1)])
def test_a_killed_rank_is_survived(num_ranks, victim, tmp_path):
    with (tmp_path / "out").open("w") as out:
        report = run_demo(changed(num_ranks=num_ranks, kill_rank=victim), console=Console(file=out, width=200))
        show_report(report, Console(file=out, width=100))
    left = [rank for rank in range(num_ranks) if rank != victim]
    assert report.problems == []
    assert [rank.rank for rank in report.ranks] == left
    assert report.lost_ranks == {victim: 6}
    assert max(report.differences) < 1e-2  # the baseline does without these experts from the same step on
    size = 16 // num_ranks
    gone = range(size * victim, size * (victim + 1))
    for layer_before, layer_after in zip(report.load(0, 6), report.load(6, 12), strict=True):
        assert any(layer_before[expert] for expert in gone)
        assert not any(layer_after[expert] for expert in gone)
    told = (tmp_path / "out").read_text()
    assert f"rank {victim} dies" in told
    for rank in left:
        assert f"rank {rank} sees it" in told
        assert f"rank {rank} goes on with ranks {', '.join(map(str, left))}" in told
    assert report.killed_ns is not None
    assert all(rank.lost[0].seen_ns > report.killed_ns for rank in report.ranks)


def test_ranks_as_threads(monkeypatch):
    """As on a machine with one GPU."""
    monkeypatch.setattr("weft.demo.run.choose_start", lambda *_: Start("cpu", "thread", "threads, for a test"))
    report = run_demo(changed(steps=4))
    assert report.problems == []
    assert max(report.differences[:5]) < 1e-4
    assert "threads of one process" in report.ranks[0].engine


def test_same_losses_every_time():
    config = changed(baseline=False, steps=5)
    first, second = run_demo(config), run_demo(config)
    assert first.losses == second.losses
    assert [rank.generated for rank in first.ranks] == [rank.generated for rank in second.ranks]


def test_recorded_trace_can_be_replayed(tmp_path):
    file = tmp_path / "trace.npz"
    run_demo(changed(record=file, baseline=False, steps=3))
    trace = weft.routing.load_trace(file)
    assert sorted(trace.dispatches) == [0, 1, 2, 3]
    assert all(len(dispatches) == 3 * 2 for dispatches in trace.dispatches.values())  # steps, layers
    idx, weights = trace.replay(num_experts=16, top_k=4, rank=1, step=3)
    assert idx.shape == weights.shape == (32, 4)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(32))


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    report = run_demo(changed(plot=tmp_path / "new" / "folder", kill_rank=1))
    assert [path.name for path in report.plots] == ["loss.png", "load.png"]
    assert all(path.is_file() for path in report.plots)


def test_refused_before_anything_starts(tmp_path):
    with pytest.raises(weft.InvalidArgument, match="nothere"):
        run_demo(changed(text=tmp_path / "nothere"))
    with pytest.raises(weft.InvalidArgument, match="record="):
        run_demo(changed(record=tmp_path / "no" / "folder" / "trace.npz"))
    (tmp_path / "file").touch()
    with pytest.raises(weft.InvalidArgument, match="plot="):
        run_demo(changed(plot=tmp_path / "file"))


@pytest.mark.parametrize("num_values", [1, 255, 257, 3_000])
def test_sum_over_ranks(num_values):
    def values(rank: int) -> torch.Tensor:
        return torch.randn(num_values, generator=torch.Generator().manual_seed(rank))

    def sum_twice(comm):
        total = SumOverRanks(comm, num_values)
        return total(values(comm.rank)), total(2 * values(comm.rank))

    expected = values(0) + values(1) + values(2)  # in this order, hence the same bits
    for once, twice in weft.spawn(sum_twice, num_ranks=3, device="cpu"):
        assert torch.equal(once, expected)
        assert torch.equal(twice, 2 * expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["moe_layer.py", "--device", "cpu"],
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train_torchrun.py"],
    ],
    ids=["spawn", "torchrun"],
)
def test_examples(command):
    examples = Path(__file__).parents[2] / "examples"
    command = [str(examples / word) if word.endswith(".py") else word for word in command]
    env = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, env=env, check=True)
    assert "the losses fall" in done.stdout
    losses = re.findall(r"rank \d[^:]*: loss ([0-9.]+) -> (\d\.\d+)", done.stdout)  # lines may run into each other
    assert len(losses) in (2, 4), done.stdout
    assert all(float(last) < 0.2 < float(first) for first, last in losses)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["overlap_gemm.py", "decode_graph.py", "decode_overlap.py"])
def test_examples_have_small_sizes_on_cpus_and_say_what_they_show(example):
    """Sizes of a real model took minutes on a CPU, in silence."""
    path = Path(__file__).parents[2] / "examples" / example
    env = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    command = [sys.executable, str(path), "--device", "cpu", "--ranks", "2"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=True).stdout.splitlines()
    assert path.read_text().startswith('"""' + out[0].removesuffix("."))
    assert out[1].startswith("On CPUs, with small sizes.")
    assert ("graphs" in out[1]) == (example != "overlap_gemm.py")
    assert not any("saves" in line for line in out)  # a share of noise


SMALL = ["--device", "cpu", "--ranks", "2", "--hidden", "128", "--width", "64", "--experts", "8", "--top-k", "2"]


def output_of(example, *flags):
    """What an example prints; those that compare two ways end with 1 if they differ."""
    path = Path(__file__).parents[2] / "examples" / example
    env = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    command = [sys.executable, str(path), *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=True).stdout


ATTENTION = ["--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--context", "32"]


@pytest.mark.parametrize(
    ("example", "flags", "ways"),
    [
        ("overlap_gemm.py", ["--tokens", "32"], ["dispatch", "gemm", "one after the other", "at once"]),
        (
            "decode_overlap.py",
            ["--tokens", "12", *ATTENTION],
            ["attention", "computation", "transfers", "one after the other", "received later", "overlapped"],
        ),
    ],
)
def test_overlap_examples(example, flags, ways):
    """Times of all ways; both with transfers gave the same bits."""
    out = output_of(example, *flags)
    times = re.findall(r"^(\w[\w ]*\w) +([0-9.]+) ms(?:, the host [0-9.]+ ms)?$", out, re.MULTILINE)
    assert [name for name, _ in times] == ways
    assert all(float(time_ms) > 0 for _, time_ms in times)
    assert "saves" not in out  # on CPUs that is a share of noise


def test_decoding_example():
    """A line for each batch size; every replay was compared."""
    out = output_of("decode_graph.py", "--tokens", "1", "5", "12", "--replays", "6")
    assert re.findall(r"^ *(\d+) tokens: eager +[0-9.]+ us$", out, re.MULTILINE) == ["1", "5", "12"]
    assert "CPUs have no graphs" in out
    assert "6 repeated steps with changing routing on each rank: 0 differ from the eager step" in out


@pytest.mark.parametrize("ranks", ["3", "4"])
def test_training_in_two_nodes(ranks):
    """Of two ranks, or of one beside a node of two: losses as without nodes."""
    out = output_of("train_two_nodes.py", "--tokens", "24", "--steps", "3", "--experts", "12", "--ranks", ranks)
    losses = re.findall(r"^rank \d: loss ([0-9.]+) -> ([0-9.]+)$", out, re.MULTILINE)
    assert len(losses) == int(ranks)
    assert all(float(first) > float(last) for first, last in losses)
    assert "differ from those without nodes: 0" in out


def test_decoding_in_two_nodes():
    """A line for each batch size; every step was compared."""
    out = output_of("decode_two_nodes.py", "--tokens", "1", "5", "--steps", "2", "--ranks", "4")
    times = re.findall(r"^ *(\d+) tokens: in two nodes +[0-9.]+ us, without nodes +[0-9.]+ us$", out, re.MULTILINE)
    assert times == ["1", "5"]
    assert "2 steps of each batch size on each rank: 0 differ" in out


def test_elastic_serving():
    """It grows, loses a rank, takes the spare, shrinks; every token was compared."""
    path = Path(__file__).parents[2] / "examples" / "elastic_serving.py"
    env = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    command = [sys.executable, str(path), "--steps", "10"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=True).stdout
    assert re.findall(r"^(.*), then ranks ([0-9, ]+): paused -?[0-9.]+ ms$", out, re.MULTILINE) == [
        ("a change", "0, 1, 2, 3"),
        ("kill -9", "0, 1, 2, 4"),
        ("a change", "0, 1"),
    ]
    assert int(re.search(r"^(\d+) steps of rank 0", out, re.MULTILINE)[1]) >= 40


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_nothing():
    code = (
        "from weft.demo import DemoConfig, run_demo; from rich.console import Console\n"
        "run_demo(DemoConfig(steps=100000, device='cpu', baseline=False), console=Console(force_terminal=True))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    demo = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    )
    assert demo.stdout is not None
    seen = b""
    while b"loss 5" not in seen:  # the progress bar has seen a step
        seen += os.read(demo.stdout.fileno(), 4096)
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does it
    assert demo.wait(timeout=600) != 0
    deadline = time.monotonic() + 60
    while members(demo.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    demo.stdout.close()
    assert members(demo.pid) == []


def members(group: int) -> list[int]:
    """Processes of a process group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(process_group) == group and state != "Z":
            found.append(int(entry.name))
    return found
