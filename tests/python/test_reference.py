"""Guards against a wrong specification: weft.reference against hand-made cases, autograd and a table of FP8 codes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from weft import reference
from weft.quantized import Quantized

# Two ranks, four experts (0, 1 on rank 0; 2, 3 on rank 1), K = 3; rank 0 has three tokens, rank 1 has two.
# Every row of x is a constant: 1, 2, 3 on rank 0, 11, 12 on rank 1. Every weight is token value + k / 10.
IDS = [
    torch.tensor([[0, 2, -1], [3, 3, 1], [-1, 9, -7]]),  # the last token names nobody: ids out of range count as -1
    torch.tensor([[2, 0, 1], [1, 3, 0]]),
]
VALUES = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([11.0, 12.0])]
XS = [values[:, None].expand(-1, 8).to(torch.bfloat16) for values in VALUES]
WEIGHTS = [values[:, None] + torch.tensor([0.0, 0.1, 0.2]) for values in VALUES]


def dispatch(layout: str, **options: object) -> list[reference.Dispatched]:
    return reference.dispatch(XS, IDS, WEIGHTS, num_experts=4, layout=layout, **options)  # type: ignore[arg-type]


def column(x: Tensor | Quantized) -> Any:
    assert isinstance(x, Tensor)
    assert bool((x == x[..., :1]).all())
    return x[..., 0].float().tolist()


def close(tensor: Tensor, expected: object) -> bool:
    return torch.allclose(tensor, torch.tensor(expected))


def test_rank_major_rows() -> None:
    first, second = dispatch("rank_major")
    assert column(first.x) == [1, 2, 11, 12]
    assert first.topk_idx is not None
    assert first.topk_idx.tolist() == [[0, -1, -1], [-1, -1, 1], [-1, 0, 1], [1, -1, 0]]
    assert close(first.topk_weights, [[1.0, 0, 0], [0, 0, 2.2], [0, 11.1, 11.2], [12.0, 0, 12.2]])
    assert first.offsets.tolist() == [0, 2, 4]
    assert first.num_tokens_per_expert.tolist() == [3, 3]
    assert column(second.x) == [1, 2, 11, 12]
    assert second.topk_idx is not None
    assert second.topk_idx.tolist() == [[-1, 0, -1], [1, 1, -1], [0, -1, -1], [-1, 1, -1]]
    assert second.num_tokens_per_expert.tolist() == [2, 3]
    assert [int(r.num_rows) for r in (first, second)] == [4, 4]
    assert [int(r.overflow) for r in (first, second)] == [0, 0]


def test_expert_major_rows() -> None:
    first, second = dispatch("expert_major")
    assert first.topk_idx is None
    assert column(first.x) == [1, 11, 12, 2, 11, 12]
    assert close(first.topk_weights, [1.0, 11.1, 12.2, 2.2, 11.2, 12.0])
    assert first.offsets.tolist() == [0, 3, 6]
    assert column(second.x) == [1, 11, 2, 2, 12]
    assert close(second.topk_weights, [1.1, 11.0, 2.0, 2.1, 12.1])
    assert second.offsets.tolist() == [0, 2, 5]


def test_expert_major_alignment_pads_every_group_with_zeros() -> None:
    first, second = dispatch("expert_major", alignment=4)
    assert column(first.x) == [1, 11, 12, 0, 2, 11, 12, 0]
    assert close(first.topk_weights, [1.0, 11.1, 12.2, 0, 2.2, 11.2, 12.0, 0])
    assert first.offsets.tolist() == [0, 4, 8]
    assert int(first.num_rows) == 8
    assert column(second.x) == [1, 11, 0, 0, 2, 2, 12, 0]
    assert second.num_tokens_per_expert.tolist() == [2, 3]


def test_masked_rows() -> None:
    first, second = dispatch("masked", capacity=2)
    assert column(first.x) == [[1, 11], [2, 11]]
    assert first.num_tokens_per_expert.tolist() == [2, 2]
    assert first.offsets.tolist() == [0, 2, 4]
    assert (int(first.num_rows), int(first.overflow)) == (4, 2)
    assert column(second.x) == [[1, 11], [2, 2]]
    assert close(second.topk_weights, [[1.1, 11.0], [2.0, 2.1]])
    assert int(second.overflow) == 1


def test_rank_major_capacity_drops_whole_rows() -> None:
    first, _ = dispatch("rank_major", capacity=3)
    assert column(first.x) == [1, 2, 11]
    assert first.offsets.tolist() == [0, 2, 3]
    assert first.num_tokens_per_expert.tolist() == [2, 2]
    assert (int(first.num_rows), int(first.overflow)) == (3, 2)
    exact, _ = dispatch("rank_major", capacity=4)
    assert int(exact.overflow) == 0


def test_expert_major_capacity_counts_padding_and_drops_picks() -> None:
    first, _ = dispatch("expert_major", alignment=4, capacity=5)
    assert column(first.x) == [1, 11, 12, 0, 2]
    assert first.offsets.tolist() == [0, 4, 5]
    assert first.num_tokens_per_expert.tolist() == [3, 1]
    assert (int(first.num_rows), int(first.overflow)) == (5, 2)
    tiny, _ = dispatch("expert_major", alignment=4, capacity=2)
    assert tiny.offsets.tolist() == [0, 2, 2]
    assert tiny.num_tokens_per_expert.tolist() == [2, 0]


def test_capacity_beyond_need_leaves_num_rows_true() -> None:
    first, _ = dispatch("rank_major", capacity=9)
    assert isinstance(first.x, Tensor)
    assert first.x.shape == (9, 8)
    assert int(first.num_rows) == 4


def test_no_weights_are_ones_where_a_pick_is() -> None:
    (r, _) = reference.dispatch(XS, IDS, num_experts=4)
    assert r.topk_weights.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 1], [1, 0, 1]]
    (r, _) = reference.dispatch(XS, IDS, num_experts=4, layout="expert_major", alignment=4)
    assert r.topk_weights.tolist() == [1, 1, 1, 0, 1, 1, 1, 0]


def test_combine_rank_major_sums_rows_and_ignores_weighted() -> None:
    r = dispatch("rank_major")
    outputs = [torch.full((4, 8), 1.0) * torch.arange(1, 5)[:, None], torch.full((4, 8), 100.0)]
    for weighted in (False, True):
        ys = reference.combine(outputs, r, weighted=weighted)
        assert column(ys[0]) == [101, 102, 0]
        assert column(ys[1]) == [103, 104]


@pytest.mark.parametrize(("layout", "options"), [("expert_major", {"alignment": 4}), ("masked", {"capacity": 3})])
def test_combine_per_pick_sums_weighted_picks(layout: str, options: dict[str, int]) -> None:
    r = dispatch(layout, **options)
    outputs = [d.x.float() for d in r if isinstance(d.x, Tensor)]
    plain = reference.combine(outputs, r, weighted=False)
    assert column(plain[0]) == [2, 6, 0]
    assert column(plain[1]) == [33, 36]
    weighted = reference.combine(outputs, r)
    assert close(weighted[0][:, 0], [1.0 * 1 + 1.1 * 1, 2 * 2 + 2.1 * 2 + 2.2 * 2, 0])
    assert close(weighted[1][:, 0], [11 * (11 + 11.1 + 11.2), 12 * (12 + 12.1 + 12.2)])


def test_combine_treats_dropped_picks_as_absent() -> None:
    r = dispatch(
        "masked", capacity=2
    )  # expert 0 drops rank 1's second token, expert 1 too, expert 3 too: nothing is left of it
    ys = reference.combine([d.x.float() for d in r if isinstance(d.x, Tensor)], r, weighted=False)
    assert column(ys[0]) == [2, 6, 0]
    assert column(ys[1]) == [33, 0]


def test_combine_adds_bias_once_and_after_the_ranks() -> None:
    r = dispatch("rank_major")
    outputs = [torch.full((4, 8), 1.0, dtype=torch.bfloat16), torch.full((4, 8), 2.0, dtype=torch.bfloat16)]
    ys = reference.combine(outputs, r, biases=[torch.arange(3.0)[:, None].expand(3, 8), torch.full((8,), 0.5)])
    assert column(ys[0]) == [3, 4, 2]
    assert column(ys[1]) == [3.5, 3.5]


def test_combine_rounds_each_rank_to_the_wire_type_then_once_at_the_owner() -> None:
    # Two picks on rank 0 give 1 + 2**-8, a tie in bf16: it rounds to 1 on the wire. Rank 1 adds 2**-8: exactly between
    # 1 and 1 + 2**-7 again, so y is 1. Summing all in fp32 would give 1 + 2**-7.
    small = 2.0**-8
    ids = [torch.tensor([[0, 0, 1]]), torch.empty((0, 3), dtype=torch.int64)]
    xs = [torch.zeros((1, 8), dtype=torch.bfloat16), torch.zeros((0, 8), dtype=torch.bfloat16)]
    r = reference.dispatch(xs, ids, num_experts=2, layout="expert_major")
    outputs = [
        torch.tensor([[1.0], [small]]).expand(2, 8).to(torch.bfloat16),
        torch.full((1, 8), small).to(torch.bfloat16),
    ]
    assert column(reference.combine(outputs, r, weighted=False)[0]) == [1.0]
    assert column(reference.combine([o.float() for o in outputs], r, weighted=False)[0]) == [1.0 + 2 * small]


def test_combine_rounds_products_before_adding() -> None:
    # (1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: a fused multiply-add keeps the last term when -1 - 2**-11 is added.
    value = 1 + 2.0**-12
    ids, xs = [torch.tensor([[0, 0]])], [torch.zeros((1, 8))]
    weights = [torch.tensor([[1.0, value]])]
    r = reference.dispatch(xs, ids, weights, num_experts=1, layout="expert_major")
    outputs = [torch.tensor([[-1 - 2.0**-11], [value]]).expand(2, 8).contiguous()]
    assert column(reference.combine(outputs, r)[0]) == [0.0]


def test_sums_start_at_plus_zero() -> None:
    r = reference.dispatch([torch.zeros((1, 8))], [torch.tensor([[0]])], num_experts=1)
    (y,) = reference.combine([torch.full((1, 8), -0.0)], r)
    assert math.copysign(1, float(y[0, 0])) == 1


def test_subnormals_are_not_flushed() -> None:
    tiny = 2.0**-149
    r = reference.dispatch([torch.full((1, 8), tiny)], [torch.tensor([[0, 0]])], num_experts=1, layout="expert_major")
    (y,) = reference.combine([d.x for d in r if isinstance(d.x, Tensor)], r)
    assert float(y[0, 0]) == 2 * tiny


@pytest.mark.parametrize(
    ("layout", "options"), [("rank_major", {}), ("expert_major", {"alignment": 4}), ("masked", {"capacity": 3})]
)
def test_side_comes_back_per_pick(layout: str, options: dict[str, int]) -> None:
    r = dispatch(layout, **options)
    outputs = [d.x for d in r if isinstance(d.x, Tensor)]
    pairs = reference.combine(outputs, r, sides=[d.topk_weights for d in r])
    for (_, side), weights, ids in zip(pairs, WEIGHTS, IDS, strict=True):
        assert torch.equal(side, torch.where((ids >= 0) & (ids < 4), weights, 0.0))


def test_side_of_a_row_counts_for_all_its_picks() -> None:
    r = dispatch("rank_major")
    outputs = [d.x for d in r if isinstance(d.x, Tensor)]
    (_, side), _ = reference.combine(outputs, r, sides=[torch.arange(1.0, 5), torch.arange(11.0, 15)])
    assert side.tolist() == [[1, 11, 0], [12, 12, 2], [0, 0, 0]]


def test_lost_ranks_send_and_receive_nothing() -> None:
    r = dispatch("rank_major", active_ranks=[1])
    assert column(r[1].x) == [11, 12]
    assert r[1].offsets.tolist() == [0, 0, 2]
    assert int(r[0].num_rows) == 0
    ys = reference.combine([d.x for d in r if isinstance(d.x, Tensor)], r)
    assert column(ys[1]) == [11, 12]
    assert len(ys[0]) == 0


def test_no_tokens_anywhere() -> None:
    xs = [torch.zeros((0, 16), dtype=torch.bfloat16)] * 2
    ids = [torch.zeros((0, 3), dtype=torch.int32)] * 2
    for layout, capacity in (("rank_major", None), ("expert_major", None), ("masked", 4)):
        for quantize in (None, "fp8", "fp8_ue8m0", "fp8_pow2"):
            r = reference.dispatch(xs, ids, num_experts=4, layout=layout, capacity=capacity, quantize=quantize)
            assert [int(d.num_rows) for d in r] == [0, 0]
    assert reference.combine([torch.zeros((2, 4, 16))] * 2, r)[0].shape == (0, 16)


def test_opaque_bytes_and_side_data_pass_unchanged() -> None:
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 256, (len(ids), 48), generator=generator, dtype=torch.uint8) for ids in IDS]
    scales = [torch.randint(-9, 9, (len(ids), 3), generator=generator, dtype=torch.int16) for ids in IDS]
    rows = [Quantized(d, s) for d, s in zip(data, scales, strict=True)]
    first, _ = reference.dispatch(rows, IDS, num_experts=4, layout="expert_major", alignment=4)
    assert isinstance(first.x, Quantized)
    assert first.x.scales is not None
    assert torch.equal(first.x.data[[0, 1, 2, 4]], torch.stack([data[0][0], data[1][0], data[1][1], data[0][1]]))
    assert torch.equal(
        first.x.scales[[0, 1, 2, 4]], torch.stack([scales[0][0], scales[1][0], scales[1][1], scales[0][1]])
    )
    assert not first.x.data[3].any()
    assert not first.x.scales[3].any()
    bare, _ = reference.dispatch([Quantized(d) for d in data], IDS, num_experts=4)
    assert isinstance(bare.x, Quantized)
    assert bare.x.scales is None


def test_ids_keep_their_type() -> None:
    first, _ = reference.dispatch(XS, [ids.to(torch.int32) for ids in IDS], num_experts=4)
    assert first.topk_idx is not None
    assert first.topk_idx.dtype == torch.int32


# ---- gradients against autograd of a float version ----


def float_moe(xs: list[Tensor], weights: list[Tensor], factor: Tensor) -> Tensor:
    """Plain torch: y[t] = sum over valid picks of w * factor[e] * x, for autograd."""
    out = []
    for x, w, ids in zip(xs, weights, IDS, strict=True):
        valid = (ids >= 0) & (ids < 4)
        scale = torch.where(valid, w * factor[ids.clamp(0, 3)], 0.0).sum(1)
        out.append(scale[:, None] * x)
    return torch.cat(out)


@pytest.mark.parametrize(
    ("layout", "options"), [("rank_major", {}), ("expert_major", {"alignment": 4}), ("masked", {"capacity": 3})]
)
def test_gradients_agree_with_autograd(layout: str, options: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    xs = [torch.randn((len(ids), 8), generator=generator).requires_grad_() for ids in IDS]
    weights = [torch.rand(ids.shape, generator=generator).requires_grad_() for ids in IDS]
    grad_y = torch.randn((5, 8), generator=generator)
    factor = torch.tensor([1.0, -2.0, 3.0, 0.5])
    float_moe(xs, weights, factor).backward(grad_y)

    r = reference.dispatch(xs, IDS, weights, num_experts=4, layout=layout, **options)  # type: ignore[arg-type]
    rows = [d.x for d in r if isinstance(d.x, Tensor)]
    scales = [row_scale(d, factor[2 * rank : 2 * rank + 2]) for rank, d in enumerate(r)]
    outputs = [scale[..., None] * x for scale, x in zip(scales, rows, strict=True)]
    ys = torch.cat(reference.combine(outputs, r))
    assert torch.allclose(ys, float_moe(xs, weights, factor), atol=1e-5)

    grads = reference.combine_backward(list(torch.split(grad_y, [3, 2])), outputs, r)
    grad_rows = [scale[..., None] * g for scale, g in zip(scales, grads.outputs, strict=True)]
    grad_weights = grads.weights
    if layout == "rank_major":  # the experts applied the weights, so their gradients come from the experts
        assert all(not g.any() for g in grads.weights)
        grad_weights = [
            torch.where(
                d.topk_idx >= 0,
                (g * x).sum(1, keepdim=True) * factor[2 * rank : 2 * rank + 2][d.topk_idx.clamp(min=0)],
                0.0,
            )
            for rank, (d, g, x) in enumerate(zip(r, grads.outputs, rows, strict=True))
            if d.topk_idx is not None
        ]
    grad_x, grad_w = reference.dispatch_backward(grad_rows, r, grad_weights)
    for got, x in zip(grad_x, xs, strict=True):
        assert x.grad is not None
        assert torch.allclose(got, x.grad, rtol=1e-4, atol=1e-5)
    for got, w in zip(grad_w, weights, strict=True):
        assert w.grad is not None
        assert torch.allclose(got, w.grad, rtol=1e-4, atol=1e-5)


def row_scale(d: reference.Dispatched, factor: Tensor) -> Tensor:
    """What the experts multiply a row with."""
    if d.routing.layout == "rank_major":
        assert d.topk_idx is not None
        return torch.where(d.topk_idx >= 0, d.topk_weights * factor[d.topk_idx.clamp(min=0)], 0.0).sum(1)
    if d.routing.layout == "masked":
        return factor[:, None].expand(-1, 3)
    return factor.repeat_interleave(d.offsets.diff().long())


def test_gradient_of_side_goes_back_to_its_row() -> None:
    r = dispatch("expert_major", alignment=4)
    outputs = [torch.zeros((8, 8))] * 2
    grad_ys = [torch.zeros((3, 8)), torch.zeros((2, 8))]
    grads = reference.combine_backward(grad_ys, outputs, r, grad_sides=WEIGHTS)
    assert grads.sides is not None
    assert all(torch.equal(g, d.topk_weights) for g, d in zip(grads.sides, r, strict=True))


def test_quantised_dispatch_is_dispatch_of_the_quantised() -> None:
    xs = [torch.randn((len(ids), 144), generator=torch.Generator().manual_seed(5)) for ids in IDS]
    for name in ("fp8", "fp8_ue8m0", "fp8_pow2"):
        rows = [Quantized(*reference.quantize_fp8(x, ue8m0=name == "fp8_ue8m0", pow2=name == "fp8_pow2")) for x in xs]
        for one, two in zip(
            reference.dispatch(xs, IDS, num_experts=4, quantize=name),
            reference.dispatch(rows, IDS, num_experts=4),
            strict=True,
        ):
            assert isinstance(one.x, Quantized)
            assert isinstance(two.x, Quantized)
            assert one.x.scales is not None
            assert two.x.scales is not None
            assert torch.equal(one.x.data.view(torch.uint8), two.x.data.view(torch.uint8))
            assert torch.equal(one.x.scales.float(), two.x.scales.float())
