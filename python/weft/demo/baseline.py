"""The same training on one rank in plain torch, without Weft: what the losses of the demo are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.demo.config import DemoConfig
from weft.demo.model import Experts, LanguageModel, make_optimizer
from weft.demo.text import Text


@dataclass(frozen=True)
class BaselineResult:
    """Mean loss of each step in nats, and the time of the training in seconds."""

    losses: tuple[float, ...]
    train_s: float


def local_exchange(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Experts) -> Tensor:
    """All experts are here: sorts the picks by expert, runs the experts, adds the weighted answers. See `Exchange`."""
    picks = topk_idx.flatten()
    order = picks.argsort(stable=True)
    order = order[(picks < 0).sum() :]  # -1 sorts first: no expert
    token_idx = order // topk_idx.shape[1]
    num_rows = torch.bincount(picks[order], minlength=experts.count).tolist()
    answers = experts(x[token_idx], num_rows) * topk_weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token_idx, answers)


def train_baseline(
    config: DemoConfig,
    text: Text,
    *,
    lost: Mapping[int, int] | None = None,
    device: str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
) -> BaselineResult:
    """Trains on the batches of all ranks at once.

    `lost` maps a rank to the step from which on it was dead: from then on its experts are masked in the gate and its
    share of the text is not read, as the survivors do it. `on_step` is told each step and its loss.
    """
    model = LanguageModel(config, local=range(config.experts), exchange=local_exchange).to(device)
    optimizer, set_rate = make_optimizer(model, config)
    losses = []
    start = time.perf_counter()
    for step in range(config.steps):
        gone = {rank for rank, since in (lost or {}).items() if step >= since}
        for layer in model.moe_layers():
            for rank in gone:
                layer.gate.lose(rank_experts(config, rank))
        batches = [
            text.batch(config.seed, step, rank, config.sequences_per_rank, config.context + 1)
            for rank in range(config.num_ranks)
            if rank not in gone
        ]
        set_rate(step)
        optimizer.zero_grad()
        loss = model.loss(torch.cat(batches).to(device))
        loss.backward()
        optimizer.step()
        for layer in model.moe_layers():
            layer.gate.rebalance(layer.take_load())
        losses.append(loss.item())
        if on_step is not None:
            on_step(step, losses[-1])
    return BaselineResult(tuple(losses), time.perf_counter() - start)


def rank_experts(config: DemoConfig, rank: int) -> range:
    """The experts that live on `rank`."""
    return range(rank * config.experts_per_rank, (rank + 1) * config.experts_per_rank)
