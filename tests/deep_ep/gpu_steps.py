"""Steps of a layer through each buffer, which a graph of a GPU may hold: dispatch, identity experts, combine. Each is a
function of device tensors that do not move, and says what it must give."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from host_side import HostHandle
from low_latency_cases import M, check_handle, rows_of, weighted_where_they_are
from torch import Tensor

import deep_ep_cases as cases
import weft
from pool import RankState
from weft import deep_ep, reference
from weft.deep_ep.hybrid_ep_buffer import indices_to_map
from weft.engine import to_host
from weft.limits import adds_by_pick


class Shape(NamedTuple):
    """Of a layer; `most` bounds the tokens of a rank. `is_exact`: the host waits for sizes, where a step has that."""

    num_local: int = 3
    top_k: int = 3
    hidden: int = 512
    tokens: int = 13
    most: int = M
    alignment: int = 4
    dtype: torch.dtype = torch.bfloat16
    id_dtype: torch.dtype = torch.int64
    is_exact: bool = False


USUAL = Shape()


class Inputs(NamedTuple):
    """Of a rank, on its device; `routing_map` and `probs` say what `ids` and `weights` do."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    routing_map: Tensor
    probs: Tensor


class Out(NamedTuple):
    """`check` compares `tensors` once they are there."""

    tensors: tuple[Any, ...]
    check: Callable[[cases.Data, int], None]


Step = Callable[[Inputs], Out]


def make(comm: weft.Communicator, seed: int, shape: Shape = USUAL) -> cases.Data:
    """As many tokens with every seed; in the first one, a token has all of its picks."""
    given = cases.make(
        comm.num_ranks, hidden=shape.hidden, tokens=shape.tokens, top_k=shape.top_k, seed=seed,
        num_local=shape.num_local, dtype=shape.dtype,
    )  # fmt: skip
    for ids in given.ids:
        if seed == 0:
            ids[:1] = torch.arange(shape.top_k, dtype=torch.int64, device="cpu")
    return given


def on_device(comm: weft.Communicator, given: cases.Data, shape: Shape = USUAL) -> Inputs:
    """Of this rank."""
    ids, weights = given.ids[comm.rank], given.weights[comm.rank]
    chosen, probs = indices_to_map(ids, weights, len(ids), given.num_experts)
    assert probs is not None
    ids = ids.to(shape.id_dtype)
    return Inputs(*(each.to(comm.device) for each in (given.xs[comm.rank], ids, weights, chosen, probs)))


def same(found: Tensor, wanted: Tensor, num_rows: int | None = None) -> None:
    """On the device and in host memory."""
    assert torch.equal(to_host(found)[:num_rows].float(), wanted[:num_rows].float())


def low_latency(comm: weft.Communicator, shape: Shape, *, has_hook: bool, is_fp8: bool) -> Step:
    """V1 with few tokens."""
    num_experts, most = comm.num_ranks * shape.num_local, comm.num_ranks * shape.most
    buffer = deep_ep.Buffer(comm, low_latency_mode=True)
    waits = torch.zeros(comm.num_ranks, dtype=torch.int64, device=comm.device)

    def step(given: Inputs) -> Out:
        recv, count, handle, _, hook = buffer.low_latency_dispatch(
            given.x, given.ids, shape.most, num_experts, use_fp8=is_fp8, return_recv_hook=has_hook,
            dispatch_wait_recv_cost_stats=waits,
        )  # fmt: skip
        if has_hook:
            hook()
        rows = (recv[0] if is_fp8 else recv).to(torch.bfloat16)
        y, _, hook = buffer.low_latency_combine(
            rows, given.ids, given.weights, handle, return_recv_hook=has_hook, out=torch.empty_like(given.x)
        )
        if has_hook:
            hook()

        def check(data: cases.Data, rank: int) -> None:
            quantize = "fp8" if is_fp8 else None
            wanted = reference.dispatch(
                data.xs, data.ids, num_experts=num_experts, layout="masked", capacity=most, quantize=quantize
            )
            mine, (here, scales) = wanted[rank], rows_of(recv, shape.hidden)
            counts = mine.num_tokens_per_expert.tolist()
            assert count.tolist() == counts
            outputs = [(each.x.data if is_fp8 else each.x).to(torch.bfloat16) for each in wanted]
            for expert, num_rows in enumerate(counts):
                same(here[expert], outputs[rank][expert], num_rows)
                if scales is not None:
                    same(scales[expert], mine.x.scales[expert], num_rows)
            check_handle(HostHandle(handle), data, rank, hidden=shape.hidden, most=shape.most)
            waited = waits.tolist()
            assert min(waited) == waited[rank] == 0
            used = [torch.where(ids >= 0, w, 0.0) for ids, w in zip(data.ids, data.weights, strict=True)]
            if adds_by_pick(handle.ep, handle.dispatched.handle):
                same(y, reference.combine(outputs, wanted, order="pick", owner_weights=used)[rank])
            else:
                same(y, weighted_where_they_are(data, used, outputs, shape.most)[rank])

        return Out((recv, count, y), check)

    return step


def normal(comm: weft.Communicator, shape: Shape, *, is_async: bool = False) -> Step:
    """V1 with many tokens, in the worst case's room."""
    num_experts, room = comm.num_ranks * shape.num_local, comm.num_ranks * shape.tokens + 3
    buffer = deep_ep.Buffer(comm)
    layout_of = on_device(comm, make(comm, 0, shape), shape)

    def call(given: Inputs, worst: int) -> tuple[Any, ...]:
        per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
            given.ids, num_experts, async_finish=is_async
        )
        event.current_stream_wait()
        previous = deep_ep.Buffer.capture() if is_async else None
        recv, ids, weights, _, handle, event = buffer.dispatch(
            given.x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=given.ids, topk_weights=given.weights, num_worst_tokens=worst, previous_event=previous,
            async_finish=is_async, allocate_on_comm_stream=is_async,
        )  # fmt: skip
        assert (event.event is None) != is_async
        event.current_stream_wait()
        y, lanes, event = buffer.combine(recv, handle, topk_weights=weights, async_finish=is_async)
        event.current_stream_wait()
        return recv, ids, weights, y, lanes

    call(layout_of, 0)  # the windows, whatever T is

    def step(given: Inputs) -> Out:
        found = call(given, 0 if shape.is_exact else room)

        def check(data: cases.Data, rank: int) -> None:
            recv, ids, weights, y, lanes = found
            wanted = reference.dispatch(data.xs, data.ids, data.weights, num_experts=num_experts)
            mine = wanted[rank]
            num_rows = len(mine.x)
            same(recv, mine.x, num_rows)
            same(weights, mine.topk_weights, num_rows)
            assert to_host(ids)[:num_rows].tolist() == mine.topk_idx.tolist()
            assert bool((to_host(ids)[num_rows:] == -1).all())
            same(y, reference.combine([each.x for each in wanted], wanted, weighted=False)[rank])
            same(lanes, torch.where(data.ids[rank] >= 0, data.weights[rank], 0.0))

        return Out(found, check)

    return step


def elastic(comm: weft.Communicator, shape: Shape, *, expands: bool, is_async: bool = False) -> Step:
    """V2 without a wait of the host."""
    num_experts = comm.num_ranks * shape.num_local
    buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=shape.most, hidden=shape.hidden)
    layout: dict[str, Any] = {"layout": "expert_major", "alignment": shape.alignment} if expands else {}

    def step(given: Inputs) -> Out:
        recv, ids, weights, handle, event = buffer.dispatch(
            given.x, given.ids, given.weights, num_experts=num_experts, expert_alignment=shape.alignment,
            do_cpu_sync=shape.is_exact, do_expand=expands, do_zero_padding=expands, async_with_compute_stream=is_async,
        )  # fmt: skip
        assert (event.event is None) != is_async
        event.current_stream_wait()
        y, lanes, event = buffer.combine(recv, handle, weights, async_with_compute_stream=is_async)
        event.current_stream_wait()

        def check(data: cases.Data, rank: int) -> None:
            wanted = reference.dispatch(data.xs, data.ids, data.weights, num_experts=num_experts, **layout)
            mine, num_rows = wanted[rank], int(wanted[rank].num_rows)
            same(recv, mine.x, num_rows)
            same(weights, mine.topk_weights, num_rows)
            assert expands or to_host(ids)[:num_rows].tolist() == mine.topk_idx.tolist()
            sums, sides = reference.combine(
                [each.x for each in wanted], wanted, weighted=False, sides=[each.topk_weights for each in wanted],
                order="last_pick",
            )[rank]  # fmt: skip
            same(y, sums)
            same(lanes, sides)

        return Out((recv, weights, y, lanes), check)

    return step


def hybrid(comm: weft.Communicator, shape: Shape, *, by_map: bool) -> Step:
    """HybridEPBuffer, permuted and non-blocking."""
    num_experts, alignment = comm.num_ranks * shape.num_local, shape.alignment
    buffer = deep_ep.HybridEPBuffer(comm, shape.hidden, shape.most, shape.num_local)
    most = comm.num_ranks * shape.tokens * shape.top_k // alignment * alignment + alignment * num_experts
    room = None if shape.is_exact else most

    def step(given: Inputs) -> Out:
        routing: dict[str, Any] = {"topk_idx": given.ids, "topk_weights": given.weights, "num_of_experts": num_experts}
        if by_map:
            routing = {"routing_map": given.routing_map, "probs": given.probs}
        rows, probs, _, padded, handle = buffer.dispatch_with_permute(
            hidden=given.x, num_permuted_tokens=room, pad_multiple=alignment, non_blocking=room is not None, **routing
        )
        y, dense = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        flag = handle[-1] != 0

        def check(data: cases.Data, rank: int) -> None:
            ids, weights = (data.ids, data.weights) if not by_map else ascending(data)
            wanted = reference.dispatch(
                data.xs, ids, weights, num_experts=num_experts, layout="expert_major", alignment=alignment
            )
            mine, num_rows = wanted[rank], int(wanted[rank].num_rows)
            same(rows, mine.x, num_rows)
            same(probs, mine.topk_weights, num_rows)
            assert not bool(flag)
            assert padded.tolist() == [
                -(-each // alignment) * alignment for each in mine.num_tokens_per_expert.tolist()
            ]
            same(y, reference.combine([each.x for each in wanted], wanted, weighted=False)[rank])
            chosen, all_probs = indices_to_map(data.ids[rank], data.weights[rank], len(data.ids[rank]), num_experts)
            assert all_probs is not None
            same(dense, torch.where(chosen, all_probs, 0.0))

        return Out((rows, probs, padded, y, dense, flag), check)

    return step


def ascending(data: cases.Data) -> tuple[list[Tensor], list[Tensor]]:
    """Ids of a map, with their weights."""
    all_ids, all_weights = [], []
    for ids, weights in zip(data.ids, data.weights, strict=True):
        order = torch.where(ids >= 0, ids, 1 << 40).argsort(dim=1, stable=True)
        all_ids.append(ids.gather(1, order))
        all_weights.append(weights.gather(1, order))
    return all_ids, all_weights


def run_step(state: RankState, name: str) -> None:
    """One of `STEPS` or `ASYNC`, with two routings."""
    comm, is_async = state.comm, name.startswith("async ")
    step = (ASYNC if is_async else STEPS)[name.removeprefix("async ")](comm, USUAL)
    for seed in range(2):
        given = make(comm, seed)
        step(on_device(comm, given)).check(given, comm.rank)


STEPS: dict[str, Callable[[weft.Communicator, Shape], Step]] = {
    "low latency": lambda comm, shape: low_latency(comm, shape, has_hook=False, is_fp8=False),
    "low latency in halves": lambda comm, shape: low_latency(comm, shape, has_hook=True, is_fp8=False),
    "low latency FP8": lambda comm, shape: low_latency(comm, shape, has_hook=True, is_fp8=True),
    "normal": normal,
    "V2 by token": lambda comm, shape: elastic(comm, shape, expands=False),
    "V2 by expert": lambda comm, shape: elastic(comm, shape, expands=True),
    "hybrid": lambda comm, shape: hybrid(comm, shape, by_map=False),
    "hybrid map": lambda comm, shape: hybrid(comm, shape, by_map=True),
}
ASYNC: dict[str, Callable[[weft.Communicator, Shape], Step]] = {
    "normal": lambda comm, shape: normal(comm, shape, is_async=True),
    "V2 by token": lambda comm, shape: elastic(comm, shape, expands=False, is_async=True),
    "V2 by expert": lambda comm, shape: elastic(comm, shape, expands=True, is_async=True),
}


def step_under_a_default_device(state: RankState, name: str) -> None:
    """One on which nothing can be done, so that a tensor of a call without a device of its own is seen."""
    step, given = STEPS[name](state.comm, USUAL), make(state.comm, 0)
    places = on_device(state.comm, given)
    with torch.device("meta"):
        out = step(places)
    out.check(given, state.rank)


def random_steps(state: RankState, given: tuple[int, int]) -> None:
    """(seed, how many) steps of random shapes, equal on all ranks."""
    seed, count = given
    numbers, comm = random.Random(seed), state.comm
    for turn in range(count):
        name = numbers.choice(list(STEPS))
        few = name.startswith("low")
        top_k = numbers.choice([1, 2, 3, 5, 8])
        shape = Shape(
            num_local=-(-top_k // comm.num_ranks) + numbers.randrange(5), top_k=top_k,
            hidden=128 * numbers.randint(1, 6) if "FP8" in name else 8 * numbers.randint(1, 60),
            tokens=(tokens := numbers.randint(0, 60)), most=max(1, tokens + numbers.randrange(40)),
            alignment=numbers.choice([1, 4, 16]),
            dtype=torch.bfloat16 if few or name.startswith("V2") else numbers.choice([torch.bfloat16, torch.float32]),
            id_dtype=numbers.choice([torch.int64, torch.int32]), is_exact=numbers.random() < 0.5,
        )  # fmt: skip
        try:
            step = STEPS[name](comm, shape)
            data = make(comm, seed + turn, shape)
            step(on_device(comm, data, shape)).check(data, comm.rank)
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {turn}: {name}, {shape}: {error!r}") from error


NAMES = [*STEPS, *(f"async {name}" for name in ASYNC)]
