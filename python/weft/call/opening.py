"""What an ExpertParallel is made of, together with the other ranks: its windows and the Runner of their calls."""

from __future__ import annotations

from typing import Any

import torch

from weft.call.cpu_calls import CpuCalls
from weft.call.experts import Experts
from weft.call.gpu_calls import GpuCalls
from weft.call.runner import Runner
from weft.call.shape import Shape
from weft.call.window import WindowSpec, released_on_error
from weft.communicator import Communicator
from weft.engine import device_name
from weft.kernels import tables
from weft.kernels.tuning import DEFAULT_NUM_SMS, most_num_sms
from weft.limits import default_heap_bytes, landing_row_bytes, max_row_bytes, most_small_tokens
from weft.log import logger

__all__ = ["opened"]


def opened(comm: Communicator, dtype: torch.dtype, arguments: dict[str, Any]) -> tuple[Runner, Shape]:
    """Of an ExpertParallel with these arguments, which have been checked on this rank. Collective.

    Raises:
        InvalidArgument: an argument differs between ranks; and as `Communicator.open_windows`.
    """
    num_experts, top_k, hidden = (arguments[name] for name in ("num_experts", "top_k", "hidden"))
    max_tokens, num_windows = arguments["max_tokens_per_rank"], arguments["num_windows"]
    num_sms, deadline_s, heap = (arguments[name] for name in ("num_sms", "deadline_s", "heap_bytes"))
    small_tokens = most_small_tokens(max_tokens, arguments["small_tokens"])
    node_ranks = arguments["node_ranks"] or 0
    if node_ranks >= comm.num_ranks:
        node_ranks = 0  # one node
    has_gpu_nodes = node_ranks > 0 and comm.engine == "nvlink"
    if heap is None:
        heap = default_heap_bytes(comm.num_ranks, top_k, hidden, max_tokens, dtype)
    specs = [
        WindowSpec(
            num_experts,
            top_k,
            # A forwarder takes part in as many sums of a token as there are ranks, each of a node's rows.
            max(1, max_tokens, node_ranks if has_gpu_nodes else 0),
            max_row_bytes(hidden),
            heap,
            idx,
            landing_row_bytes(hidden, dtype) if comm.engine == "nvlink" else 0,
            small_tokens if comm.engine == "nvlink" else 0,
            arguments["max_heap_bytes"] or 0,
            node_ranks,
            arguments["traffic_class"] if has_gpu_nodes else None,
        )
        for idx in range(num_windows)
    ]
    windows, numbers, table = comm.open_windows(
        "ExpertParallel", arguments, specs, deadline_s, lambda: _measured_table(comm)
    )
    most_sms = most_num_sms(comm.max_num_sms, comm._choice.rank_sms, num_windows, has_nodes=has_gpu_nodes)
    make = GpuCalls if comm.engine == "nvlink" else CpuCalls
    with released_on_error(windows):
        num_logical = arguments["num_logical_experts"]
        experts = Experts(comm.rank, comm.num_ranks, num_experts, num_logical, comm.active_ranks)
        handed = comm.handed_map(windows[0].serial, numbers[0]) if comm._native.is_open else None
        if handed is not None:
            experts.install(handed)
        sum_domain = node_ranks or arguments["sum_domain"] or 0
        calls = make(comm, windows, numbers, experts, top_k, hidden, dtype, sum_domain)
        calls.has_nodes = node_ranks > 0
        if experts.map is not None:
            comm.note_map(calls)
        return calls, Shape(
            comm, comm.engine, comm.device, dtype, comm.num_ranks, num_experts, experts.num_ids, top_k, hidden,
            max_tokens, num_windows, deadline_s, min(DEFAULT_NUM_SMS, most_sms) if num_sms is None else num_sms,
            num_sms is not None, most_sms,
            small_tokens, node_ranks, tables.from_json(table), calls,
        )  # fmt: skip


def _measured_table(comm: Communicator) -> dict[str, Any]:
    """What rank 0 hands to all: its ranks alone may find another one, or none."""
    name = device_name(comm.device)
    found = tables.find(name, comm.num_ranks)
    logger.debug("tuning table for %s, %d ranks: %s", name, comm.num_ranks, found.source)
    return tables.as_json(found.table)
