"""Guards against counts on the host that share memory with each other, or that their owner can't write to."""

from __future__ import annotations

import copy

import torch

from weft.deep_ep.host_counts import HostCounts


def test_every_tensor_is_the_callers_own() -> None:
    """More than a block has, of two lengths in turns; each is written to when the next one is there."""
    made, taken = HostCounts(torch.device("cpu")), []
    for number in range(200):
        counts = [number] * (3 if number % 2 else 5)
        tensor = made.take(counts)
        assert tensor.tolist() == counts
        assert tensor.dtype is torch.int64
        assert tensor.is_contiguous()
        taken.append(tensor)
        taken[number // 2].add_(1000)
    wanted = [number + 1000 * sum(each // 2 == number for each in range(200)) for number in range(200)]
    assert [each[-1].item() for each in taken] == wanted
    assert len({each.data_ptr() for each in taken}) == len(taken)


def test_of_inference_mode_and_a_default_device() -> None:
    """Who takes the first one does not decide what the others are."""
    made = HostCounts(torch.device("cpu"))
    with torch.inference_mode(), torch.device("meta"):
        first = made.take([1, 2])
    first.mul_(3)
    assert first.tolist() == [3, 6]
    assert not first.is_inference()
    assert copy.deepcopy(first).tolist() == [3, 6]
    gone = first.to(torch.float32).requires_grad_()
    (gone * made.take([4, 5])).sum().backward()
    assert gone.grad is not None
    assert gone.grad.tolist() == [4.0, 5.0]
