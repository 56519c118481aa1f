"""Guards against copies of modules that close or lose the windows of the original, pickles that nobody can load or
that fail with an error that does not say what to do, and a page that is wrong about the memory of results."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import weft


class Layer(nn.Module):
    """A gate and experts that double: what a module that holds an ExpertParallel looks like."""

    def __init__(self, ep: weft.ExpertParallel) -> None:
        super().__init__()
        self.ep = ep
        self.gate = nn.Linear(ep.hidden, ep.num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(self.ep.top_k)
        received = self.ep.dispatch(x, ids, weights, layout="expert_major")
        combined: torch.Tensor = self.ep.combine(received.x * 2, received.handle)
        return combined


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda module: AveragedModel(module).module])
def test_copies_share_the_object_and_outlive_each_other(
    ep: weft.ExpertParallel, copied: Callable[[Layer], Layer]
) -> None:
    layer, x = Layer(ep), torch.randn(5, 16)
    twin = copied(layer)
    assert twin.ep is ep
    torch.testing.assert_close(twin(x), layer(x))
    del twin
    gc.collect()
    layer(x)  # its windows are still there
    assert copied(ep.comm) is ep.comm if copied is not None and copied in (copy.copy, copy.deepcopy) else True


def test_an_average_of_a_layer_follows_its_weights(ep: weft.ExpertParallel) -> None:
    layer = Layer(ep)
    average = AveragedModel(layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        with torch.no_grad():
            layer.gate.weight.add_(1)
        average.update_parameters(layer)
    torch.testing.assert_close(average.module.gate.weight, layer.gate.weight - 0.5)
    average(torch.randn(3, 16))


@pytest.mark.parametrize("save", [pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())])
def test_pickles_are_refused_and_states_are_not(ep: weft.ExpertParallel, save: Callable[[Any], Any]) -> None:
    layer = Layer(ep)
    for thing in (layer, ep, ep.comm):
        with pytest.raises(weft.Unsupported, match=r"pickling a weft\.\w+ is not supported: .*state_dict\(\)"):
            save(thing)
    save(layer.state_dict())


def heap_used(ep: weft.ExpertParallel) -> int:
    used: int = ep.stats()["windows"][0]["heap_used"]
    return used


def test_memory_of_results_goes_back_to_the_heap(ep: weft.ExpertParallel) -> None:
    """As docs/semantics.md says, since torch does not resize what it has not allocated."""
    ids, rows = torch.arange(2).repeat(8, 1), torch.randn(8, 16)
    received = ep.dispatch(rows, ids)
    before, x = heap_used(ep), received.x
    with pytest.raises(RuntimeError, match="not resizable"):
        x.untyped_storage().resize_(0)
    x.data = x.new_empty(0)
    assert heap_used(ep) < before
    mine = ep.dispatch(rows, ids).x.clone()
    assert heap_used(ep) < before
    mine.untyped_storage().resize_(0)
    assert mine.untyped_storage().nbytes() == 0


def test_a_forked_child_shares_results_but_not_copies(ep: weft.ExpertParallel) -> None:
    x = ep.dispatch(torch.zeros(8, 16), torch.arange(2).repeat(8, 1)).x
    copied = x.clone()
    pid = os.fork()
    if pid == 0:
        copied.fill_(1)
        x.fill_(1)
        os._exit(0)
    os.waitpid(pid, 0)
    assert not copied.any()
    assert bool((x == 1).all())
