"""Guards against helpers of deep_ep.utils that give other numbers than DeepEP's tests count on."""

from __future__ import annotations

import math as python_math
import os

import pytest
import torch

from weft import reference
from weft.deep_ep.utils import gate, math, refs, semantic, testing
from weft.errors import InvalidArgument


def test_casts_are_those_of_the_reference() -> None:
    generator = torch.Generator(device="cpu").manual_seed(0)
    for rows, columns in ((0, 128), (1, 8), (7, 300), (5, 512)):
        x = torch.randn((rows, columns), generator=generator, dtype=torch.float32, device="cpu").bfloat16() * 30
        data, scales = math.per_token_cast_to_fp8(x)
        wanted, wanted_scales = reference.quantize_fp8(x)
        assert torch.equal(data.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scales, wanted_scales)
        assert torch.equal(math.per_token_cast_back(data, scales), reference.dequantize_fp8(data, scales).bfloat16())
    data, exponents = reference.quantize_fp8(x, ue8m0=True)
    words = exponents.view(torch.uint8).view(torch.int32)
    assert torch.equal(math.per_token_cast_back(data, words), reference.dequantize_fp8(data, words).bfloat16())


def test_small_arithmetic() -> None:
    x = torch.arange(12, dtype=torch.float32, device="cpu").view(3, 4)
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    a, b = x.double() + 1, x.double() + 2
    assert math.calc_diff(x, x + 1) == pytest.approx(float(1 - 2 * (a * b).sum() / (a * a + b * b).sum()))
    assert (math.ceil_div(7, 3), math.align(7, 4), math.safe_div(1, 0), math.safe_div(6, 3)) == (3, 8, 0, 2)
    assert math.count_bytes(x, None, (x, [x])) == 3 * 48
    assert math.hash_tensor(x.to(torch.int32)) == 66
    assert math.hash_tensors(x, None, (x,)) == 0
    ids = torch.tensor([[3, 1, 3, -1], [0, -1, -1, -1], [7, 2, 2, 7]], dtype=torch.int64, device="cpu")
    math.inplace_unique(ids, 4)
    assert ids.tolist() == [[3, 1, -1, -1], [0, -1, -1, -1], [2, -1, -1, -1]]
    scores = torch.ones((2, 6), dtype=torch.float32, device="cpu")
    grouped = math.create_grouped_scores(scores, torch.tensor([[0], [2]], dtype=torch.int64, device="cpu"), 3)
    assert grouped.tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("num_ranks", "num_local", "top_k", "ratio"), [(2, 4, 2, 1.0), (8, 8, 6, 2.0), (16, 4, 4, 4.0)]
)
def test_unbalanced_scores(num_ranks: int, num_local: int, top_k: int, ratio: float) -> None:
    """Rank 0 is sent `ratio` times as many tokens as each other; every pick is of another expert."""
    num_experts, counts = num_ranks * num_local, torch.zeros(num_ranks, dtype=torch.int64, device="cpu")
    for _ in range(num_ranks):
        scores = gate.get_unbalanced_scores(2000, num_experts, num_ranks, top_k, ratio, precise=True)
        ranks = scores.topk(top_k, dim=1).indices // num_local
        counts += torch.stack([(ranks == each).any(1).sum() for each in range(num_ranks)])
    others = counts[1:].double()
    assert abs(counts[0] / others.min() - ratio) / ratio < 0.05
    assert others.max() / others.min() < 1.02
    loose = gate.get_unbalanced_scores(2000, num_experts, num_ranks, top_k, ratio)
    first = (loose.topk(top_k, dim=1).indices < num_local).double().mean()
    assert first >= 0.9 / num_ranks
    with pytest.raises(InvalidArgument, match="ratio"):
        gate.get_unbalanced_scores(4, 2 * 2, 2, 4, 3.0, precise=True)


def test_sums_of_the_oracle() -> None:
    """Ranks by their last lane, each rounded; bias first."""
    y = refs.generate_pre_combine_data(torch.arange(5, dtype=torch.int64, device="cpu"), 16, 4, 8)
    ids = torch.tensor([[0, 3, 1, -1]] * 5, dtype=torch.int64, device="cpu")  # ranks 0, 1, 0
    bias = torch.full((5, 8), 0.125, dtype=torch.bfloat16, device="cpu")
    first = (y[:, 0].float() + y[:, 2].float()).bfloat16().float()
    wanted = (bias.float() + y[:, 1].float() + first).bfloat16()
    assert torch.equal(refs.combine(y, ids, 1, 2, 4, bias), wanted)
    plain = (bias.float() * 2 + y[:, 0].float() + y[:, 1].float() + y[:, 2].float()).bfloat16()
    assert torch.equal(refs.combine(y, ids, 1, 2, 4, (bias, bias), False, False), plain)


def test_timing_on_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    mean, least, most = testing.bench(lambda: calls.append(1), num_warmups=2, num_tests=5)
    assert len(calls) == 7
    assert least <= mean <= most
    found = testing.bench_kineto(lambda: calls.append(1), ("dispatch_impl", "dispatch_copy_epilogue_impl"))
    assert all(python_math.isnan(each) for each in found)
    halves = testing.bench_kineto(lambda: None, "dispatch", num_kernels_per_period=2, suppress_kineto_output=True)
    assert len(halves) == 2
    with testing.suppress_stdout_stderr():
        os.write(1, b"hidden")
    with testing.empty_suppress():
        os.write(1, b"seen")
    assert capfd.readouterr().out == "seen"


def test_kernels_of_the_barrier_are_not_counted() -> None:
    one_call = [("weft::dispatch_kernel", 9.0), ("weft::dispatch_kernel", 1.0), ("weft::combine_kernel", 2.0)]
    assert testing.seconds_of(one_call * 3, "dispatch", 3, 1) == [1.0] * 3
    assert testing.seconds_of(one_call * 3, "combine", 3, 0) == [2.0] * 3
    assert testing.seconds_of([], "combine", 3, 0) == []
    one_is_lost = (one_call * 3)[1:]  # whose the others are is not known
    assert testing.seconds_of(one_is_lost, "dispatch", 3, 1) == []
    assert testing.seconds_of(one_is_lost[:-1], "combine", 3, 0) == [2.0] * 2


def test_caches_of_methods() -> None:
    class Counter:
        calls = 0

        @semantic.weak_lru()
        def double(self, value: int) -> int:
            self.calls += 1
            return 2 * value

    counter = Counter()
    assert [counter.double(3), counter.double(3), counter.double(4)] == [6, 6, 8]
    assert counter.calls == 2
    assert semantic.value_or(None, 4) == 4
    assert semantic.value_or(0, 4) == 0
