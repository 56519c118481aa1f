"""What Weft can do here: `weft.limits()`, `weft.supports()`, and the memory formulas of `weft size`. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft import _callable, _load
from weft.call.options import (
    LAYOUTS as LAYOUTS,
)
from weft.call.options import (
    MAX_ALIGNMENT as MAX_ALIGNMENT,
)
from weft.call.options import (
    MAX_CAPACITY as MAX_CAPACITY,
)
from weft.call.options import (
    MAX_NUM_SMS as MAX_NUM_SMS,
)
from weft.call.options import (
    MAX_SECONDS as MAX_SECONDS,
)
from weft.call.options import (
    MAX_TOKENS_PER_RANK as MAX_TOKENS_PER_RANK,
)
from weft.call.options import (
    MODES as MODES,
)
from weft.call.options import (
    OPTIONS,
    Accepts,
    CombineOptions,
    DispatchOptions,
    is_int,
    is_one_of,
    or_none,
)
from weft.call.options import (
    QUANTIZE as QUANTIZE,
)
from weft.call.options import (
    SCALE_LAYOUTS as SCALE_LAYOUTS,
)
from weft.call.options import (
    WIRES as WIRES,
)
from weft.errors import InvalidArgument

__all__ = ["Limits", "limits", "memory", "supports"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ROW_MULTIPLE_BYTES = 16
FP8_HIDDEN_MULTIPLE = 16
QUANTIZE_GROUP = 128
ENGINES = ("cpu", "nvlink")
MAX_GPU_RANKS = 16  # kMaxGpuRanks of include/weft/layout/gpu_window.h
LANDING_SLACK = 256  # alignment of what lies in the landing (include/weft/layout/gpu_window.h)
MAX_RANKS = 64  # kMaxRanks of include/weft/config/base.h
MAX_CONTROL_RANKS = 1024  # kMaxControlRanks of src/bootstrap/rank_set.h
MAX_TOP_K = 128  # kMaxTopk of include/weft/layout/window.h
MAX_EXPERTS = 1 << 20
MAX_HIDDEN = 1 << 20
MAX_SMALL_TOKENS = 512  # a rank: windows have slots for so many in a small-batch call, if nobody asks for more
MOST_PICKS_ADDED = 32  # by pick, on GPUs, in calls that are no small batch
SMALL_SHARED_BYTES = 224 << 10  # of a block, less the kernels' own variables; sm_120, untested, has 99 KiB
MAX_HEAP_BYTES = 1 << 46
MAX_TRAFFIC_CLASS = 255
MAX_WINDOWS = 1024
_MIN_HEAP_BYTES = 1 << 20
_PAGE = 4096


@dataclass(frozen=True)
class Limits:
    """Bounds of this build; what is beyond them raises `InvalidArgument` or `Unsupported`.

    Attributes: `engines` there are; `max_ranks` of an `ExpertParallel` of the cpu engine, `max_control_ranks` of a
    `Communicator`; `max_gpu_ranks` of the nvlink engine, `max_num_sms` of a call there; `max_top_k`,
    `max_tokens_per_rank`; `dtypes` of x and expert outputs; `layouts`; `quantize` formats and `scale_layouts` in a
    call, `wires` of combine; `row_multiple_bytes`: an unquantised row is a multiple of it; `fp8_hidden_multiple`:
    hidden is a multiple of it with FP8; `quantize_group` values share one FP8 scale.
    """

    engines: tuple[str, ...] = ENGINES
    max_ranks: int = MAX_RANKS
    max_control_ranks: int = MAX_CONTROL_RANKS
    max_gpu_ranks: int = MAX_GPU_RANKS
    max_num_sms: int = MAX_NUM_SMS
    max_top_k: int = MAX_TOP_K
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK
    dtypes: tuple[str, ...] = tuple(DTYPE_BYTES)
    layouts: tuple[str, ...] = LAYOUTS
    quantize: tuple[str, ...] = QUANTIZE
    scale_layouts: tuple[str, ...] = SCALE_LAYOUTS
    wires: tuple[str, ...] = WIRES
    modes: tuple[str, ...] = MODES
    row_multiple_bytes: int = ROW_MULTIPLE_BYTES
    fp8_hidden_multiple: int = FP8_HIDDEN_MULTIPLE
    quantize_group: int = QUANTIZE_GROUP


def limits() -> Limits:
    """The bounds of this build. Local, no device is touched."""
    return Limits()


def supports(*names: Any, **options: Any) -> bool:
    """Whether the given options would be accepted together.

    Names are those of `ExpertParallel`, `dispatch` and `combine`, and `engine` and `num_ranks`. A dtype is a
    torch.dtype or its name. Local, no device is touched.

        weft.supports(layout="masked", quantize="fp8")   # True
        weft.supports(engine="nvlink", num_ranks=32)     # False

    Raises:
        InvalidArgument: a name that is no option, or a value without a name.
    """
    if names:
        given = ", ".join(map(repr, names))
        raise InvalidArgument(f"{given} without a name; options are given by name: weft.supports(engine='nvlink')")
    unknown = sorted(set(options) - set(ACCEPTS))
    if unknown:
        raise InvalidArgument(f"unknown options {', '.join(unknown)}; allowed are {', '.join(sorted(ACCEPTS))}")
    if not all(ACCEPTS[name].test(value) for name, value in options.items()):
        return False
    return _agree(options)


def dtype_name(dtype: Any) -> str:
    """`bfloat16` for torch.bfloat16 or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


# What each argument accepts by itself: those of a constructor, and the options of the calls.
ACCEPTS: dict[str, Accepts] = {
    "engine": Accepts(lambda value: is_one_of(value, ENGINES), ", ".join(ENGINES)),
    "num_ranks": Accepts(is_int(1, MAX_RANKS), f"1 to {MAX_RANKS}, though a Communicator may have {MAX_CONTROL_RANKS}"),
    "num_experts": Accepts(is_int(1, MAX_EXPERTS), f"1 to {MAX_EXPERTS}"),
    "num_logical_experts": Accepts(or_none(is_int(1, MAX_EXPERTS)), f"None, or 1 to {MAX_EXPERTS}"),
    "top_k": Accepts(is_int(1, MAX_TOP_K), f"1 to {MAX_TOP_K}"),
    "hidden": Accepts(is_int(1, MAX_HIDDEN), f"1 to {MAX_HIDDEN}"),
    "max_tokens_per_rank": Accepts(is_int(0, MAX_TOKENS_PER_RANK), f"0 to {MAX_TOKENS_PER_RANK}"),
    "dtype": Accepts(lambda value: dtype_name(value) in DTYPE_BYTES, ", ".join(DTYPE_BYTES)),
    "heap_bytes": Accepts(or_none(is_int(0, MAX_HEAP_BYTES)), f"None, or 0 to {MAX_HEAP_BYTES}"),
    "max_heap_bytes": Accepts(or_none(is_int(0, MAX_HEAP_BYTES)), f"None, or 0 to {MAX_HEAP_BYTES}"),
    "num_windows": Accepts(is_int(1, MAX_WINDOWS), f"1 to {MAX_WINDOWS}"),
    "small_tokens": Accepts(or_none(is_int(1, MAX_TOKENS_PER_RANK)), f"None, or 1 to {MAX_TOKENS_PER_RANK}"),
    "traffic_class": Accepts(or_none(is_int(0, MAX_TRAFFIC_CLASS)), f"None, or 0 to {MAX_TRAFFIC_CLASS}"),
    "sum_domain": Accepts(or_none(is_int(1, MAX_RANKS)), "None, or 1 to the number of ranks"),
    "node_ranks": Accepts(or_none(is_int(1, MAX_RANKS)), "None, or 1 to the number of ranks"),
    **OPTIONS[DispatchOptions],
    **OPTIONS[CombineOptions],
}


def _sums_are_of_nodes(shape: dict[str, Any], num_ranks: int) -> bool:
    nodes, domain = shape.get("node_ranks"), shape.get("sum_domain")
    return nodes is None or domain in (None, nodes) or nodes >= num_ranks


def _go_between_nodes(options: dict[str, Any]) -> bool:
    """Orders, modes and side values of a call."""
    if options.get("order") == "pick" or options.get("side_lanes") == "all":
        return False
    if options.get("engine") != "nvlink":
        return True
    is_small = options.get("staged") or options.get("mode") == "latency"
    by_expert = options.get("layout", "rank_major") != "rank_major"
    return options.get("order") != "last_pick" and (is_small or not by_expert or options.get("top_k", 1) <= 32)


def _agree(options: dict[str, Any]) -> bool:
    """What several options must satisfy together."""
    hidden, quantize = options.get("hidden"), options.get("quantize") or options.get("wire")
    if options.get("engine") == "nvlink" and options.get("num_ranks", 1) > MAX_GPU_RANKS:
        return False
    if options.get("max_heap_bytes") is not None and (
        options.get("engine") == "nvlink" or options["max_heap_bytes"] < (options.get("heap_bytes") or 0)
    ):
        return False
    row_bytes = DTYPE_BYTES[dtype_name(options.get("dtype", "bfloat16"))] * (hidden or ROW_MULTIPLE_BYTES)
    if row_bytes % ROW_MULTIPLE_BYTES or (quantize and (hidden or FP8_HIDDEN_MULTIPLE) % FP8_HIDDEN_MULTIPLE):
        return False
    num_ranks = options.get("num_ranks", 1)
    if options.get("num_experts", 0) % num_ranks:
        return False
    if "num_ranks" in options and max(options.get("sum_domain") or 1, options.get("node_ranks") or 1) > num_ranks:
        return False
    if 0 < (options.get("node_ranks") or 0) < num_ranks and not _go_between_nodes(options):
        return False
    if not _sums_are_of_nodes(options, num_ranks):
        return False
    if (options.get("num_logical_experts") or 0) > options.get("num_experts", MAX_EXPERTS):
        return False
    if options.get("engine") == "nvlink" and (
        options.get("num_logical_experts") is not None or options.get("absent", "drop") != "drop"
    ):
        return False
    if "max_tokens_per_rank" in options and (options.get("max_tokens") or 0) > options["max_tokens_per_rank"]:
        return False
    window = options.get("window") or 0
    if window >= options.get("num_windows", window + 1):
        return False
    if options.get("staged") and (options.get("async_op") or options.get("mode") == "throughput"):
        return False
    most = most_small_tokens(options.get("max_tokens_per_rank", MAX_TOKENS_PER_RANK), options.get("small_tokens"))
    if (options.get("staged") or options.get("mode") == "latency") and (options.get("max_tokens") or 0) > most:
        return False
    if options.get("side_lanes") == "all" and options.get("layout", "rank_major") != "rank_major":
        return False
    layout = options.get("layout", "expert_major")  # any that allows the rest
    if options.get("alignment", 1) != 1 and layout != "expert_major":
        return False
    return not (layout == "masked" and "capacity" in options and options["capacity"] is None)


# ---- memory


def default_heap_bytes(num_ranks: int, top_k: int, hidden: int, max_tokens_per_rank: int, dtype: Any) -> int:
    """Four results for the worst of rank_major, or of balanced expert_major, whichever is more; at least 1 MiB.

    4 * max_tokens_per_rank * max(num_ranks, top_k) * (row bytes + 8 * top_k), rounded up to pages. Pages never touched
    take no memory. What finds no room is copied to an ordinary tensor, which is slower and never an error.
    """
    row_bytes = DTYPE_BYTES[dtype_name(dtype)] * hidden + 8 * top_k
    return max(_MIN_HEAP_BYTES, _up(4 * max_tokens_per_rank * max(num_ranks, top_k) * row_bytes, _PAGE))


def memory(
    num_ranks: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_tokens_per_rank: int,
    dtype: Any = "bfloat16",
    *,
    heap_bytes: int | None = None,
    num_windows: int = 1,
    num_layers: int = 1,
    training: bool = False,
    engine: str = "cpu",
    small_tokens: int | None = None,
) -> dict[str, int]:
    """Bytes on each rank. Local, no device is touched, no torch is imported.

    Returns:
        control_bytes: headers, progress words, payload slots and other small words of one window.
        staging_bytes: of one window; cpu: staging rings, one a rank; nvlink: the landing, a row for each token of each
            rank with its ids and weights, where rows land that find no heap; and the slots of small batches, two for
            each of up to small_tokens tokens (None: MAX_SMALL_TOKENS) of each rank.
        heap_bytes: receive memory of one window.
        windows_bytes: all of these times num_windows; layers of equal shape share their windows.
        rows_bytes: received rows of one layer with balanced routing (each token reaches min(top_k, num_ranks) ranks).
        rows_worst_bytes: the same if every rank sends all its tokens here.
        handle_bytes: what a layer's handle keeps besides: plans, weights and ids.
        layers_bytes: rows and handles that num_layers keep for backward if training, else those of one layer.
        total_bytes: windows_bytes + layers_bytes, less what of layers_bytes lies in the heap.

    Raises:
        InvalidArgument: a value that ExpertParallel would refuse.
    """
    shape = {
        "num_ranks": num_ranks,
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden": hidden,
        "max_tokens_per_rank": max_tokens_per_rank,
        "dtype": dtype,
        "heap_bytes": heap_bytes,
        "num_windows": num_windows,
        "small_tokens": small_tokens,
    }
    check_shape(shape)
    if engine not in ENGINES:
        raise InvalidArgument(f"engine is {engine!r}; allowed: {', '.join(ENGINES)}")
    if engine == "nvlink":
        row_bytes = landing_row_bytes(hidden, dtype)
        control, staging = gpu_window_bytes(
            num_ranks, num_experts, top_k, max(1, max_tokens_per_rank), row_bytes,
            most_small_tokens(max_tokens_per_rank, small_tokens),
        )  # fmt: skip
    else:
        control, staging = _load.native().window_bytes(
            num_ranks, num_experts, top_k, max_tokens_per_rank, max_row_bytes(hidden)
        )
    heap = heap_bytes
    if heap is None:
        heap = default_heap_bytes(num_ranks, top_k, hidden, max_tokens_per_rank, dtype)
    windows = (control + staging + heap) * num_windows
    row = DTYPE_BYTES[dtype_name(dtype)] * hidden + 8 * top_k
    rows = max_tokens_per_rank * min(top_k, num_ranks) * row
    worst = max_tokens_per_rank * num_ranks * row
    handle = 4 * max_tokens_per_rank * (num_ranks + top_k) + 8 * max_tokens_per_rank * min(top_k, num_ranks)
    layers = (rows + handle) * (num_layers if training else 1)
    return {
        "control_bytes": control,
        "staging_bytes": staging,
        "heap_bytes": heap,
        "windows_bytes": windows,
        "rows_bytes": rows,
        "rows_worst_bytes": worst,
        "handle_bytes": handle,
        "layers_bytes": layers,
        "total_bytes": windows + max(0, layers - heap * num_windows),
    }


def check_shape(shape: dict[str, Any]) -> None:
    """Raise `InvalidArgument` for the first argument of a constructor that is not allowed, `Unsupported` never."""
    for name, value in shape.items():
        if not ACCEPTS[name].test(value):
            raise InvalidArgument(f"{name} is {value!r}; allowed: {ACCEPTS[name].allowed}")
    num_experts, num_ranks = shape["num_experts"], shape["num_ranks"]
    if num_experts % num_ranks:
        raise InvalidArgument(
            f"num_experts is {num_experts}; allowed are multiples of the number of ranks, {num_ranks}"
        )
    num_logical = shape.get("num_logical_experts")
    if num_logical is not None and num_logical > num_experts:
        raise InvalidArgument(
            f"num_logical_experts is {num_logical}; allowed are None and 1 to num_experts = {num_experts}"
        )
    if (shape.get("sum_domain") or 1) > num_ranks:
        raise InvalidArgument(
            f"sum_domain is {shape['sum_domain']}; allowed: None, or 1 to the number of ranks, {num_ranks}"
        )
    if (shape.get("node_ranks") or 1) > num_ranks:
        raise InvalidArgument(
            f"node_ranks is {shape['node_ranks']}; allowed: None, or 1 to the number of ranks, {num_ranks}"
        )
    if not _sums_are_of_nodes(shape, num_ranks):
        raise InvalidArgument(
            f"sum_domain is {shape['sum_domain']}; allowed with node_ranks={shape['node_ranks']}: None, or the same"
        )
    item = DTYPE_BYTES[dtype_name(shape["dtype"])]
    if shape["hidden"] * item % ROW_MULTIPLE_BYTES:
        raise InvalidArgument(
            f"hidden is {shape['hidden']}; allowed with {dtype_name(shape['dtype'])} are multiples of "
            f"{ROW_MULTIPLE_BYTES // item}, so that a row is a multiple of {ROW_MULTIPLE_BYTES} bytes"
        )


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def gpu_window_bytes(
    num_ranks: int, num_experts: int, top_k: int, max_tokens: int, row_bytes: int, small_tokens: int
) -> tuple[int, int]:
    """(control, landing and small slots) of a window between GPUs, also of more ranks than the engine serves."""
    found: tuple[int, int] = _load.native().gpu_window_bytes(
        num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, max_tokens=max_tokens, landing_row_bytes=row_bytes,
        num_blocks=MAX_NUM_SMS, small_tokens=small_tokens,
    )  # fmt: skip
    return found


def small_shared_bytes(num_places: int, num_groups: int, num_local_experts: int) -> int:
    """Shared memory of a block of a small-batch dispatch; SmallDispatchKernelConfig::shared_bytes."""
    warps = 16
    return _up(4 * ((warps + 2) * num_groups + num_local_experts + num_places), 128)


def most_small_tokens(max_tokens_per_rank: int, asked: int | None = None) -> int:
    """Most tokens of a rank in a small-batch call of a window; `asked`: small_tokens of its ExpertParallel."""
    return min(max(1, max_tokens_per_rank), MAX_SMALL_TOKENS if asked is None else asked)


def has_pick_slots(num_ranks: int, top_k: int, small_tokens: int, max_tokens: int) -> bool:
    """Whether the slots of a window for so many tokens hold a row a pick of a small batch of `max_tokens` a rank."""
    return max_tokens * top_k <= num_ranks * small_tokens


def adds_by_pick(ep: Any, handle: Any) -> bool:
    """Whether `combine(order="pick")` is there for a handle: not between nodes; on GPUs with few picks, or in a small
    batch."""
    if ep.calls.has_nodes or ep.comm.engine == "cpu":
        return not ep.calls.has_nodes
    has_slots = has_pick_slots(ep.num_ranks, ep.top_k, ep.small_tokens, handle.max_tokens)
    return has_slots if handle.is_small else ep.top_k <= MOST_PICKS_ADDED


def landing_row_bytes(hidden: int, dtype: Any) -> int:
    """Room that the nvlink engine's windows have for a row that finds none in the heap: one of x, quantised or not.
    Wider rows travel in pieces."""
    return _up(DTYPE_BYTES[dtype_name(dtype)] * hidden, ROW_MULTIPLE_BYTES) + 2 * LANDING_SLACK


def max_row_bytes(hidden: int) -> int:
    """Widest row a window takes: fp32, for gradients; also data and scales of opaque rows."""
    return 4 * hidden


limits.memory = memory  # type: ignore[attr-defined]  # weft.limits may be this function or this module
_callable.make_callable(__name__, limits)
