"""Checks of what users pass to the constructor of ExpertParallel, on this rank alone: ranks are compared after them.

As in weft/call/check.py every refusal names the argument, the value given and what is allowed.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.call.check_options import check_num_sms
from weft.communicator import Communicator
from weft.errors import InvalidArgument, Unsupported
from weft.kernels.tuning import most_num_sms
from weft.limits import ACCEPTS, DTYPE_BYTES, check_shape, default_heap_bytes

__all__ = ["check_comm", "check_constructor", "check_min_ranks"]


def check_comm(comm: Any) -> None:
    """The argument of ExpertParallel without which there is nobody to tell of a refusal."""
    if not isinstance(comm, Communicator):
        raise InvalidArgument(f"comm is {comm!r}; a weft.Communicator is expected")


def check_constructor(comm: Communicator, dtype: Any, shape: dict[str, Any]) -> None:
    """The other arguments on this rank alone; the comparison between ranks comes after. `shape` has the name of the
    dtype."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype is {dtype!r}; allowed: {', '.join(f'torch.{name}' for name in DTYPE_BYTES)}")
    if shape["deadline_s"] is None:
        raise InvalidArgument(f"deadline_s is None; allowed: {ACCEPTS['deadline_s'].allowed}")
    name = shape["name"]
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidArgument(f"name is {name!r}; allowed are None and a str that is not empty")
    check_shape({"num_ranks": comm.num_ranks, **{key: value for key, value in shape.items() if key != "name"}})
    _check_growth(comm, dtype, shape)
    if comm.engine == "nvlink" and shape["num_logical_experts"] is not None:
        raise Unsupported("num_logical_experts", "the nvlink engine", "the cpu engine, or physical ids in topk_idx")
    has_nodes = 0 < (shape["node_ranks"] or 0) < comm.num_ranks
    if comm.engine == "nvlink":
        _check_num_windows(comm._choice.rank_sms, shape["num_windows"], has_nodes=has_nodes)
        most = most_num_sms(comm.max_num_sms, comm._choice.rank_sms, shape["num_windows"], has_nodes=has_nodes)
        check_num_sms(most, shape["num_windows"], shape["num_sms"])


def check_min_ranks(comm: Communicator, min_ranks: Any, num_experts: Any, num_logical_experts: Any) -> None:
    """Of the constructor; what depends on it is compared between ranks as num_experts."""
    if min_ranks is None:
        return
    if type(min_ranks) is not int or not 1 <= min_ranks <= comm.num_ranks:
        raise InvalidArgument(f"min_ranks is {min_ranks!r}; allowed are None and 1 to num_ranks = {comm.num_ranks}")
    if num_experts is not None or num_logical_experts is None:
        raise InvalidArgument(
            f"min_ranks is {min_ranks}; allowed is None unless num_logical_experts is given and num_experts is not"
        )


def _check_growth(comm: Communicator, dtype: Any, shape: dict[str, Any]) -> None:
    most, least = shape["max_heap_bytes"], shape["heap_bytes"]
    if most is None:
        return
    if comm.engine == "nvlink":
        raise Unsupported("max_heap_bytes", "the nvlink engine", "the cpu engine, or None")
    if least is None:
        sizes = (shape["top_k"], shape["hidden"], shape["max_tokens_per_rank"])
        least = default_heap_bytes(comm.num_ranks, *sizes, dtype)
    if most < least:
        raise InvalidArgument(f"max_heap_bytes is {most}; allowed are None and heap_bytes = {least} or more")


def _check_num_windows(rank_sms: int, num_windows: int, *, has_nodes: bool) -> None:
    """On GPUs."""
    most = rank_sms // (1 + has_nodes)
    needs = "two SMs, one for the network between nodes" if has_nodes else "an SM"
    if num_windows <= most:
        return
    if most == 0:
        raise Unsupported("node_ranks", f"{rank_sms} SM for a rank", "two: fewer ranks on a GPU")
    raise InvalidArgument(
        f"num_windows is {num_windows}; allowed are 1 to {most} here: a call of each may run at once and needs "
        f"{needs}, and ranks that share a GPU share its SMs"
    )
