"""A small byte-level language model with mixture-of-experts layers, gated as in DeepSeek-V3.

The model does not know where its experts live: `MoELayer` is given an `Exchange`, which takes tokens to experts and
brings the results back. `weft.demo.train` passes one that goes through Weft, `weft.demo.baseline` one in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.demo.config import DemoConfig
from weft.engine import to_host

NUM_BYTES = 256


class Exchange(Protocol):
    """Takes every token to its experts and returns the weighted sum of what they answer."""

    def __call__(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Experts) -> Tensor:
        """x [T, H], topk_idx [T, K] int64 (-1 = no expert), topk_weights [T, K] fp32 -> [T, H]."""


class Gate(nn.Module):
    """DeepSeek-V3's gate (arXiv 2412.19437, section 2.1.2; its inference/model.py, class Gate).

    Scores are sigmoids. A bias is added for the *choice* only: groups of experts are ranked by the sum of their two
    best biased scores, then the best `top_k` biased scores within the best groups win. The weights are the unbiased
    scores of the winners, normalised to sum 1. No loss term balances the load: after each step `rebalance` lowers
    the bias of experts that got more than the mean and raises the others'.
    """

    bias: Tensor
    lost: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.top_k, self.groups, self.top_groups = config.top_k, config.expert_groups, config.top_groups
        self.rate = config.bias_rate
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden, dtype=torch.float32, device="cpu"))
        self.register_buffer("bias", torch.zeros(config.experts, dtype=torch.float32, device="cpu"))
        self.register_buffer("lost", torch.zeros(config.experts, dtype=torch.bool, device="cpu"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> ids [T, K] int64 and weights [T, K] fp32; -1 and 0 where no expert is left to choose."""
        scores = (x.float() @ self.weight.T).sigmoid()
        topk_idx = self._choose(scores.detach())
        weights = scores.gather(1, topk_idx.clamp(min=0)).masked_fill(topk_idx < 0, 0.0)
        return topk_idx, weights / (weights.sum(dim=1, keepdim=True) + 1e-20)

    def _choose(self, scores: Tensor) -> Tensor:
        biased = (scores + self.bias).masked_fill(self.lost, -torch.inf)
        grouped = biased.unflatten(1, (self.groups, -1))
        group_scores = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
        best_groups = group_scores.topk(self.top_groups, dim=1).indices
        outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best_groups, False)
        chosen = grouped.masked_fill(outside[:, :, None], -torch.inf).flatten(1).topk(self.top_k, dim=1)
        topk_idx: Tensor = chosen.indices.masked_fill(chosen.values.isneginf(), -1)
        return topk_idx

    def rebalance(self, load: Tensor) -> None:
        """Moves the bias by one step towards an even load. load: [E] picks per expert of the whole step, all ranks."""
        mean = load.sum() / (~self.lost).sum()
        self.bias += self.rate * torch.sign(mean - load).masked_fill(self.lost, 0.0)

    def lose(self, experts: range) -> None:
        """Never again chooses one of `experts`: they are gone."""
        self.lost[experts.start : experts.stop] = True


class Experts(nn.Module):
    """Experts `first` to `first + count - 1` of the model: each a two-layer network of its own."""

    def __init__(self, config: DemoConfig, first: int, count: int) -> None:
        super().__init__()
        self.first, self.count = first, count
        self.w_in = nn.Parameter(
            torch.empty(count, config.hidden, config.expert_hidden, dtype=torch.float32, device="cpu")
        )
        self.w_out = nn.Parameter(
            torch.empty(count, config.expert_hidden, config.hidden, dtype=torch.float32, device="cpu")
        )

    def forward(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        """x [N, H], sorted by expert: the first num_rows[0] rows are for our first expert, and so on. -> [N, H]."""
        pieces = zip(x.split(list(num_rows)), self.w_in.unbind(), self.w_out.unbind(), strict=True)
        return torch.cat([F.silu(rows @ w_in) @ w_out for rows, w_in, w_out in pieces])


class MoELayer(nn.Module):
    """Gate, experts, and the exchange between them. `load` [E] counts the picks of this rank's tokens since cleared."""

    load: Tensor

    def __init__(self, config: DemoConfig, local: range, exchange: Exchange) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config, local.start, len(local))
        self.exchange = exchange
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]."""
        rows = x.flatten(0, 1)
        topk_idx, topk_weights = self.gate(rows)
        if self.training:
            picks = topk_idx[topk_idx >= 0]
            self.load += torch.bincount(picks, minlength=len(self.load))
        return self.exchange(rows, topk_idx, topk_weights, self.experts).view_as(x)

    def take_load(self) -> Tensor:
        """The load counted so far, [E]; counting starts anew."""
        load = self.load.clone()
        self.load.zero_()
        return load


class Block(nn.Module):
    """Attention, then experts, each on a normalised input and added to the stream."""

    def __init__(self, config: DemoConfig, local: range, exchange: Exchange) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm, self.expert_norm = nn.RMSNorm(config.hidden), nn.RMSNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.moe = MoELayer(config, local, exchange)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]."""
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = rotate(heads[0]), rotate(heads[1]), heads[2]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.moe(self.expert_norm(x))
        return y


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864). x [B, heads, S, D] -> the same."""
    half = x.shape[3] // 2
    frequencies = 1000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=torch.int64)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=3)


class LanguageModel(nn.Module):
    """Predicts the next byte. Same seed, same start values, whichever part of the experts is held (`local`)."""

    def __init__(self, config: DemoConfig, *, local: range, exchange: Exchange) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, config.hidden)
        self.blocks = nn.ModuleList(Block(config, local, exchange) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, NUM_BYTES, bias=False)
        self._start_values(config, local)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] int64 -> logits [B, S, 256]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, sequences: Tensor) -> Tensor:
        """sequences [B, S + 1] int64 -> mean cross entropy of the next byte, in nats."""
        logits = self(sequences[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())

    def moe_layers(self) -> list[MoELayer]:
        return [module for module in self.modules() if isinstance(module, MoELayer)]

    def dense_parameters(self) -> list[nn.Parameter]:
        """What every rank holds a copy of: all but the experts."""
        return [value for name, value in self.named_parameters() if ".experts." not in name]

    def expert_parameters(self) -> list[nn.Parameter]:
        return [value for name, value in self.named_parameters() if ".experts." in name]

    @torch.no_grad()
    def _start_values(self, config: DemoConfig, local: range) -> None:
        generator = torch.Generator().manual_seed(config.seed)
        for name, value in self.named_parameters():
            if value.dim() == 1:
                continue  # norms start at 1
            if ".experts." in name:  # draw all experts, keep ours: every split of them starts alike
                drawn = torch.randn(
                    (config.experts, *value.shape[1:]), generator=generator, dtype=torch.float32, device="cpu"
                )
                value.copy_(drawn[local.start : local.stop] * value.shape[1] ** -0.5)
            else:
                scale = 1.0 if "embedding" in name else value.shape[1] ** -0.5
                value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu") * scale)
            if name.endswith(("out.weight", "w_out")):
                value.mul_((2 * config.layers) ** -0.5)


def make_optimizer(model: LanguageModel, config: DemoConfig) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    """AdamW, and a function that sets the learning rate of a step (linear warm-up, then a cosine to a tenth)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, config.steps // 10)

    def set_rate(step: int) -> None:
        progress = max(0, step - warmup) / max(1, config.steps - warmup)
        falling = 0.55 + 0.45 * float(torch.cos(torch.tensor(torch.pi * progress, dtype=torch.float32, device="cpu")))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / warmup) * falling

    return optimizer, set_rate


@torch.no_grad()
def generate(model: LanguageModel, prompt: bytes, num_bytes: int, *, context: int, seed: int) -> bytes:
    """Continues `prompt` by `num_bytes` bytes. Collective where the model's exchange is.

    Samples at temperature 0.6; the same seed and model give the same text.
    """
    model.eval()
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_bytes):
        window = torch.tensor([tokens[-context:]], device=device, dtype=torch.int64)
        logits = to_host(model(window)[0, -1].float()) / 0.6
        tokens.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
    model.train()
    return bytes(tokens)
