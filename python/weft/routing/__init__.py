"""Routing inputs for ``weft bench``, ``weft verify`` and tests: generators, recorded traces and their replay.

Every generator is called on each rank alone and gives that rank's ``topk_idx`` int64 [T, K] and ``topk_weights`` fp32
[T, K] on the CPU, the same for the same seed. Ids do not repeat within a token unless asked for; where fewer than K
experts can be picked the rest is -1 with weight 0; the weights of a token's picks sum to 1. Wrong arguments raise
``InvalidArgument``. Nothing here communicates.
"""

from __future__ import annotations

from weft.routing.generators import GENERATORS, all_to_one, empty_rank, group_limited, make, trace, uniform, zipf
from weft.routing.traces import Trace, TracedDispatch, _finish, _note, _recorders, load_trace, record

__all__ = [
    "GENERATORS",
    "Trace",
    "TracedDispatch",
    "_finish",
    "_note",
    "_recorders",
    "all_to_one",
    "empty_rank",
    "group_limited",
    "load_trace",
    "make",
    "record",
    "trace",
    "uniform",
    "zipf",
]
