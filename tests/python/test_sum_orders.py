"""Guards against sums in another order than the one asked for: bits that differ from the reference, or, by pick, with
the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import reference

NUM_EXPERTS, TOP_K, HIDDEN, NUM_TOKENS = 8, 4, 40, 24


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Of many magnitudes: sums of them show their order."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    exponents = torch.randint(-9, 9, shape, generator=generator, dtype=torch.int32, device="cpu")
    mantissas = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return torch.ldexp(mantissas, exponents)


class Job:
    """The same tokens on any number of ranks."""

    def __init__(self, num_ranks: int, dtype: torch.dtype) -> None:
        generator = torch.Generator(device="cpu").manual_seed(5)
        draw = {"generator": generator, "dtype": torch.int64, "device": "cpu"}
        picks: Tensor = torch.randint(-1, NUM_EXPERTS, (NUM_TOKENS, TOP_K), **draw)  # type: ignore[call-overload]
        self.num_ranks, self.dtype = num_ranks, dtype
        self.ids = list(picks.chunk(num_ranks))
        self.weights = list(values((NUM_TOKENS, TOP_K), 1).chunk(num_ranks))
        mine = values((NUM_TOKENS, TOP_K), 2)
        mine[::3, 1] = 0.0
        self.owner_weights = list(mine.chunk(num_ranks))
        self.biases = list(values((NUM_TOKENS, HIDDEN), 3).to(dtype).chunk(num_ranks))
        self.rows = values((NUM_TOKENS, TOP_K, HIDDEN), 4).to(dtype)  # what the experts make of each pick
        self.xs = [torch.zeros((len(each), HIDDEN), dtype=dtype, device="cpu") for each in self.ids]

    def dispatched(self, layout: str) -> list[reference.Dispatched]:
        options: dict[str, Any] = {"capacity": NUM_TOKENS * TOP_K} if layout == "masked" else {}
        return reference.dispatch(self.xs, self.ids, self.weights, num_experts=NUM_EXPERTS, layout=layout, **options)

    def gone(self, rank: int, kind: torch.dtype) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """Of picks that have gone since the dispatch: ids and weights of a rank, no numbers where they have; and the
        weights that count on every rank."""
        all_ids, given, left = [], [], []
        for ids, weights in zip(self.ids, self.owner_weights, strict=True):
            has_gone = torch.zeros_like(ids, dtype=torch.bool)
            has_gone[::2, 0] = has_gone[1::2, -1] = True
            all_ids.append(torch.where(has_gone, -1, ids).to(kind))
            given.append(torch.where(has_gone, torch.nan, weights))
            left.append(torch.where(has_gone, 0.0, weights))
        return (all_ids[rank], given[rank]), left

    def outputs(self, results: list[reference.Dispatched], rank: int) -> Tensor:
        source, token, pick = reference.sources(results)[rank]
        number = source * (NUM_TOKENS // self.num_ranks) + token
        lane = torch.zeros_like(number) if pick is None else pick
        found = self.rows[number.clamp(min=0).long(), lane.clamp(min=0).long()]
        return torch.where((source >= 0)[..., None], found, torch.nan)


def combined(job: Job, layout: str, **options: Any) -> Tensor:
    results = job.dispatched(layout)
    outputs = [job.outputs(results, rank) for rank in range(job.num_ranks)]
    found: list[Tensor] = reference.combine(outputs, results, **options)
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_by_pick_do_not_know_the_number_of_ranks(dtype: torch.dtype) -> None:
    by_rank, by_pick = [], []
    for num_ranks in (1, 2, 4, 8):
        job = Job(num_ranks, dtype)
        by_rank.append(combined(job, "expert_major", biases=job.biases))
        by_pick.append(combined(job, "expert_major", biases=job.biases, order="pick"))
        assert torch.equal(combined(job, "masked", biases=job.biases, order="pick"), by_pick[0])
    assert all(torch.equal(each, by_pick[0]) for each in by_pick)
    assert not all(torch.equal(each, by_rank[0]) for each in by_rank)  # or the values show nothing


def test_orders_as_they_are_written_down() -> None:
    job = Job(4, torch.bfloat16)
    ids, bias = torch.cat(job.ids), torch.cat(job.biases).float()
    weights, owner = torch.cat(job.weights), torch.cat(job.owner_weights)
    for name, options in {
        "pick": {}, "by owner": {"owner_weights": job.owner_weights}, "plain": {"weighted": False}, "last_pick": {},
    }.items():  # fmt: skip
        wanted = torch.zeros_like(bias)
        for token in range(NUM_TOKENS):
            total = torch.zeros(HIDDEN, dtype=torch.float32, device="cpu") + bias[token]
            parts: dict[int, Tensor] = {}  # by rank; an entry that is renewed moves to the end
            for k in range(TOP_K):
                if ids[token, k] < 0 or (name == "by owner" and owner[token, k] == 0):
                    continue
                weight = (owner if name == "by owner" else weights)[token, k]
                row = job.rows[token, k].float() if name == "plain" else weight * job.rows[token, k].float()
                if name == "last_pick":
                    rank = int(ids[token, k]) // 2
                    parts[rank] = parts.pop(rank, torch.zeros_like(total)) + row
                else:
                    total = total + row
            for part in parts.values():
                total = total + part.bfloat16().float()
            wanted[token] = total
        order = "last_pick" if name == "last_pick" else "pick"
        found = combined(job, "expert_major", biases=job.biases, order=order, **options)
        assert torch.equal(found, wanted.bfloat16()), name


def engine(comm: weft.Communicator, dtype: torch.dtype, heap_bytes: int | None) -> list[Tensor]:
    """Against the reference; returns the sums by pick."""
    job, rank = Job(comm.num_ranks, dtype), comm.rank
    found = []
    with weft.ExpertParallel(
        comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=NUM_TOKENS, dtype=dtype,
        heap_bytes=heap_bytes,
    ) as ep:  # fmt: skip
        for layout in ("rank_major", "expert_major", "masked"):
            results = job.dispatched(layout)
            outputs = [job.outputs(results, each) for each in range(comm.num_ranks)]
            options: dict[str, Any] = {"capacity": NUM_TOKENS * TOP_K} if layout == "masked" else {}
            r = ep.dispatch(job.xs[rank], job.ids[rank], job.weights[rank], layout=layout, **options)
            sides = [torch.rand(each.topk_weights.shape, device="cpu", dtype=torch.float32) for each in results]
            sides = [torch.full_like(each, 1.0 + number) for number, each in enumerate(sides)]
            calls: list[dict[str, Any]] = [{"order": "rank"}, {"order": "last_pick"}]
            if layout != "rank_major":
                calls += [{"order": "pick"}, {"order": "pick", "weighted": False}]
                calls += [{"order": "pick", "owner_weights": job.owner_weights}]
            for call in calls:
                for has_bias, has_side in ((False, False), (True, True)):
                    biases, given = (job.biases, sides) if has_bias else (None, None)
                    wanted = reference.combine(outputs, results, biases=biases, sides=given, **call)[rank]
                    mine = {"weights" if name == "owner_weights" else name: value for name, value in call.items()}
                    mine["weights"] = job.owner_weights[rank] if "weights" in mine else None
                    y = ep.combine(
                        outputs[rank], r.handle, bias=job.biases[rank] if has_bias else None,
                        side=sides[rank] if has_side else None, **mine,
                    )  # fmt: skip
                    if has_side:
                        assert torch.equal(y[1], wanted[1]), (layout, call)
                        y, wanted = y[0], wanted[0]
                    assert torch.equal(y, wanted), (layout, call)
                    if layout == "expert_major" and call == {"order": "pick"} and has_bias:
                        found.append(y)
    return found


@pytest.mark.parametrize("heap_bytes", [None, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_engine_has_the_bits_of_the_reference(dtype: torch.dtype, heap_bytes: int | None) -> None:
    sums = []
    for num_ranks in (1, 2, 4, 8):
        by_rank = weft.spawn(engine, num_ranks, (dtype, heap_bytes), device="cpu")
        sums.append(torch.cat([each[0] for each in by_rank]))
    assert all(torch.equal(each, sums[0]) for each in sums)


def gone_picks(comm: weft.Communicator, dtype: torch.dtype) -> None:
    """Ids that are below 0 by now, of either integer dtype; from a tensor with gaps, too."""
    job, rank = Job(comm.num_ranks, dtype), comm.rank
    with weft.ExpertParallel(
        comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=NUM_TOKENS, dtype=dtype
    ) as ep:
        results = job.dispatched("expert_major")
        outputs = [job.outputs(results, each) for each in range(comm.num_ranks)]
        r = ep.dispatch(job.xs[rank], job.ids[rank], job.weights[rank], layout="expert_major")
        for kind in (torch.int64, torch.int32):
            (ids, weights), left = job.gone(rank, kind)
            wanted = reference.combine(outputs, results, order="pick", owner_weights=left)[rank]
            wide = torch.stack([ids, ids], dim=2)[..., 0]
            for given in (ids, ids, ids, wide):  # learnt, known, and what is never known
                y = ep.combine(outputs[rank], r.handle, order="pick", weights=weights, topk_idx=given)
                assert torch.equal(y, wanted)
            freed_weights, freed_ids = weights.clone(), ids.clone()
            for each in (freed_weights, freed_ids):
                each.untyped_storage().resize_(0)
            for name, given_weights, given_ids in (
                ("topk_idx", weights, freed_ids),
                ("weights", freed_weights, ids),
                ("weights", freed_weights, None),
            ):
                with pytest.raises(weft.InvalidArgument, match=f"{name} has no memory"):
                    ep.combine(outputs[rank], r.handle, order="pick", weights=given_weights, topk_idx=given_ids)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_picks_whose_id_has_gone_are_absent(num_ranks: int) -> None:
    weft.spawn(gone_picks, num_ranks, (torch.bfloat16,), device="cpu")


WRONG: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "an order": (lambda ep, r, y: ep.combine(y, r.handle, order="expert"), "order"),
    "weights by rank": (lambda ep, r, y: ep.combine(y, r.handle, weights=torch.zeros((3, 4), device="cpu")), "order"),
    "weights of another shape": (
        lambda ep, r, y: ep.combine(y, r.handle, order="pick", weights=torch.zeros((3, 3), device="cpu")),
        "weights",
    ),
    "integer weights": (
        lambda ep, r, y: ep.combine(
            y, r.handle, order="pick", weights=torch.zeros((3, 4), dtype=torch.int32, device="cpu")
        ),
        "weights",
    ),
    "weights of a plain sum": (
        lambda ep, r, y: ep.combine(
            y, r.handle, order="pick", weighted=False, weights=torch.zeros((3, 4), dtype=torch.float32, device="cpu")
        ),
        "weighted",
    ),
    "ids without weights": (
        lambda ep, r, y: ep.combine(
            y, r.handle, order="pick", weighted=False, topk_idx=torch.zeros((3, 4), dtype=torch.int64, device="cpu")
        ),
        "topk_idx",
    ),
    "ids of another shape": (
        lambda ep, r, y: ep.combine(
            y,
            r.handle,
            order="pick",
            weights=torch.zeros((3, 4), dtype=torch.float32, device="cpu"),
            topk_idx=torch.zeros((3, 3), dtype=torch.int64, device="cpu"),
        ),
        "topk_idx",
    ),
    "ids that are floats": (
        lambda ep, r, y: ep.combine(
            y,
            r.handle,
            order="pick",
            weights=torch.zeros((3, 4), dtype=torch.float32, device="cpu"),
            topk_idx=torch.zeros((3, 4), dtype=torch.float32, device="cpu"),
        ),
        "topk_idx",
    ),
    "FP8 by pick": (lambda ep, r, y: ep.combine(y, r.handle, order="pick", wire="fp8"), "wire"),
}


def refusals(comm: weft.Communicator) -> None:
    with weft.ExpertParallel(comm, num_experts=8, top_k=4, hidden=32, max_tokens_per_rank=3) as ep:
        x = torch.ones((3, 32), dtype=torch.bfloat16, device="cpu")
        ids = torch.arange(12, dtype=torch.int64, device="cpu").view(3, 4) % 8
        r = ep.dispatch(x, ids, layout="expert_major")
        for name, (call, word) in WRONG.items():
            with pytest.raises(weft.InvalidArgument, match=word):
                call(ep, r, r.x)
            assert name
        by_rank = ep.dispatch(x, ids)
        with pytest.raises(weft.InvalidArgument, match="rank_major"):
            ep.combine(by_rank.x, by_rank.handle, order="pick")
        y = r.x.clone().requires_grad_()
        with pytest.raises(weft.Unsupported, match="weights"):
            ep.combine(y, r.handle, order="pick", weights=torch.ones((3, 4), device="cpu", dtype=torch.float32))
        bias = torch.zeros(32, dtype=torch.bfloat16, device="cpu").requires_grad_()
        weights = torch.ones((3, 4), device="cpu", dtype=torch.float32)
        with pytest.raises(weft.Unsupported, match="weights"):
            ep.combine(r.x, r.handle, bias=bias, order="pick", weights=weights)
        memory = torch.ones((3, 32), dtype=torch.float32, device="cpu")
        with pytest.raises(weft.InvalidArgument, match=r"out lies at .* overlaps weights"):
            ep.combine(
                r.x, r.handle, order="pick", weights=memory.view(-1)[:12].view(3, 4),
                out=memory.view(torch.bfloat16).view(-1)[:96].view(3, 32),
            )  # fmt: skip
        assert torch.equal(ep.combine(r.x, r.handle, weighted=False, order="pick"), 4 * x)
        with pytest.raises(weft.InvalidArgument, match="pick"):  # ranks asked for different orders
            ep.combine(r.x, r.handle, order="pick" if comm.rank else "rank")


def test_what_does_not_go_together_is_refused() -> None:
    weft.spawn(refusals, 2, device="cpu")


def all_for_one(comm: weft.Communicator) -> Tensor:
    """Every pick goes to the last rank, in a compiled call, where rank 0 has no memory of weights of its own rows."""
    with weft.ExpertParallel(comm, num_experts=4, top_k=1, hidden=16, max_tokens_per_rank=5) as ep:
        x = torch.ones((5, 16), dtype=torch.bfloat16, device="cpu")
        ids = torch.full((5, 1), 3, dtype=torch.int64, device="cpu")
        weights = torch.full((5, 1), 0.5, dtype=torch.float32, device="cpu")

        @torch.compile(backend="eager")
        def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            r = ep.dispatch(x, ids, weights, layout="expert_major")
            return ep.combine(r.x, r.handle, order="pick")

        return layer(x, ids, weights)


def test_a_rank_without_rows_knows_the_weights_of_its_tokens() -> None:
    for y in weft.spawn(all_for_one, 2, device="cpu"):
        assert torch.equal(y, torch.full((5, 16), 0.5, dtype=torch.bfloat16, device="cpu"))


def gradients(comm: weft.Communicator) -> None:
    """Those of a sum do not depend on its order."""
    with weft.ExpertParallel(comm, num_experts=4, top_k=2, hidden=16, max_tokens_per_rank=5) as ep:
        found = []
        for order in ("rank", "last_pick", "pick"):
            torch.manual_seed(comm.rank)
            x = torch.randn((5, 16), dtype=torch.float32, device="cpu").bfloat16().requires_grad_()
            weights = torch.rand((5, 2), dtype=torch.float32, device="cpu").requires_grad_()
            ids = torch.randint(4, (5, 2), dtype=torch.int64, device="cpu")
            r = ep.dispatch(x, ids, weights, layout="expert_major")
            y = ep.combine(r.x * 2, r.handle, order=order)
            y.float().square().sum().backward()
            found.append((x.grad, weights.grad))
        for x_grad, weights_grad in found[1:]:
            assert torch.allclose(x_grad.float(), found[0][0].float(), rtol=0.05, atol=0.05)
            assert torch.allclose(weights_grad, found[0][1], rtol=0.05, atol=0.05)


def test_gradients_of_every_order() -> None:
    weft.spawn(gradients, 2, device="cpu")
