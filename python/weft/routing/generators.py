"""Generators of routings, and the routing of a recorded trace; see weft.routing."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.errors import InvalidArgument
from weft.routing.traces import MAX_TOP_K, Trace, load_trace

if TYPE_CHECKING:  # torch takes a second to import, and the CLI wants only the names of the generators
    from torch import Tensor

__all__ = ["GENERATORS", "all_to_one", "empty_rank", "group_limited", "make", "trace", "uniform", "zipf"]


def uniform(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    seed: int = 0,
    duplicates: bool = False,
) -> tuple[Tensor, Tensor]:
    """Every expert equally likely. ``duplicates``: independent draws, a token may name an expert twice."""
    return zipf(
        num_tokens,
        num_experts,
        top_k,
        rank=rank,
        num_ranks=num_ranks,
        seed=seed,
        alpha=0.0,
        duplicates=duplicates,
    )


def zipf(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    seed: int = 0,
    alpha: float = 1.0,
    duplicates: bool = False,
) -> tuple[Tensor, Tensor]:
    """The i-th most popular expert is likely in proportion to ``i ** -alpha``; which one is popular depends on the seed
    only.
    """
    _check(num_tokens, num_experts, top_k, rank, num_ranks, seed)
    if not 0 <= alpha <= 100:
        raise InvalidArgument(f"alpha={alpha}: allowed is 0 to 100")
    popularity = -alpha * np.log(np.arange(1, num_experts + 1))
    popularity = popularity[_shared_rng(seed).permutation(num_experts)]
    rng = _rank_rng(seed, rank)
    if duplicates:
        ends = np.cumsum(np.exp(popularity))
        picks = np.searchsorted(ends, rng.random((num_tokens, top_k)) * ends[-1], side="right")
        return _with_weights(np.minimum(picks, num_experts - 1), rng)
    # The K largest of log(probability) + Gumbel noise are K draws without replacement.
    return _with_weights(_largest(popularity + rng.gumbel(size=(num_tokens, num_experts)), top_k), rng)


def all_to_one(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    seed: int = 0,
    target: int = 0,
    duplicates: bool = False,
) -> tuple[Tensor, Tensor]:
    """Every token goes to expert ``target`` alone: the first pick, the others are -1; ``duplicates``: all K picks."""
    _check(num_tokens, num_experts, top_k, rank, num_ranks, seed)
    if not 0 <= target < num_experts:
        raise InvalidArgument(f"target={target}: allowed is 0 to num_experts - 1 = {num_experts - 1}")
    picks = np.full((num_tokens, top_k), target if duplicates else -1)
    picks[:, 0] = target
    return _with_weights(picks, _rank_rng(seed, rank))


def empty_rank(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    seed: int = 0,
    empty: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One rank (``empty``, by default the last) receives nothing and sends nothing: its own tensors are [0, K].

    The other ranks pick uniformly among the experts that do not live on it.
    """
    _check(num_tokens, num_experts, top_k, rank, num_ranks, seed)
    empty = num_ranks - 1 if empty is None else empty
    if not 0 <= empty < num_ranks:
        raise InvalidArgument(f"empty={empty}: allowed is 0 to num_ranks - 1 = {num_ranks - 1}")
    rng = _rank_rng(seed, rank)
    keys = rng.random((0 if rank == empty else num_tokens, num_experts))
    num_local = num_experts // num_ranks
    keys[:, empty * num_local : (empty + 1) * num_local] = -np.inf
    return _with_weights(_largest(keys, top_k), rng)


def group_limited(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    seed: int = 0,
    num_groups: int | None = None,
    topk_groups: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gating of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2, and its model code) on random logits.

    Scores are sigmoids; an expert is chosen by score + bias: groups of experts are ranked by the sum of their two best,
    and the K best experts of the ``topk_groups`` best groups are picked. Weights are the scores, without bias,
    normalised. ``num_groups`` must divide num_experts (default: the largest of 8, 4, 2, 1 that does and leaves two
    experts a group); ``topk_groups``: default half of them.
    """
    _check(num_tokens, num_experts, top_k, rank, num_ranks, seed)
    if num_groups is None:
        num_groups = next((n for n in (8, 4, 2) if num_experts % n == 0 and num_experts >= 2 * n), 1)
    if num_groups < 1 or num_experts % num_groups:
        raise InvalidArgument(f"num_groups={num_groups}: allowed are the divisors of num_experts={num_experts}")
    topk_groups = max(1, num_groups // 2) if topk_groups is None else topk_groups
    if not 1 <= topk_groups <= num_groups:
        raise InvalidArgument(f"topk_groups={topk_groups}: allowed is 1 to num_groups = {num_groups}")
    bias = 0.1 * _shared_rng(seed).standard_normal(num_experts)
    scores = 1 / (1 + np.exp(-_rank_rng(seed, rank).standard_normal((num_tokens, num_experts))))
    choice = scores + bias
    grouped = choice.reshape(num_tokens, num_groups, num_experts // num_groups)
    group_scores = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    allowed = np.zeros((num_tokens, num_groups), dtype=bool)
    np.put_along_axis(allowed, _largest(group_scores, topk_groups), True, axis=1)
    choice[~np.repeat(allowed, num_experts // num_groups, axis=1)] = -np.inf
    picks = _largest(choice, top_k)
    return _normalised(picks, np.take_along_axis(scores, np.maximum(picks, 0), axis=1))


def trace(
    num_tokens: int | None,
    num_experts: int,
    top_k: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    seed: int = 0,
    trace: Trace | str | os.PathLike[str],
    step: int = 0,
) -> tuple[Tensor, Tensor]:
    """Replay a recorded trace (a file, or what ``load_trace`` gave): ``Trace.replay``. The seed changes nothing."""
    _check(num_tokens or 0, num_experts, top_k, rank, num_ranks, seed)
    loaded = trace if isinstance(trace, Trace) else load_trace(trace)
    return loaded.replay(num_tokens, num_experts=num_experts, top_k=top_k, rank=rank, step=step)


GENERATORS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "uniform": uniform,
    "zipf": zipf,
    "all_to_one": all_to_one,
    "empty_rank": empty_rank,
    "group_limited": group_limited,
    "trace": trace,
}


def make(
    name: str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    seed: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The generator called ``name`` (``GENERATORS``; '-' may stand for '_') with its own keyword options."""
    generator = GENERATORS.get(name.replace("-", "_"))
    if generator is None:
        raise InvalidArgument(f"name={name!r}: allowed are {', '.join(GENERATORS)}")
    common = ("num_tokens", "num_experts", "top_k", "rank", "num_ranks", "seed")
    allowed = [option for option in inspect.signature(generator).parameters if option not in common]
    for option in options:
        if option not in allowed:
            raise InvalidArgument(f"{option}={options[option]!r}: {name} takes {', '.join(allowed) or 'no options'}")
    if generator is trace and "trace" not in options:
        raise InvalidArgument("trace=None: the generator 'trace' needs a file or a Trace")
    return generator(num_tokens, num_experts, top_k, rank=rank, num_ranks=num_ranks, seed=seed, **options)


def _check(num_tokens: int, num_experts: int, top_k: int, rank: int, num_ranks: int, seed: int) -> None:
    if num_tokens < 0:
        raise InvalidArgument(f"num_tokens={num_tokens}: must be at least 0")
    if num_ranks < 1:
        raise InvalidArgument(f"num_ranks={num_ranks}: must be at least 1")
    if not 0 <= rank < num_ranks:
        raise InvalidArgument(f"rank={rank}: allowed is 0 to num_ranks - 1 = {num_ranks - 1}")
    if num_experts < 1 or num_experts % num_ranks:
        raise InvalidArgument(f"num_experts={num_experts}: must be a positive multiple of num_ranks={num_ranks}")
    if not 1 <= top_k <= MAX_TOP_K:
        raise InvalidArgument(f"top_k={top_k}: allowed is 1 to {MAX_TOP_K}")
    if seed < 0:
        raise InvalidArgument(f"seed={seed}: must be at least 0")


def _shared_rng(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 0])


def _rank_rng(seed: int, rank: int) -> np.random.Generator:
    return np.random.default_rng([seed, 1, rank])


def _largest(keys: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Columns of the ``count`` largest keys of each row, largest first; -1 where there is none or it is -inf."""
    num_rows, num_columns = keys.shape
    order = np.argsort(-keys, axis=1, kind="stable")[:, :count]
    found = np.where(np.isneginf(np.take_along_axis(keys, order, axis=1)), -1, order)
    return np.concatenate([found, np.full((num_rows, max(0, count - num_columns)), -1)], axis=1)


def _with_weights(picks: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    return _normalised(picks, rng.uniform(0.1, 1.0, picks.shape))


def _normalised(picks: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    import torch

    weights = np.where(picks >= 0, weights, 0.0)
    total = weights.sum(axis=1, keepdims=True)
    weights = (weights / np.where(total > 0, total, 1.0)).astype(np.float32)
    return torch.from_numpy(picks.astype(np.int64)), torch.from_numpy(weights)
