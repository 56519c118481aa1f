"""Guards against floats that travel along a handle to the wrong rows, or change the rows that they travel beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import reference

EXPERTS, TOP_K, HIDDEN, MOST = 12, 3, 48, 16
LAYOUTS: tuple[dict[str, Any], ...] = (
    {}, {"capacity": 9}, {"layout": "expert_major"}, {"layout": "expert_major", "alignment": 4, "capacity": 40},
    {"layout": "masked", "capacity": 5},
)  # fmt: skip


def checked_side(comm: weft.Communicator) -> None:
    """Against the reference, bit for bit, of every layout and both kinds of kernels; beside bf16 and FP8 rows."""
    generator = torch.Generator(device="cpu").manual_seed(4)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    tokens = [(16, 0, 7, 11)[rank % 4] for rank in range(comm.num_ranks)]
    xs = [torch.randn((n, HIDDEN), **draw).bfloat16() for n in tokens]
    ids = [torch.randint(-1, EXPERTS, (n, TOP_K), generator=generator, device="cpu") for n in tokens]
    me, device = comm.rank, comm.device
    with weft.ExpertParallel(comm, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=MOST) as ep:
        for options in LAYOUTS:
            wanted = reference.dispatch(xs, ids, num_experts=EXPERTS, **options)
            routing, mine = wanted[0].routing, wanted[me]
            has_row = (routing.rows[me] >= 0).any(1)
            for mode in ("throughput", "latency"):
                r = ep.dispatch(xs[me].to(device), ids[me].to(device), mode=mode, **options)
                assert r.side is None
                sides = [torch.randn((n, TOP_K), **draw) for n in tokens]
                other = [torch.randn((n, HIDDEN), **draw).bfloat16() for n in tokens]
                again = ep.dispatch(other[me].to(device), handle=r.handle, side=sides[me].to(device), mode=mode)
                want = reference.repeat_side(sides, routing)[me]
                assert same(again.side, want, mine, options), (mode, options)
                rows = reference.repeat_dispatch(other, routing)[me]
                assert isinstance(again.x, Tensor)
                assert isinstance(rows, Tensor)
                places = routing.rows[me][has_row].amax(1)
                assert torch.equal(again.x.cpu().view(-1, HIDDEN)[places], rows.view(-1, HIDDEN)[places])
                codes = [(8 * each.float()).to(torch.int8) for each in other]
                scales = [torch.randn((n, 2), **draw) for n in tokens]
                sent = weft.Quantized(codes[me].to(device), scales[me].to(device))
                again = ep.dispatch(sent, handle=r.handle, side=sides[me].bfloat16().to(device), mode=mode)
                want = reference.repeat_side([each.bfloat16() for each in sides], routing)[me]
                assert same(again.side, want, mine, options), (mode, options)
                given = [weft.Quantized(code, scale) for code, scale in zip(codes, scales, strict=True)]
                found, rows = again.x, reference.repeat_dispatch(given, routing)[me]
                assert isinstance(found, weft.Quantized)
                assert isinstance(rows, weft.Quantized)
                for seen, each in ((found.data, rows.data), (found.scales, rows.scales)):
                    assert seen is not None
                    assert each is not None
                    assert seen.dtype == each.dtype
                    assert torch.equal(
                        seen.cpu().view(-1, seen.shape[-1])[places], each.view(-1, each.shape[-1])[places]
                    )


def same(side: Tensor | None, want: Tensor, mine: reference.Dispatched, options: dict[str, Any]) -> bool:
    """Whether all that has a place is as wanted, the tail behind num_rows aside."""
    assert side is not None
    end = int(mine.num_rows) if options.get("layout") != "masked" else len(want)
    return torch.equal(side.cpu()[:end], want[:end])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_side(num_ranks: int) -> None:
    weft.spawn(checked_side, num_ranks, device="cpu", isolation="thread")


def test_refusals() -> None:
    def work(comm: weft.Communicator) -> None:
        x = torch.zeros((2, HIDDEN), dtype=torch.bfloat16, device="cpu")
        ids = torch.zeros((2, TOP_K), dtype=torch.int64, device="cpu")
        side = torch.zeros((2, TOP_K), dtype=torch.float32, device="cpu")
        with weft.ExpertParallel(comm, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=MOST) as ep:
            handle = ep.dispatch(x, ids).handle
            for options, error, text in (
                ({"topk_idx": ids}, weft.InvalidArgument, "side is given without a handle"),
                ({"handle": handle, "quantize": "fp8"}, weft.InvalidArgument, "side with quantize"),
                ({"handle": handle, "side": side[:1]}, weft.InvalidArgument, r"side has shape \[1, 3\]; allowed"),
                ({"handle": handle, "side": side.double()}, weft.InvalidArgument, "side has dtype torch.float64"),
                ({"handle": handle, "side": side.requires_grad_()}, weft.Unsupported, "side= of dispatch with gradi"),
            ):  # fmt: skip
                with pytest.raises(error, match=text):
                    ep.dispatch(x, **({"side": side.detach()} | options))
            with pytest.raises(weft.InvalidArgument, match=r"x is \[1, 48\]; allowed beside side is \[2, ...\]"):
                ep.dispatch(x[:1], handle=handle, side=side.detach())
            with pytest.raises(weft.InvalidArgument, match="x has rows of 204 bytes, scales included"):
                ep.dispatch(x.float(), handle=handle, side=side.detach())

    weft.spawn(work, 1, device="cpu", isolation="thread")
