"""The experts of a step: two grouped GEMMs of real size around a gate, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Experts:
    """SwiGLU experts: [N, H] rows by expert -> [N, H]. Weights are random; their values do not matter here."""

    def __init__(self, num_experts: int, hidden: int, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        def weights(columns: int, rows: int) -> Tensor:
            made = torch.empty((num_experts, columns, rows), device=device, dtype=dtype)
            return made.normal_(std=rows**-0.5)

        self.gate_up, self.down = weights(2 * width, hidden), weights(hidden, width)

    def __call__(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """`offsets` [L + 1] int32 as dispatch gives them: expert e has rows offsets[e] to offsets[e + 1]."""
        gate, up = grouped_mm(rows, self.gate_up, offsets).chunk(2, dim=-1)
        return grouped_mm(functional.silu(gate) * up, self.down, offsets)


def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, in] times weights [L, out, in] of each row's group -> [N, out]; in one grouped GEMM if torch has it."""
    if hasattr(functional, "grouped_mm"):
        product: Tensor = functional.grouped_mm(rows, weights.transpose(-2, -1), offs=offsets[1:])
        return product
    pieces = rows.split(offsets.diff().tolist())
    return torch.cat([piece @ weight.t() for piece, weight in zip(pieces, weights, strict=True)])
