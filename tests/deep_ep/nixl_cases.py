"""Low-latency steps of buffers whose ranks come and go: every word is compared with Weft's reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft import reference

M, HIDDEN, TOP_K, LOCAL = 8, 256, 3, 2


class Step:
    """One dispatch and its combine, by DeepEP's or NIXL's names. `number`, equal on all ranks, draws what they send;
    picks are among the experts of the first `num_ranks` ranks."""

    def __init__(self, buffer: Any, number: int, num_ranks: int, top_k: int = TOP_K) -> None:
        self.buffer, self.rank = buffer, buffer.rank
        self.num_rows, self.num_experts = num_ranks * M, num_ranks * LOCAL
        self.xs, self.ids, self.weights = [], [], []
        for slot in range(buffer.group_size):
            generator = torch.Generator(device="cpu").manual_seed(1000 * number + slot)
            count = int(torch.randint(0, M + 1, (), generator=generator))
            self.xs.append(torch.randn((count, HIDDEN), generator=generator, device="cpu").to(torch.bfloat16))
            self.ids.append(torch.randint(-1, self.num_experts, (count, top_k), generator=generator, device="cpu"))
            self.weights.append(torch.rand((count, top_k), generator=generator, device="cpu"))

    def dispatch_arguments(self) -> dict[str, Any]:
        return {
            "x": self.xs[self.rank], "topk_idx": self.ids[self.rank], "num_max_dispatch_tokens_per_rank": M,
            "num_experts": self.num_experts, "use_fp8": False,
        }  # fmt: skip

    def check_dispatch(self, results: tuple[Any, ...]) -> None:
        """Against what the ranks that take part now have sent."""
        recv, count, self.handle, _, _ = results
        self.active = self.buffer.comm.active_ranks
        self.wanted = reference.dispatch(
            self.xs, self.ids, num_experts=self.buffer.group_size * LOCAL, layout="masked", capacity=self.num_rows,
            active_ranks=self.active,
        )  # fmt: skip
        mine = self.wanted[self.rank]
        assert torch.equal(count, mine.num_tokens_per_expert)
        assert recv.shape == (LOCAL, self.num_rows, HIDDEN)
        for expert, num_rows in enumerate(count.tolist()):
            assert torch.equal(recv[expert, :num_rows], mine.x[expert, :num_rows])

    def combine_arguments(self) -> dict[str, Any]:
        generator = torch.Generator(device="cpu").manual_seed(5)
        shape = (self.buffer.group_size, LOCAL, self.num_rows, HIDDEN)
        self.outputs = list(torch.randn(shape, generator=generator, device="cpu").to(torch.bfloat16))
        return {
            "x": self.outputs[self.rank], "topk_idx": self.ids[self.rank], "topk_weights": self.weights[self.rank],
            "handle": self.handle,
        }  # fmt: skip

    def check_combine(self, combined: Tensor) -> None:
        used = [torch.where(ids >= 0, each, 0.0) for ids, each in zip(self.ids, self.weights, strict=True)]
        wanted = reference.combine(self.outputs, self.wanted, order="pick", owner_weights=used)
        assert torch.equal(combined, wanted[self.rank])


def run(buffer: Any, number: int, num_ranks: int, top_k: int = TOP_K) -> tuple[int, ...]:
    """A whole step; who took part."""
    step = Step(buffer, number, num_ranks, top_k)
    step.check_dispatch(buffer.low_latency_dispatch(**step.dispatch_arguments()))
    step.check_combine(buffer.low_latency_combine(**step.combine_arguments())[0])
    return step.active
