"""Guards against gradients of a weighted combine that are not the reference's: a product rounded twice, a sum too
inexact, results that overwrite what the caller still has."""

import pytest
import torch
from torch import Tensor

import weft
from weft.call.runner import Runner


def calls_of(comm: weft.Communicator) -> Runner:
    ep = weft.ExpertParallel(comm, num_experts=2, top_k=1, hidden=64, max_tokens_per_rank=4)
    return ep.calls


def wanted(rows: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    return (wide * weights.unsqueeze(-1)).to(rows.dtype), (rows.double() * y.double()).sum(-1).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 600), (3, 5, 7168), (1, 8), (0, 64)])
def test_one_pass_gives_the_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with weft.Communicator.from_env(device="cpu") as comm:
        calls = calls_of(comm)
        generator = torch.Generator().manual_seed(3)
        rows, y = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        weights = torch.rand(shape[:-1], generator=generator)
        before = rows.clone()
        grad_y, grad_weights = calls.gradients(rows, y, weights)
        expected = wanted(before, y, weights)
        assert torch.equal(rows, before)
        assert torch.equal(grad_y, expected[0])
        assert grad_weights is not None
        scale = (rows.double().abs() * y.double().abs()).sum(-1).clamp(min=1e-30)
        assert bool(((grad_weights.double() - expected[1].double()).abs() <= 1e-6 * scale).all())
        again, none = calls.gradients(rows, None, weights, in_place=True)
        assert none is None
        assert again.data_ptr() == rows.data_ptr()
        assert torch.equal(again, expected[0])


def test_strides_do_not_matter() -> None:
    with weft.Communicator.from_env(device="cpu") as comm:
        calls = calls_of(comm)
        rows, y = torch.randn(64, 12).mT, torch.randn(64, 12).mT
        weights = torch.rand(12, 2)[:, 0]
        grad_y, grad_weights = calls.gradients(rows, y, weights)
        expected = wanted(rows, y, weights)
        assert torch.equal(grad_y, expected[0])
        assert grad_weights is not None
        torch.testing.assert_close(grad_weights, expected[1], rtol=1e-5, atol=1e-5)


def test_operator() -> None:
    """As torch.compile sees it: shapes of the fake, no input changed."""
    with weft.Communicator.from_env(device="cpu") as comm:
        calls = calls_of(comm)
        rows, y, weights = torch.randn(5, 64), torch.randn(5, 64), torch.rand(5)
        torch.library.opcheck(torch.ops.weft.gradients, (rows, y, weights, calls.tie()))
