"""Where the picks of a token fall: how many ranks and how many domains a token reaches, and how evenly.

A *domain* is a set of ranks that reach each other by load and store: a machine, or a rack of NVLink. Expert e lives on
rank e // (E / R), ranks of a domain are neighbours. numpy is needed for recorded traces only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InvalidArgument

_MAX_PASSES = 200
_CLOSE = 1e-9


@dataclass(frozen=True)
class Reach:
    """What of the tokens goes where.

    Attributes: `routing` in words; `by_rank` [R]: the share of a rank's tokens that reach each rank; `by_domain` [N]:
    the same for domains; `num_experts`, `top_k`.
    """

    routing: str
    by_rank: tuple[float, ...]
    by_domain: tuple[float, ...]
    num_experts: int
    top_k: int

    @property
    def ranks(self) -> float:
        """Distinct ranks that a token reaches on average: copies without a network."""
        return sum(self.by_rank)

    @property
    def domains(self) -> float:
        """Distinct domains that a token reaches on average."""
        return sum(self.by_domain)

    @property
    def ranks_per_domain(self) -> int:
        """G."""
        return len(self.by_rank) // len(self.by_domain)


def uniform(num_experts: int, top_k: int, num_ranks: int, ranks_per_domain: int) -> Reach:
    """K distinct experts, every set of K equally likely (hypergeometric)."""
    _check(num_experts, top_k, num_ranks, ranks_per_domain)

    def hit(num_theirs: int) -> float:
        return 1 - math.comb(num_experts - num_theirs, top_k) / math.comb(num_experts, top_k)

    num_domains = num_ranks // ranks_per_domain
    by_rank = (hit(num_experts // num_ranks),) * num_ranks
    by_domain = (hit(num_experts // num_domains),) * num_domains
    return Reach("uniform", by_rank, by_domain, num_experts, top_k)


def group_limited(
    num_experts: int, top_k: int, num_ranks: int, ranks_per_domain: int, *, num_groups: int, topk_groups: int
) -> Reach:
    """The gate takes the `topk_groups` of `num_groups` equal runs of experts that hold the best experts, and the K best
    experts in them; every order of the experts is equally likely.

    So DeepEP's tests rank groups. DeepSeek-V3's gate (`weft.routing.group_limited`) ranks them by their two best, which
    moves the rows of a token by about 1 %.
    """
    _check(num_experts, top_k, num_ranks, ranks_per_domain)
    if num_groups < 1 or num_experts % num_groups:
        raise InvalidArgument(f"num_groups={num_groups}: allowed are the divisors of num_experts={num_experts}")
    if not 1 <= topk_groups <= num_groups:
        raise InvalidArgument(f"topk_groups={topk_groups}: allowed is 1 to num_groups = {num_groups}")
    group = num_experts // num_groups
    if group * topk_groups < top_k:
        raise InvalidArgument(f"topk_groups={topk_groups}: {group * topk_groups} experts are too few for top_k={top_k}")
    gate = _Gate(num_experts, top_k, num_groups, topk_groups)

    def hits(num_parts: int) -> tuple[float, ...]:
        size = num_experts // num_parts
        known: dict[tuple[int, ...], float] = {}
        found = []
        for start in range(0, num_experts, size):
            overlaps = tuple(
                min(start + size, (g + 1) * group) - max(start, g * group)
                for g in range(start // group, (start + size - 1) // group + 1)
            )
            if overlaps not in known:
                known[overlaps] = 1 - gate.miss(overlaps)
            found.append(known[overlaps])
        return tuple(found)

    name = f"top {topk_groups} of {num_groups} groups"
    return Reach(name, hits(num_ranks), hits(num_ranks // ranks_per_domain), num_experts, top_k)


@dataclass(frozen=True)
class _Gate:
    """Experts come in the order of their scores. Until `topk_groups` groups have been seen every expert is picked,
    after that those of the groups seen."""

    num_experts: int
    top_k: int
    num_groups: int
    topk_groups: int

    def miss(self, overlaps: Sequence[int]) -> float:
        """The chance that no pick falls on a set that has so many experts in each of the groups that it touches.

        State: groups seen, and which of the touched groups are among them without a pick of the set.
        """
        chances: dict[tuple[int, frozenset[int]], float] = {(0, frozenset()): 1.0}
        for num_picked in range(self.top_k):
            after: dict[tuple[int, frozenset[int]], float] = {}
            for state, chance in chances.items():
                for following, share in self._picks(overlaps, state, num_picked):
                    after[following] = after.get(following, 0.0) + chance * share
            chances = after
        return math.fsum(chances.values())

    def _picks(
        self, overlaps: Sequence[int], state: tuple[int, frozenset[int]], num_picked: int
    ) -> list[tuple[tuple[int, frozenset[int]], float]]:
        """States after one more pick that is not of the set, with their chances."""
        num_seen, touched = state
        group = self.num_experts // self.num_groups
        left_in_seen = num_seen * group - num_picked
        if num_seen == self.topk_groups:
            left = left_in_seen
        else:
            left = self.num_experts - num_picked
        found = [(state, (left_in_seen - sum(overlaps[idx] for idx in touched)) / left)]
        if num_seen < self.topk_groups:
            untouched = self.num_groups - num_seen - (len(overlaps) - len(touched))
            found.append(((num_seen + 1, touched), untouched * group / left))
            for idx in set(range(len(overlaps))) - touched:
                if overlaps[idx] < group:
                    found.append(((num_seen + 1, touched | {idx}), (group - overlaps[idx]) / left))
        return found


def from_histogram(loads: Sequence[float], top_k: int, num_ranks: int, ranks_per_domain: int) -> Reach:
    """From the picks that each expert got: the most even distribution of K distinct picks with these loads.

    That is conditional Poisson sampling: among all distributions over sets of K experts that give each expert its
    load, the one of largest entropy. Equal loads give `uniform`. What the loads can't say, for example experts that are
    picked together, a recorded trace says.

    Raises:
        InvalidArgument: loads that are negative or not finite, or that K distinct picks a token can't give: an expert
            with more than 1 / K of the picks, fewer than K experts with any.
    """
    num_experts = len(loads)
    _check(num_experts, top_k, num_ranks, ranks_per_domain)
    if not all(math.isfinite(load) and load >= 0 for load in loads):
        raise InvalidArgument("the histogram has an entry that is negative or not finite; it needs a count an expert")
    total = math.fsum(loads)
    if sum(load > 0 for load in loads) < top_k:
        raise InvalidArgument(f"the histogram has fewer than top_k={top_k} experts with picks")
    shares = [top_k * load / total for load in loads]
    busiest = max(range(num_experts), key=shares.__getitem__)
    if shares[busiest] > 1 + 1e-6:
        raise InvalidArgument(
            f"the histogram gives expert {busiest} {shares[busiest] / top_k:.1%} of the picks; with top_k={top_k} "
            f"distinct picks a token it can have at most {1 / top_k:.1%}"
        )
    weights = _weights(shares, top_k)
    always = [share >= 1 - _CLOSE for share in shares]
    num_free = top_k - sum(always)
    ahead, behind = _products(weights, num_free), _products(weights[::-1], num_free)[::-1]
    whole = ahead[-1][num_free]
    if not 0 < whole < math.inf:
        raise InvalidArgument(f"the histogram of {num_experts} experts with top_k={top_k} is beyond double precision")

    def hits(num_parts: int) -> tuple[float, ...]:
        size = num_experts // num_parts
        found = []
        for start in range(0, num_experts, size):
            if any(always[start : start + size]):
                found.append(1.0)
                continue
            before, after = ahead[start], behind[start + size]
            found.append(1 - math.fsum(before[j] * after[num_free - j] for j in range(num_free + 1)) / whole)
        return tuple(found)

    return Reach("histogram", hits(num_ranks), hits(num_ranks // ranks_per_domain), num_experts, top_k)


def _weights(shares: Sequence[float], top_k: int) -> list[float]:
    """Weights w with which sets of experts, likely in proportion to the product of their w, give each its share.

    Fixed point of Chen, Dempster and Liu (Biometrika 81, 1994). Experts in every set get 0: they are kept apart.
    """
    free = [0.0 if share >= 1 - _CLOSE else share for share in shares]
    num_free = top_k - sum(share >= 1 - _CLOSE for share in shares)
    weights = [share / (1 - share) for share in free]
    for _ in range(_MAX_PASSES):
        chances = [0.0] * len(weights)
        for size in range(1, num_free + 1):  # the chance to be in a set of `size`, from that of one less
            parts = [w * (1 - chance) for w, chance in zip(weights, chances, strict=True)]
            scale = size / math.fsum(parts)
            chances = [scale * part for part in parts]
        if max(abs(chance - share) for chance, share in zip(chances, free, strict=True)) < _CLOSE:
            break
        weights = [
            w * share / chance if chance > 0 else 0.0 for w, share, chance in zip(weights, free, chances, strict=True)
        ]
    largest = max(weights)
    return [w / largest for w in weights]


def _products(weights: Sequence[float], top_k: int) -> list[list[float]]:
    """For each number of leading experts the sums of products of j weights, j = 0 to K.

    All terms are positive, so nothing cancels."""
    rows = [[1.0] + [0.0] * top_k]
    for weight in weights:
        last = rows[-1]
        rows.append([1.0, *(last[j] + weight * last[j - 1] for j in range(1, top_k + 1))])
    return rows


def from_trace(file: str | Path, num_ranks: int, ranks_per_domain: int) -> Reach:
    """From ids recorded with `weft.routing.record`: counted, nothing is assumed. The tokens of all recorded ranks and
    calls stand for each rank's; E and K are the recorded ones, which must be the same in all calls."""
    import numpy as np

    from weft.routing.traces import load_trace

    dispatches = list(itertools.chain.from_iterable(load_trace(file).dispatches.values()))
    shapes = {(d.num_experts, d.topk_idx.shape[1]) for d in dispatches}
    if len(shapes) != 1:
        raise InvalidArgument(f"file={str(file)!r}: calls with different (E, K), {sorted(shapes)}; allowed is one")
    ((num_experts, top_k),) = shapes
    _check(num_experts, top_k, num_ranks, ranks_per_domain)
    picks = np.concatenate([d.topk_idx for d in dispatches])
    if not len(picks):
        raise InvalidArgument(f"file={str(file)!r}: no token was recorded")

    def hits(num_parts: int) -> tuple[float, ...]:
        parts = np.where(picks >= 0, picks // (num_experts // num_parts), -1)
        ordered = np.sort(parts, axis=1)
        is_first = ordered >= 0
        is_first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        counts = np.bincount(ordered[is_first], minlength=num_parts)
        return tuple((counts / len(picks)).tolist())

    return Reach("trace", hits(num_ranks), hits(num_ranks // ranks_per_domain), num_experts, top_k)


def _check(num_experts: int, top_k: int, num_ranks: int, ranks_per_domain: int) -> None:
    if num_ranks < 1 or ranks_per_domain < 1 or num_ranks % ranks_per_domain:
        raise InvalidArgument(
            f"ranks_per_domain={ranks_per_domain}: allowed are the divisors of the number of ranks, {num_ranks}"
        )
    if num_experts < 1 or num_experts % num_ranks:
        raise InvalidArgument(f"num_experts={num_experts}: must be a positive multiple of num_ranks={num_ranks}")
    if not 1 <= top_k <= min(128, num_experts):
        raise InvalidArgument(f"top_k={top_k}: allowed is 1 to {min(128, num_experts)}")
