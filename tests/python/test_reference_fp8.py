"""Guards against wrong FP8 bits: weft.reference against a table made from the definition of E4M3 (OCP 8-bit floats)."""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch

from weft import reference


def code_value(code: int) -> Fraction | None:
    """Value of an e4m3fn code, None for NaN."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    magnitude = (
        Fraction(mantissa, 8) / 2**6 if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -magnitude if sign else magnitude


POSITIVE = [value for code in range(127) if (value := code_value(code)) is not None]  # by code, ascending


def round_by_table(value: float) -> int:
    """e4m3 code of an fp32 value: nearest, ties to the even code, saturating; NaN is 0x7f."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    if math.isinf(value):
        return sign | 126
    magnitude = abs(Fraction(value))

    above = bisect.bisect_left(POSITIVE, magnitude)  # the first code that is not smaller
    near = [code for code in (above - 1, above) if 0 <= code <= 126]
    return sign | min(near, key=lambda code: (abs(POSITIVE[code] - magnitude), code & 1))


def fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def e4m3_inputs() -> Any:
    """Every value, every midpoint, and the fp32 neighbours of both."""
    values = [float(v) for code in range(256) if (v := code_value(code)) is not None]
    magnitudes = sorted({abs(v) for v in values})
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(magnitudes)]
    exact = torch.tensor(magnitudes + midpoints, dtype=torch.float32)
    infinity = torch.tensor(math.inf)
    around = torch.cat([exact, torch.nextafter(exact, infinity), torch.nextafter(exact, -infinity)])
    around = around[(around.abs() <= 448)]
    return torch.cat([around, -around]).tolist()


def test_all_codes_and_midpoints_round_to_nearest_even() -> None:
    inputs = e4m3_inputs()
    groups = torch.zeros((math.ceil(len(inputs) / 127), 128))
    groups[:, 127] = 448.0  # amax 448: scale 1, so that q is e4m3(x)
    flat = torch.zeros(groups.shape[0] * 127)
    flat[: len(inputs)] = torch.tensor(inputs)
    groups[:, :127] = flat.view(-1, 127)
    for ue8m0 in (False, True):
        data, scales = reference.quantize_fp8(groups, ue8m0=ue8m0)
        assert bool((scales.float() == 1).all())
        got = data[:, :127].reshape(-1).view(torch.uint8)[: len(inputs)].tolist()
        assert got == [round_by_table(value) for value in inputs]


def quantize_by_table(values: list[float], ue8m0: bool) -> tuple[list[int], int | float]:
    """One group, step by step in fp32, by an independent way: Python floats rounded by struct, and the table."""
    amax = max(max(abs(v) for v in values), fp32(1e-4))
    if ue8m0:
        exponent = math.ceil(math.log2(fp32(amax / 448)) - 1e-9)
        while Fraction(2) ** exponent < Fraction(fp32(amax / 448)):
            exponent += 1
        return [round_by_table(v * 2.0**-exponent) for v in values], exponent + 127
    inverse = fp32(448 / amax)
    return [round_by_table(fp32(v * inverse)) for v in values], fp32(amax / 448)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("magnitude", [1e-6, 1e-4, 1.0, 448.0, 1e4])
def test_random_groups_agree_with_the_table(magnitude: float, dtype: torch.dtype, ue8m0: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn((2, 176), generator=generator) * magnitude).to(dtype)  # the second group has 48
    data, scales = reference.quantize_fp8(x, ue8m0=ue8m0)
    assert data.shape == (2, 176)
    assert data.is_contiguous()
    assert scales.shape == (2, 2)
    for row in range(2):
        for group, part in enumerate((slice(0, 128), slice(128, 176))):
            codes, scale = quantize_by_table(x[row, part].float().tolist(), ue8m0)
            assert data[row, part].view(torch.uint8).tolist() == codes
            stored = scales[row, group]
            assert (int(stored.view(torch.uint8)) if ue8m0 else float(stored)) == scale


def test_zeros_take_the_smallest_scale() -> None:
    data, scales = reference.quantize_fp8(torch.zeros((1, 16)))
    assert float(scales) == fp32(fp32(1e-4) / 448)
    assert data.view(torch.uint8).tolist() == [[0] * 16]
    _, byte = reference.quantize_fp8(torch.zeros((1, 16)), ue8m0=True)
    assert int(byte.view(torch.uint8)) == 105  # 2**-22 >= 1e-4 / 448 > 2**-23


def test_ue8m0_powers_of_two_are_not_raised() -> None:
    x = torch.zeros((4, 16))
    x[:, 0] = torch.tensor([448.0, 449.0, 224.0, 447.0])
    _, scales = reference.quantize_fp8(x, ue8m0=True)
    assert scales.view(torch.uint8).flatten().tolist() == [127, 128, 126, 127]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_powers_of_two_are_the_scales_of_ue8m0(dtype: torch.dtype) -> None:
    """The same codes; scales that are fp32 with no mantissa, or the quiet NaN that the engines write."""
    x = torch.randn((64, 176), generator=torch.Generator().manual_seed(6))
    x *= torch.logspace(-6, 4, 64)[:, None]
    x[0, 3], x[1, 130], x[2, 0], x[3] = math.nan, math.inf, -math.inf, 0.0
    data, bytes_ = reference.quantize_fp8(x.to(dtype), ue8m0=True)
    same, scales = reference.quantize_fp8(x.to(dtype), pow2=True)
    assert torch.equal(same.view(torch.uint8), data.view(torch.uint8))
    assert scales.dtype == torch.float32
    exponents = bytes_.view(torch.uint8).to(torch.int32)
    assert sorted((exponents == 255).nonzero().tolist()) == [[0, 0], [1, 1], [2, 0]]
    assert torch.equal(scales.view(torch.int32), torch.where(exponents == 255, 0x7FC00000, exponents << 23))


def test_nan_makes_its_group_nan_only() -> None:
    x = torch.ones((1, 256))
    x[0, 5] = math.nan
    for ue8m0 in (False, True):
        data, scales = reference.quantize_fp8(x, ue8m0=ue8m0)
        assert bool(data.float()[0, :128].isnan().all())
        assert bool(scales.float()[0, 0].isnan())
        assert not data.float()[0, 128:].isnan().any()
    assert int(scales.view(torch.uint8)[0, 0]) == 255


def test_infinity() -> None:
    x = torch.ones((1, 128))
    x[0, 0], x[0, 1] = math.inf, -1.0
    data, scales = reference.quantize_fp8(x)
    assert float(scales) == math.inf
    assert bool(data.float()[0, 0].isnan())
    assert data.view(torch.uint8)[0, 1:3].tolist() == [0x80, 0]
    data, scales = reference.quantize_fp8(x, ue8m0=True)
    assert int(scales.view(torch.uint8)) == 255
    assert bool(data.float().isnan().all())


def test_subnormal_inputs_and_largest_inputs() -> None:
    x = torch.full((1, 128), 2.0**-149)
    data, _ = reference.quantize_fp8(x)
    assert not data.view(torch.uint8).any()
    largest = torch.full((1, 128), torch.finfo(torch.float32).max / 2)
    for ue8m0 in (False, True):
        data, scales = reference.quantize_fp8(largest, ue8m0=ue8m0)
        assert not data.float().isnan().any()
        back = reference.dequantize_fp8(data, scales)
        assert bool(((back - largest).abs() <= largest / 16).all())


def test_dequantize_is_within_half_a_step() -> None:
    x = torch.randn((5, 200), generator=torch.Generator().manual_seed(4))
    for ue8m0 in (False, True):
        back = reference.dequantize_fp8(*reference.quantize_fp8(x, ue8m0=ue8m0))
        assert back.shape == x.shape
        assert bool(((back - x).abs() <= x.abs() / 16 + 1e-3 * (2 if ue8m0 else 1) * 4).all())


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 3e4, 1e38])
def test_what_travels_as_fp8_in_combine(magnitude: float) -> None:
    """Within the error that docs/semantics.md states; products of codes and scales are finite."""
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn((3, 300), generator=generator) * magnitude).clamp(-3.3e38, 3.3e38)
    x[1, :4] = torch.tensor([3.4e38, -3.4e38, 1.0, -0.0])
    routing = reference.dispatch([x], [torch.zeros((3, 1), dtype=torch.int64)], num_experts=1)[0].routing
    (back,) = reference.combine([x], routing, wire="fp8")
    assert bool(back.isfinite().all())
    groups = torch.nn.functional.pad(x.double(), (0, 84)).view(3, 3, 128).abs().amax(-1).clamp(min=1e-4)
    amax = groups.repeat_interleave(128, dim=-1)[:, :300]
    error, limit = (back.double() - x.double()).abs(), torch.maximum(x.double().abs() / 16, amax / 229376)
    most = 448 * 2.0**119
    assert bool((error <= limit)[x.abs() <= most].all())
    assert back[1, 0] == most
    x[2, 150] = math.inf
    (back,) = reference.combine([x], routing, wire="fp8")
    assert bool(back[2, 128:256].isnan().all())
    assert not back[2, :128].isnan().any()
