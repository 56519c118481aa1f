"""Random cases for test_property: what hypothesis draws, the tensors made from it, what a rank does, and the
comparison.
"""
# check: allow file-size: what a case is and what is expected of it, read together

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import weft
from pool import RankState
from weft import Quantized, reference

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# "nvfp4" too, in a test of its own.
ROWS = ("plain", "fp8", "fp8_ue8m0", "fp8_pow2", "quantized_fp8", "quantized_ue8m0", "bytes", "bytes_with_side")
# How calls go. mixed: small batches repeat and combine what a throughput dispatch has sent; staged: in two halves, but
# for a dispatch of exact sizes.
MODES = ("auto", "throughput", "latency", "mixed", "staged")
IDS = ("mixed", "distinct", "duplicates", "one_expert", "one_rank", "absent")
BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Call:
    """One dispatch, perhaps its repetition with other rows, and one or two combines."""

    seed: int
    tokens: tuple[int, ...]
    ids: str
    ids_are_int64: tuple[bool, ...]  # per rank: each may have its own integer type
    has_weights: bool
    layout: str
    alignment: int
    capacity: str | None  # None (exact sizes), "met", "exceeded" by one, "ample", "zero", "eight"
    rows: str
    repeat: str | None  # None, "plain", "float32", "quantized"
    weighted: bool
    side: str | None  # None, "pick", "row" (rank_major only)
    biases: tuple[str, ...]  # per rank: "none", "row", "full"
    bias_is_float32: bool
    output_dtype: str
    wire: str | None  # None, "fp8"
    heap_output: bool  # combine once more from a heap tensor
    check_late: bool  # let combine find the ids that are out of range
    mode: str = "throughput"  # one of MODES
    scale_layout: str = "row_major"  # "column_major" where rows have scales
    zero_holes: bool = True
    columns_given: bool = False  # scales of 4 bytes that are given lie by column
    host_counts: bool = False

    @property
    def dispatch_mode(self) -> str:
        """Of the first dispatch."""
        return {"mixed": "throughput", "staged": "latency"}.get(self.mode, self.mode)

    def has_wide_rows(self, dtype: str) -> bool:
        """Whether rows may travel in pieces, which have no halves."""
        return self.rows.startswith("bytes") or (dtype != "float32" and "float32" in (self.repeat, self.output_dtype))


@dataclass(frozen=True)
class Case:
    """One ExpertParallel and the calls on it; all results are looked at again after the last call."""

    num_ranks: int
    num_local: int
    top_k: int
    hidden: int
    dtype: str
    heap: str  # "plenty", "none", "small" (room for some results), "full_on_one"
    calls: tuple[Call, ...]
    active_ranks: tuple[int, ...] | None = None  # those left after a rebuild
    sum_domain: int | None = None
    node_ranks: int | None = None  # sums are those of nodes then

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.num_local


@dataclass
class RankCall:
    """The tensors and arguments one rank gives to a call."""

    x: Tensor | Quantized
    topk_idx: Tensor
    topk_weights: Tensor | None
    dispatch: dict[str, Any]
    repeat_x: Tensor | Quantized | None
    repeat: dict[str, Any]
    output: Tensor
    used_rows: Tensor  # bool like the rows of output: where a pick is
    side: Tensor | None
    bias: Tensor | None
    weighted: bool
    wire: str | None
    heap_output: bool
    check_late: bool
    has_bad_ids: bool
    later: dict[str, Any]  # options of what follows the dispatch
    is_staged: bool
    columns_given: bool


@dataclass
class RankPlan:
    """All that one rank needs for a case."""

    expert_parallel: dict[str, Any]
    hog_heap: bool
    calls: list[RankCall]


@dataclass
class Expected:
    """What the reference says of one call."""

    dispatched: list[reference.Dispatched]
    repeated: list[Tensor | Quantized] | None
    combined: list[tuple[Tensor, Tensor | None]]


@dataclass
class Seen:
    """What one rank saw in one call."""

    result: dict[str, Any]
    errors: list[str]
    repeated: Any = None
    repeat_errors: list[str] = field(default_factory=list)
    combined: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)


# ---- inputs and expectation, in the test process ----


def build(case: Case) -> tuple[list[RankPlan], list[Expected]]:
    """The plans of all ranks and the reference's results."""
    plans = [
        RankPlan(
            expert_parallel={
                "num_experts": case.num_experts,
                "top_k": case.top_k,
                "hidden": case.hidden,
                "max_tokens_per_rank": max(max(call.tokens) for call in case.calls),
                "dtype": DTYPES[case.dtype],
                "deadline_s": 60.0,
                "heap_bytes": {"none": 0, "small": 1 << 16}.get(case.heap),
                "sum_domain": case.sum_domain,
                "node_ranks": case.node_ranks,
            },
            # "none": a GPU's heap is rounded up to whole pages of 2 MiB
            hog_heap=case.heap == "none"
            or (case.heap == "full_on_one" and rank == case.calls[0].seed % case.num_ranks),
            calls=[],
        )
        for rank in range(case.num_ranks)
    ]
    expected = []
    for call in case.calls:
        rank_calls, expectation = _build_call(case, call)
        expected.append(expectation)
        for plan, rank_call in zip(plans, rank_calls, strict=True):
            plan.calls.append(rank_call)
    return plans, expected


def _build_call(case: Case, call: Call) -> tuple[list[RankCall], Expected]:
    generator = torch.Generator().manual_seed(call.seed)
    ids = [_ids(case, call, rank, generator) for rank in range(case.num_ranks)]
    weights = [torch.randn(i.shape, generator=generator) for i in ids] if call.has_weights else None
    xs = [_input_rows(case, call, num_tokens, generator) for num_tokens in call.tokens]
    options: dict[str, Any] = {"layout": call.layout}
    if call.layout == "expert_major":
        options["alignment"] = call.alignment
    if call.capacity is not None or call.layout == "masked":
        options["capacity"] = _capacity(case, call, ids, options)
    if call.rows in ("fp8", "fp8_ue8m0", "fp8_pow2"):
        options["quantize"] = call.rows
    if call.rows not in ("plain", "bytes"):
        options["scale_layout"] = call.scale_layout
    active = case.active_ranks
    dispatched = reference.dispatch(xs, ids, weights, num_experts=case.num_experts, active_ranks=active, **options)
    routing = dispatched[0].routing

    repeat_xs: list[Tensor | Quantized] | None = None
    if call.repeat is not None:
        dtype = torch.float32 if call.repeat == "float32" else DTYPES[case.dtype]
        floats = [_floats((n, case.hidden), dtype, generator) for n in call.tokens]
        repeat_xs = [Quantized(*reference.quantize_fp8(x)) if call.repeat == "quantized" else x for x in floats]

    repeat = {"scale_layout": call.scale_layout} if call.repeat == "quantized" else {}
    holes = {} if call.zero_holes else {"zero_holes": False}

    outputs = [_outputs(case, call, routing, rank, generator) for rank in range(case.num_ranks)]
    sides = None
    if call.side is not None:
        sides = [
            torch.randn(w.shape[:1] if call.side == "row" else w.shape, generator=generator) for w in routing.weights
        ]
    biases = [_bias(case, call, rank, generator) for rank in range(case.num_ranks)]
    sums: dict[str, Any] = {"weighted": call.weighted, "biases": biases, "wire": call.wire}
    sums["sum_domain"] = case.node_ranks or case.sum_domain
    if sides is None:
        ys = reference.combine(outputs, routing, **sums)
        combined: list[tuple[Tensor, Tensor | None]] = [(y, None) for y in ys]
    else:
        combined = [(y, side) for y, side in reference.combine(outputs, routing, sides=sides, **sums)]
    rank_calls = [
        RankCall(
            x=xs[rank],
            topk_idx=ids[rank],
            topk_weights=None if weights is None else weights[rank],
            dispatch={**options, **holes, "mode": call.dispatch_mode, "host_counts": call.host_counts},
            repeat_x=None if repeat_xs is None else repeat_xs[rank],
            repeat={**repeat, **holes},
            output=outputs[rank],
            used_rows=_used_rows(routing, rank),
            side=None if sides is None else sides[rank],
            bias=biases[rank],
            weighted=call.weighted,
            wire=call.wire,
            heap_output=call.heap_output and call.output_dtype == case.dtype,
            check_late=call.check_late,
            has_bad_ids=bool(((ids[rank] < -1) | (ids[rank] >= case.num_experts)).any()),
            later={"mode": "latency" if call.mode in ("mixed", "staged") else call.mode},
            is_staged=call.mode == "staged" and not call.has_wide_rows(case.dtype),
            columns_given=call.columns_given,
        )
        for rank in range(case.num_ranks)
    ]
    repeated = None if repeat_xs is None else reference.repeat_dispatch(repeat_xs, routing, **repeat)
    return rank_calls, Expected(dispatched, repeated, combined)


def _ids(case: Case, call: Call, rank: int, generator: torch.Generator) -> Tensor:
    num_tokens = call.tokens[rank]
    shape = (num_tokens, case.top_k)
    dtype = torch.int64 if call.ids_are_int64[rank] else torch.int32
    if call.ids == "absent":
        ids = torch.full(shape, -1)
    elif call.ids == "one_expert":
        ids = torch.full(shape, call.seed % case.num_experts)
    elif call.ids == "one_rank":
        first = call.seed % case.num_ranks * case.num_local
        ids = torch.randint(first, first + case.num_local, shape, generator=generator)
    elif call.ids == "distinct":
        order = torch.rand((num_tokens, max(case.num_experts, case.top_k)), generator=generator).argsort(1)
        ids = order[:, : case.top_k]
        ids = torch.where(ids < case.num_experts, ids, -1)
    elif call.ids == "duplicates":
        ids = torch.randint(0, case.num_experts, shape, generator=generator)
    else:  # some -1, some out of range, among them the largest numbers there are
        ids = torch.randint(-3, case.num_experts + 2, shape, generator=generator)
        largest = torch.iinfo(dtype)
        ids[torch.rand(shape, generator=generator) < 0.02] = largest.max
        ids[torch.rand(shape, generator=generator) < 0.02] = largest.min
    return ids.to(dtype).contiguous()


def _floats(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers of many magnitudes; in some tensors NaN, infinities, -0 and subnormals."""
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-4, 5, shape[:-1] + (1,), generator=generator)
    if int(torch.randint(0, 2, (), generator=generator)):
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-40, -6e-8, 3e38, -65504.0])
        chosen = torch.rand(shape, generator=generator) < 0.01
        x = torch.where(chosen, special[torch.randint(0, len(special), shape, generator=generator)], x)
    return x.to(dtype)


def _input_rows(case: Case, call: Call, num_tokens: int, generator: torch.Generator) -> Tensor | Quantized:
    if call.rows == "nvfp4":
        hidden = (case.hidden + 31) // 32 * 32
        data = torch.randint(0, 256, (num_tokens, hidden // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(0, 127, (num_tokens, hidden // 16), generator=generator, dtype=torch.uint8)
        return Quantized(data.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn))
    if call.rows in ("bytes", "bytes_with_side"):
        shape = (num_tokens, (case.hidden + 15) // 16 * 16)
        data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        data = data.view(BYTE_DTYPES[call.seed % len(BYTE_DTYPES)])
        if call.rows == "bytes":
            return Quantized(data)
        return Quantized(data, torch.randint(-(2**15), 2**15, (num_tokens, 3), generator=generator, dtype=torch.int16))
    x = _floats((num_tokens, case.hidden), DTYPES[case.dtype], generator)
    if call.rows.startswith("quantized"):
        return Quantized(*reference.quantize_fp8(x, ue8m0=call.rows == "quantized_ue8m0"))
    return x


def _capacity(case: Case, call: Call, ids: list[Tensor], options: dict[str, Any]) -> int:
    """Capacity relative to what the fullest rank (masked: expert) needs."""
    if call.layout == "masked":
        picks = torch.cat([i.flatten() for i in ids])
        picks = picks[(picks >= 0) & (picks < case.num_experts)].long()
        needed = int(torch.bincount(picks, minlength=1).max())
    else:
        probe = [torch.zeros((len(i), 1)) for i in ids]
        exact = reference.dispatch(probe, ids, num_experts=case.num_experts, **options)
        needed = max(int(d.num_rows) for d in exact)
    return {"exceeded": max(0, needed - 1), "ample": needed + 5, "zero": 0, "eight": 8}.get(
        call.capacity or "met", needed
    )


def _outputs(case: Case, call: Call, routing: reference.Routing, rank: int, generator: torch.Generator) -> Tensor:
    """Expert outputs; NaN in every row that holds no pick, since none of them may be read."""
    rows = _floats((*routing.row_shape[rank], case.hidden), DTYPES[call.output_dtype], generator)
    rows[~_used_rows(routing, rank)] = torch.nan
    return rows


def _used_rows(routing: reference.Routing, rank: int) -> Tensor:
    used = torch.zeros(routing.row_shape[rank], dtype=torch.bool)
    used.view(-1)[routing.rows[rank][routing.rows[rank] >= 0]] = True
    return used


def _bias(case: Case, call: Call, rank: int, generator: torch.Generator) -> Tensor | None:
    kind = call.biases[rank]
    if kind == "none":
        return None
    shape = (case.hidden,) if kind == "row" else (call.tokens[rank], case.hidden)
    dtype = torch.float32 if call.bias_is_float32 else DTYPES[call.output_dtype]
    return torch.randn(shape, generator=generator).to(dtype)


# ---- on a rank ----


def run_plan(state: RankState, plan: RankPlan) -> list[Seen]:
    """All calls of the case; results stay alive until the last one and are sent back then."""
    ep = weft.ExpertParallel(state.comm, **plan.expert_parallel)
    if ep.comm.engine != "cpu":
        poison_heap(ep)
    hogs = fill_heap(ep) if plan.hog_heap else []
    try:
        return [_run_call(ep, call) for call in plan.calls]
    finally:
        del hogs
        ep.close()


def fill_heap(ep: weft.ExpertParallel) -> list[Any]:
    """Take all of this rank's heap, down to the smallest block."""
    hogs = []
    window = ep.calls.windows[0].native
    on_gpu = ep.comm.engine != "cpu"
    stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0

    def block(num_rows: int) -> Any:
        return window.empty([num_rows, 256], 0, stream)

    for num_rows in (1 << 16, 1 << 8, 1):
        while (found := block(num_rows)) is not None:
            hogs.append(found)
    return hogs


def poison_heap(ep: weft.ExpertParallel) -> None:
    """Overwrite what the heap holds of earlier cases: a word that nobody writes is seen then."""
    for block in fill_heap(ep):
        torch.from_dlpack(block).fill_(0xFB)


def _run_call(ep: weft.ExpertParallel, call: RankCall) -> Seen:
    is_staged = call.is_staged and "capacity" in call.dispatch
    if call.columns_given:
        call = replace(call, x=_by_column(call.x), repeat_x=_by_column(call.repeat_x))
    r = ep.dispatch(call.x, call.topk_idx, call.topk_weights, **call.dispatch, staged=is_staged)
    _spoil(call.x, call.topk_idx, call.topk_weights)
    later = {**call.later, "staged": call.is_staged}
    r.wait()
    result = {
        name: getattr(r, name)
        for name in ("x", "topk_idx", "topk_weights", "num_tokens_per_expert", "offsets", "num_rows")
    }
    result["overflow"] = r.overflow.clone()
    result["dropped"] = r.dropped
    if call.dispatch["host_counts"]:
        result["listed"] = torch.tensor(r.num_tokens_per_expert_list, dtype=torch.int32)
    seen = Seen(result, errors=[])
    late = call.check_late  # the same on all ranks, whether they have such ids or not
    if not late:
        seen.errors += _errors(ep)
    if call.repeat_x is not None and not late:
        repeated = ep.dispatch(call.repeat_x, handle=r.handle, **call.repeat, **later)
        _spoil(call.repeat_x)
        seen.repeated = repeated.wait().x
        seen.repeat_errors = _errors(ep)
    output = call.output.clone()
    options: dict[str, Any] = {"weighted": call.weighted, "side": call.side, "bias": call.bias, "wire": call.wire}
    options |= later
    if late and call.has_bad_ids and ep.comm.engine == "cpu":  # on a GPU combine does not wait, so does not know
        try:
            ep.combine(output, r.handle, **options)
        except weft.Error as error:
            seen.errors.append(type(error).__name__)
    seen.combined.append(pair(ep.combine(output, r.handle, **options)))
    output.fill_(77)  # no peer may still read it
    if late:
        seen.errors += _errors(ep)
        if call.repeat_x is not None:
            seen.repeated = ep.dispatch(call.repeat_x, handle=r.handle, **call.repeat, **later).wait().x
            seen.repeat_errors = _errors(ep)
    if call.heap_output:
        heap_output = ep.empty_output(r)
        heap_output.copy_(call.output)
        out = torch.full_like(seen.combined[0][0], torch.nan, dtype=heap_output.dtype)
        seen.combined.append(pair(ep.combine(heap_output, r.handle, out=out, **options)))
        assert seen.combined[-1][0] is out
        heap_output.fill_(77)
    seen.errors += _errors(ep)  # of combines: none
    return seen


def pair(result: Any) -> tuple[Tensor, Tensor | None]:
    result = result.wait() if isinstance(result, weft.Staged) else result
    return result if isinstance(result, tuple) else (result, None)


def _spoil(*tensors: Tensor | Quantized | None) -> None:
    """Overwrite inputs of a complete call: it must not matter."""
    for tensor in tensors:
        if isinstance(tensor, Quantized):
            _spoil(tensor.data, tensor.scales)
        elif tensor is not None:
            flat = (tensor if tensor.is_contiguous() else tensor.t()).view(-1)
            flat.view(torch.uint8).fill_(85)


def _by_column(x: Tensor | Quantized | None) -> Any:
    if not isinstance(x, Quantized) or x.scales is None or x.scales.element_size() != 4:
        return x
    return Quantized(x.data, x.scales.t().contiguous().t())


def _errors(ep: weft.ExpertParallel) -> list[str]:
    """What ``check`` raises until it is content."""
    errors = []
    for _ in range(3):
        try:
            ep.check()
        except weft.CapacityExceeded as error:
            errors.append(f"CapacityExceeded {error.num_dropped}")
        except weft.Error as error:
            errors.append(type(error).__name__)
        else:
            return errors
    return [*errors, "check() never ends"]


# ---- comparison, in the test process ----


def compare(case: Case, plans: list[RankPlan], expected: list[Expected], seen: list[list[Seen]]) -> list[str]:
    """Every word of every result against the reference; returns what differs."""
    problems: list[str] = []
    for rank in range(case.num_ranks) if case.active_ranks is None else case.active_ranks:
        dropped = 0
        for number, call in enumerate(case.calls):
            at = f"rank {rank}, call {number}"
            d, got = expected[number].dispatched[rank], seen[rank][number]
            dropped += int(d.overflow)
            problems += _compare_dispatched(at, call, d, got.result, dropped)
            repeated = expected[number].repeated
            if repeated is not None:
                problems += _compare_rows(f"{at}: repeated", call, d, repeated[rank], got.repeated, is_x=True)
                dropped += int(d.overflow)  # a repeated dispatch drops them again
            errors = ["InvalidArgument"] if plans[rank].calls[number].has_bad_ids else []
            too_many = [f"CapacityExceeded {int(d.overflow)}"] if int(d.overflow) else []
            errors += too_many
            if got.errors != errors:
                problems.append(f"{at}: check() gave {got.errors}, expected {errors}")
            if repeated is not None and got.repeat_errors != too_many:
                problems.append(f"{at}: check() behind the repeat gave {got.repeat_errors}, expected {too_many}")
            y, side = expected[number].combined[rank]
            for which, (got_y, got_side) in zip(("ordinary", "heap"), got.combined, strict=False):
                problems += compare_tensor(f"{at}: y from {which} tensor", y, got_y)
                if side is not None or got_side is not None:
                    problems += compare_tensor(f"{at}: side from {which} tensor", side, got_side)
    return problems


def _compare_dispatched(at: str, call: Call, d: reference.Dispatched, got: dict[str, Any], dropped: int) -> list[str]:
    problems = compare_tensor(f"{at}: overflow", torch.tensor(dropped), got["overflow"])
    problems += compare_tensor(f"{at}: dropped", d.overflow.to(torch.int32), got["dropped"])
    for name in ("num_tokens_per_expert", "offsets", "num_rows"):
        problems += compare_tensor(f"{at}: {name}", getattr(d, name), got[name])
    if call.host_counts:
        problems += compare_tensor(f"{at}: num_tokens_per_expert_list", d.num_tokens_per_expert, got["listed"])
    problems += _compare_rows(f"{at}: x", call, d, d.x, got["x"], is_x=True)
    for name in ("topk_idx", "topk_weights"):
        problems += _compare_rows(f"{at}: {name}", call, d, getattr(d, name), got[name])
    if call.layout == "rank_major":
        ids, weights = (got[name][int(d.num_rows) :] for name in ("topk_idx", "topk_weights"))
        if bool((ids != -1).any()) or bool(weights.any()):
            problems.append(f"{at}: rows behind num_rows have ids or weights")
    return problems


def _compare_rows(
    at: str, call: Call, d: reference.Dispatched, expected: Any, got: Any, *, is_x: bool = False
) -> list[str]:
    """Compare where rows are defined: below num_rows; masked: the first of each expert; of x holes if they are zero."""
    if isinstance(expected, Quantized):
        if not isinstance(got, Quantized):
            return [f"{at}: {type(got).__name__} in place of Quantized"]
        data = _compare_rows(f"{at}.data", call, d, expected.data, got.data, is_x=is_x)
        return data + _compare_rows(f"{at}.scales", call, d, expected.scales, got.scales, is_x=is_x)
    if expected is None or got is None or expected.shape != got.shape or expected.dtype != got.dtype:
        return compare_tensor(at, expected, got)
    if expected.dtype == torch.float4_e2m1fn_x2:  # torch indexes none of it
        expected, got = expected.view(torch.uint8), got.view(torch.uint8)
    if call.layout == "masked":
        defined = torch.arange(expected.shape[1]) < d.num_tokens_per_expert[:, None]
        return compare_tensor(at, expected[defined], got[defined])
    if call.layout == "expert_major" and is_x and not call.zero_holes:
        defined = torch.zeros(len(expected), dtype=torch.bool)
        for begin, count in zip(d.offsets.tolist(), d.num_tokens_per_expert.tolist(), strict=False):
            defined[begin : begin + count] = True
        return compare_tensor(at, expected[defined], got[defined])
    return compare_tensor(at, expected[: int(d.num_rows)], got[: int(d.num_rows)])


def compare_tensor(at: str, expected: Tensor | None, got: Tensor | None) -> list[str]:
    if expected is None or got is None:
        return [] if expected is got else [f"{at}: expected {expected}, got {got}"]
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return [f"{at}: expected {list(expected.shape)} {expected.dtype}, got {list(got.shape)} {got.dtype}"]
    differs = _bits(expected) != _bits(got)
    if expected.dtype.is_floating_point:
        differs &= ~(expected.float().isnan() & got.float().isnan())
    if not bool(differs.any()):
        return []
    first = tuple(int(i) for i in differs.nonzero()[0])
    pair = f"expected {expected[first].float().item()!r}, got {got[first].float().item()!r}"
    return [f"{at}: {int(differs.sum())} of {differs.numel()} differ, the first at {list(first)}: {pair}"]


def _bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(integer)
