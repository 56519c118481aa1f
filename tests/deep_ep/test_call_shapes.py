"""Guards against calls in the shapes in which serving frameworks make them: arguments by name and by position, events
handed on, two micro-batches that take turns."""

from __future__ import annotations

from shape_cases import elastic, throughput, two_micro_batches

import weft
from weft import deep_ep


def test_throughput() -> None:
    """With another default of num_sms, of all buffers."""
    assert deep_ep.Buffer.num_sms == 20
    deep_ep.Buffer.set_num_sms(24)
    try:
        weft.spawn(throughput, 3, device="cpu")
    finally:
        deep_ep.Buffer.set_num_sms(20)


def test_two_micro_batches() -> None:
    weft.spawn(two_micro_batches, 3, device="cpu")


def test_elastic() -> None:
    weft.spawn(elastic, 3, device="cpu")
