"""Guards the demo's parts that need no other rank: gate, model, text, report. A wrong gate or baseline would make the
comparison of losses worthless.
"""

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import weft
from weft.demo import DemoConfig, chart, live, plot, text
from weft.demo.baseline import BaselineResult, local_exchange, rank_experts, train_baseline
from weft.demo.events import EventPipe
from weft.demo.exchange import Traffic
from weft.demo.model import Experts, Gate, LanguageModel, generate
from weft.demo.report import DemoReport
from weft.demo.run import choose_start
from weft.demo.show import show_report
from weft.demo.train import Loss, RankResult

TINY = {
    "steps": 12,
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "context": 16,
    "sequences_per_rank": 2,
    "experts": 16,
    "expert_hidden": 16,
    "generate": 8,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Torch's threads spin while they wait for each other: very slow where other tests keep the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gate_with_bias(config: DemoConfig, seed: int) -> Gate:
    generator = torch.Generator().manual_seed(seed)
    gate = Gate(config)
    torch.nn.init.normal_(gate.weight, generator=generator)
    gate.bias.copy_(0.3 * torch.randn(config.experts, generator=generator))
    return gate


def deepseek_v3_gate(x, weight, bias, *, top_k, groups, top_groups, lost=()):
    """The text of DeepSeek-V3, section 2.1.2, one token at a time in float64."""
    picks, weights = [], []
    for token in x:
        scores = 1 / (1 + np.exp(-(weight @ token)))
        choice = {e: scores[e] + bias[e] for e in range(len(bias)) if e not in lost}
        size = len(bias) // groups
        members = [[e for e in range(g * size, (g + 1) * size) if e in choice] for g in range(groups)]
        rank = [sum(sorted((choice[e] for e in m), reverse=True)[:2]) if len(m) >= 2 else -np.inf for m in members]
        best = sorted(range(groups), key=lambda g: -rank[g])[:top_groups]
        allowed = [e for g in best for e in members[g]]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
        total = sum(scores[e] for e in chosen)
        picks.append(chosen)
        weights.append([scores[e] / total for e in chosen])
    return picks, weights


@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(4, 2, 4), (4, 1, 3), (1, 1, 8), (8, 4, 2)])
def test_gate_is_deepseek_v3s(groups, top_groups, top_k):
    config = DemoConfig(**TINY, expert_groups=groups, top_groups=top_groups, top_k=top_k)
    gate = gate_with_bias(config, 1)
    x = torch.randn(50, config.hidden, generator=torch.Generator().manual_seed(2))
    idx, weights = gate(x)
    expected_idx, expected_weights = deepseek_v3_gate(
        x.double().numpy(),
        gate.weight.detach().double().numpy(),
        gate.bias.double().numpy(),
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
    )
    assert idx.tolist() == expected_idx
    torch.testing.assert_close(weights.double(), torch.tensor(expected_weights, dtype=torch.float64), rtol=1e-5, atol=0)


def test_gate_bias_chooses_but_does_not_weigh():
    config = DemoConfig(**TINY, top_k=1)
    gate = gate_with_bias(config, 3)
    gate.bias[5] = 100.0
    x = torch.randn(20, config.hidden)
    idx, weights = gate(x)
    assert idx.unique().tolist() == [5]
    assert torch.allclose(weights, torch.ones_like(weights))


def test_gate_never_chooses_lost_experts():
    config = DemoConfig(**TINY)
    gate = gate_with_bias(config, 4)
    x = torch.randn(50, config.hidden)
    gate.lose(rank_experts(config, 2))
    idx, weights = gate(x)
    assert not ((idx >= 8) & (idx < 12)).any()
    assert (idx >= 0).all()
    expected, _ = deepseek_v3_gate(
        x.double().numpy(),
        gate.weight.detach().double().numpy(),
        gate.bias.double().numpy(),
        top_k=4,
        groups=4,
        top_groups=2,
        lost=range(8, 12),
    )
    assert idx.tolist() == expected
    bias = gate.bias.clone()
    gate.rebalance(torch.ones(16))
    assert torch.equal(gate.bias[8:12], bias[8:12])
    for rank in (0, 1):
        gate.lose(rank_experts(config, rank))
    idx, weights = gate(x)  # one group of four experts left, four picks
    assert (idx >= 12).all()
    gate.lose(range(12, 14))
    idx, weights = gate(x)  # fewer experts than picks: the rest is "no expert" with weight 0
    assert ((idx >= 14).sum(dim=1) == 2).all()
    assert ((idx == -1).sum(dim=1) == 2).all()
    assert (weights[idx == -1] == 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(50))
    assert torch.isfinite(weights).all()


def test_rebalance_evens_the_load_out():
    config = DemoConfig(**TINY)
    gate = gate_with_bias(config, 5)
    x = torch.randn(400, config.hidden, generator=torch.Generator().manual_seed(6)) + 1.0

    def load() -> torch.Tensor:
        return torch.bincount(gate(x)[0].flatten(), minlength=16).float()

    before = load()
    for _ in range(300):
        gate.rebalance(load())
    assert load().max() / load().mean() < 1.5 < before.max() / before.mean()


def test_local_exchange_is_the_weighted_sum_over_experts():
    config = DemoConfig(**TINY)
    experts = Experts(config, 0, 16)
    for weights in experts.parameters():
        torch.nn.init.normal_(weights, std=0.3)
    x = torch.randn(7, config.hidden)
    idx = torch.randint(-1, 16, (7, 4))
    idx[3] = -1
    weights = torch.rand(7, 4)
    y = local_exchange(x, idx, weights, experts)
    for token in range(7):
        expected = torch.zeros(config.hidden)
        for expert, weight in zip(idx[token].tolist(), weights[token], strict=True):
            if expert >= 0:
                hidden = torch.nn.functional.silu(x[token] @ experts.w_in[expert])
                expected += weight * (hidden @ experts.w_out[expert])
        torch.testing.assert_close(y[token], expected, rtol=1e-4, atol=1e-5)


def test_start_values_do_not_depend_on_the_split():
    config = DemoConfig(**TINY)
    whole = LanguageModel(config, local=range(16), exchange=local_exchange)
    for rank in range(4):
        part = dict(LanguageModel(config, local=rank_experts(config, rank), exchange=local_exchange).named_parameters())
        for name, value in whole.named_parameters():
            expected = value[4 * rank : 4 * rank + 4] if ".experts." in name else value
            assert torch.equal(part[name], expected), name


def test_baseline_learns_a_short_text_by_heart():
    phrase = b"the quick brown fox jumps over the lazy dog. "
    config = DemoConfig(**{**TINY, "steps": 80, "learning_rate": 2e-2})
    source = text.Text(torch.frombuffer(bytearray(phrase * 20), dtype=torch.uint8), "a fox")
    seen = []
    result = train_baseline(config, source, on_step=lambda step, loss: seen.append((step, loss)))
    assert result.losses[-1] < 0.25 < 4.0 < result.losses[0]
    assert seen == list(enumerate(result.losses))
    assert train_baseline(config, source).losses == result.losses


def test_baseline_without_a_rank():
    config = DemoConfig(**TINY)
    source = text.load_text(None, min_bytes=100)
    whole, without = (train_baseline(config, source, lost=lost).losses for lost in (None, {1: 6}))
    assert whole[:6] == without[:6]
    assert whole[6] != without[6]


def test_generate_continues_the_prompt():
    config = DemoConfig(**TINY)
    model = LanguageModel(config, local=range(16), exchange=local_exchange)
    written = generate(model, b"ab", 30, context=16, seed=1)
    assert written.startswith(b"ab")
    assert len(written) == 32
    assert written == generate(model, b"ab", 30, context=16, seed=1)
    assert model.training


def test_text_of_the_user(tmp_path):
    file = tmp_path / "story.txt"
    file.write_bytes(bytes(range(256)))
    loaded = text.load_text(file, min_bytes=100)
    assert bytes(loaded.data.tolist()) == bytes(range(256))
    assert str(file) in loaded.source
    with pytest.raises(weft.InvalidArgument, match=r"has 256 bytes, must have at least 257"):
        text.load_text(file, min_bytes=257)
    with pytest.raises(weft.InvalidArgument, match=r"nothere\.txt.*No such file"):
        text.load_text(tmp_path / "nothere.txt", min_bytes=1)
    with pytest.raises(weft.InvalidArgument, match="must be a file that can be read"):
        text.load_text(tmp_path, min_bytes=1)


def test_text_found_and_shipped(monkeypatch):
    found = text.load_text(None, min_bytes=100)
    assert len(found.data) > 5_000
    monkeypatch.setattr(text, "_FINDERS", {"nowhere": lambda: None, "too short": lambda: b"short"})
    shipped = text.load_text(None, min_bytes=100)
    assert "Alice" in shipped.source
    assert bytes(shipped.data.tolist()).startswith(b"Alice was beginning to get very tired")


def test_batches_are_repeatable_pieces_of_the_text():
    source = text.Text(torch.arange(200, dtype=torch.uint8), "numbers")
    batch = source.batch(0, 5, 2, 50, 17)
    assert batch.shape == (50, 17)
    assert torch.equal(batch - batch[:, :1], torch.arange(17).expand(50, 17))
    assert torch.equal(batch, source.batch(0, 5, 2, 50, 17))
    for other in (source.batch(0, 5, 1, 50, 17), source.batch(0, 6, 2, 50, 17), source.batch(1, 5, 2, 50, 17)):
        assert not torch.equal(batch, other)
    assert source.batch(0, 0, 0, 3, 200).tolist() == [list(range(200))] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": 30}, r"experts=30: must be a multiple of num_ranks = 4"),
        ({"hidden": 40}, r"hidden=40: must be a multiple of 16 x heads = 64"),
        ({"top_k": 20}, r"top_k=20: must be 1 to 16"),
        ({"top_groups": 5}, r"top_groups=5: must be 1 to expert_groups = 4"),
        ({"kill_rank": 4}, r"kill_rank=4: must be 0 to 3"),
        ({"kill_rank": 0, "num_ranks": 1}, r"num_ranks=1: must be at least 2"),
        ({"steps": 0}, r"steps=0: must be at least 1"),
        ({"device": "tpu"}, r"device='tpu': must be auto, cpu or cuda"),
        ({"prompt": ""}, r"prompt='': must be at least one character"),
    ],
)
def test_config_refuses(wrong, message):
    with pytest.raises(weft.InvalidArgument, match=message):
        DemoConfig(**wrong)


def test_placement():
    assert choose_start(DemoConfig(), 0).device == "cpu"
    assert choose_start(DemoConfig(), 1).isolation == "thread"
    assert (choose_start(DemoConfig(), 4).device, choose_start(DemoConfig(), 4).isolation) == ("cuda", "process")
    alone = choose_start(DemoConfig(kill_rank=2), 1)
    assert (alone.device, alone.isolation) == ("cpu", "process")
    assert "can't be killed" in alone.why
    with pytest.raises(weft.Unsupported, match="no GPU"):
        choose_start(DemoConfig(device="cuda"), 0)
    with pytest.raises(weft.Unsupported, match="two GPUs"):
        choose_start(DemoConfig(device="cuda", kill_rank=2), 1)


def test_events_arrive_in_order_and_never_block():
    seen = []
    with EventPipe(seen.append) as sender:
        for number in range(100):
            sender.send("step", number=number)
    assert seen == [{"kind": "step", "number": number} for number in range(100)]
    slow = threading.Event()
    with EventPipe(lambda event: slow.wait(10)) as sender:
        for _ in range(2_000):  # far more than a pipe holds, while nobody reads
            sender.send("step", filler="x" * 1_000)
        sender.send("huge", filler="x" * 10_000)
        slow.set()


def test_charts():
    assert chart.bar(5, 10, 8) == "████"
    assert chart.bar(0, 0, 8) == ""
    lines = chart.area([4.0, 3.0, 2.0, 1.0], width=10, height=3)
    assert len(lines) == 3
    assert lines[0].startswith("  4.00 │█")
    assert lines[2].startswith("  1.00 │█")
    assert len(chart.area(list(range(1000)), width=50, height=5)[0]) == 58
    assert chart.area([2.0, 2.0], width=10, height=2)


def made_up_report(*, killed: bool = False, **changes) -> DemoReport:
    """A report as a run of 40 steps would give, falling from 5 nats to 1."""
    config = DemoConfig(**{**TINY, "steps": 40, "kill_rank": 2 if killed else None, **changes.pop("config", {})})
    losses = tuple(5.0 - 0.1 * step for step in range(40))
    load = tuple(10 + expert for expert in range(16))
    lost = (Loss(20, (2,), "lost rank 2; go on without it", 5_000_000, 3.0),) if killed else ()
    ranks = tuple(
        RankResult(
            rank=rank,
            engine="Communicator(engine=cpu, because [this machine] has no GPU)",
            device="cpu",
            placement=f"CPUs {rank} of node 0",
            losses=losses,
            loads=((load, load),) * 40,
            train_s=2.0,
            traffic=Traffic(1_000, 2_000, 3_000_000, 0.5, 0.25),
            generated=b"The \xff[bold]quick",
            lost=lost,
        )
        for rank in range(4)
        if not (killed and rank == 2)
    )
    values = {
        "config": config,
        "text_source": "a text",
        "text_bytes": 100,
        "why_here": "4 ranks as processes on the CPU",
        "ranks": ranks,
        "baseline": BaselineResult(losses, 1.0),
        "killed_ns": 4_000_000 if killed else None,
        "total_s": 5.0,
        "plots": (),
    }
    return DemoReport(**{**values, **changes})


def shown(report: DemoReport, width: int = 100) -> str:
    out = io.StringIO()
    show_report(report, Console(file=out, width=width))
    return out.getvalue()


def test_report_of_a_good_run():
    report = made_up_report()
    assert report.ok
    printed = shown(report)
    for part in (
        "plain torch",
        "0.0000%",
        "Expert load",
        "[bold]quick",
        "[this machine]",
        "MB",
        "0.5 s",
        "38%",
        "all together 5.0 s",
    ):
        assert part in " ".join(printed.split()), part
    assert max(len(line) for line in printed.splitlines()) <= 100
    assert "\x1b" not in printed
    assert "Problem" not in printed
    as_json = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert as_json["ok"] is True
    assert as_json["losses"] == list(report.losses)
    assert as_json["ranks"][3]["bytes_sent"] == 3_000_000
    assert shown(made_up_report(baseline=None), width=60)


@pytest.mark.parametrize("width", [80, 120])
def test_report_fits_the_terminal(width):
    printed = shown(made_up_report(), width)
    assert "…" not in printed
    assert max(len(line) for line in printed.splitlines()) <= width
    bars = [line.count("█") for line in printed.split("Expert load")[1].splitlines() if line.count("█") > 1]
    assert max(bars) == 20
    for header in ("experts", "share", "training", "in Weft", "difference"):
        assert f" {header} " in printed, header


def test_equal_lines_of_ranks_are_one_and_shared_cores_are_told():
    ranks = [RankResult(**{**vars(rank), "placement": "CPUs 0-1"}) for rank in made_up_report().ranks]
    printed = shown(made_up_report(ranks=tuple(ranks), num_cores=2))
    assert "ranks 0-3: CPUs 0-1\n" in printed
    assert "4 ranks share 2 CPUs" in printed
    printed = shown(made_up_report(num_cores=4))
    assert "rank 3: CPUs 3 of node 0\n" in printed
    assert "share" not in printed.split("Loss")[0]


@pytest.mark.parametrize("verbose", [False, True])
def test_log_lines_only_if_verbose(verbose, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(live, "LINE_S", 1e9)
    view = live.LiveView(Console(file=out, width=100), DemoConfig(**TINY), verbose=verbose)
    view.listen({"kind": "log", "text": "rank 2 is gone"})
    assert ("rank 2 is gone" in out.getvalue()) == verbose


def test_steps_without_a_terminal_are_told_by_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    view = live.LiveView(Console(file=out, width=100), DemoConfig(**TINY))
    with view.progress("Weft", 12):
        for step in range(5):
            now[0] += 6.0
            view.step(step, 1.0)
    assert [line.split(":")[1].split(",")[0] for line in out.getvalue().splitlines()] == [
        " step 2 of 12",
        " step 4 of 12",
    ]


def test_report_tells_the_story_of_a_lost_rank():
    report = made_up_report(killed=True)
    assert report.ok
    assert report.lost_ranks == {2: 20}
    printed = shown(report)
    for part in (
        "rank 2 lost",
        "rank 0 after 1.0 ms",
        "weft.PeerLost: lost rank 2",
        "comm.rebuild([0, 1, 3])",
        "4 of the 16",
        "repeated step 20",
    ):
        assert part in " ".join(printed.split()), part
    assert report.as_dict()["ranks"][0]["lost"][0]["seen_after_ms"] == 1.0
    assert report.alive_experts() == [e for e in range(16) if not 8 <= e < 12]


def test_report_finds_problems():
    losses = made_up_report().losses
    late = BaselineResult((*losses[:30], *(loss * 1.2 for loss in losses[30:])), 1.0)
    early = BaselineResult((losses[0] * 1.002, *losses[1:]), 1.0)
    not_a_number = BaselineResult((float("nan"), *losses[1:]), 1.0)
    assert "of every 10 steps" in made_up_report(baseline=late).problems[0]
    assert "first 5 steps" in made_up_report(baseline=early).problems[0]
    assert not made_up_report(baseline=not_a_number).ok
    assert "no rank saw it die" in made_up_report(config={"kill_rank": 1}).problems[0]
    rising = tuple(1.0 + 0.1 * step for step in range(40))
    ranks = tuple(RankResult(**{**vars(rank), "losses": rising}) for rank in made_up_report().ranks)
    report = made_up_report(ranks=ranks, baseline=None)
    assert "did not fall" in report.problems[0]
    assert "Problem" in shown(report)


@pytest.mark.parametrize("killed", [False, True])
def test_plots(tmp_path, killed):
    pytest.importorskip("matplotlib")
    paths = plot.write_plots(made_up_report(killed=killed), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.png", "loss.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5_000


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(weft.Unsupported, match=r"pip install 'weft\[plot\]'"):
        plot.require_matplotlib()


def test_import_is_light():
    code = "import sys, weft.demo; print([m for m in ('torch', 'rich', 'matplotlib') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env, check=True
    )
    assert result.stdout.strip() == "[]"
