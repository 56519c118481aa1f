"""The native module (src/bindings): raw pointers and plain values only, no torch."""
# check: allow file-size: the names of one module

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

def set_error_factory(factory: Callable[[int, str, str, int, list[int], str], BaseException]) -> None: ...
def keep_other_threads_out() -> None: ...
def threads_away() -> int: ...
def stay_if_kept_out() -> None: ...
def raise_system_error(action: str, error_number: int) -> NoReturn: ...
def set_log_sink(sink: Callable[[int, str], None] | None) -> None: ...
def version() -> str: ...
def build_info() -> dict[str, Any]: ...
def send_plan_len(num_tokens: int, top_k: int, num_ranks: int, num_local_experts: int) -> int: ...
def window_bytes(
    num_ranks: int, num_experts: int, top_k: int, max_tokens: int, max_row_bytes: int, staging_bytes: int = 0
) -> tuple[int, int]: ...
def compile_kernel(source: str, *, arch: str, nvrtc: str, include: str, cache: str) -> bytes: ...
def render_link_limit(*, row_bytes: int, is_pull: bool) -> str: ...

class LinkLimitKernel:
    def __init__(self, gpu: int, cubin: bytes) -> None: ...
    def launch(self, *, peers: Sequence[int], num_rows: int, num_blocks: int, stream: int) -> None: ...

class Listener:
    def __init__(self, has_door: bool = False, interface: str = "", port: int = 0, machine: str = "") -> None: ...
    def endpoint(self) -> bytes: ...

class Decider:
    def __init__(self) -> None: ...
    def next(self) -> tuple[int, str, str, str] | None: ...
    def answer(self, number: int, value: bytes) -> None: ...
    def fail(self, number: int, why: str) -> None: ...
    def close(self) -> None: ...

class LocalHub:
    def __init__(self, num_ranks: int) -> None: ...

class Communicator:
    @staticmethod
    def connect(
        rank: int,
        endpoints: Sequence[bytes],
        listener: Listener,
        timeout_s: float,
        first_epoch: int = 1,
        decider: Decider | None = None,
        secret: bytes = b"",
        max_ranks: int = 0,
    ) -> Communicator: ...
    @staticmethod
    def join(address: str, slot: int, listener: Listener, timeout_s: float) -> Communicator: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_solo(self) -> bool: ...
    def address(self) -> str: ...
    def boundary(
        self, timeout_s: float, stands_by: bool = False
    ) -> tuple[int, int, int, list[int], list[int], list[int], int, float, float] | None: ...
    def map_since(self, epoch: int) -> int: ...
    def propose(
        self,
        admit: Sequence[int],
        remove: Sequence[int],
        suspend: Sequence[int],
        id: int,
        timeout_s: float,
        together: bool,
        map_hash: int = 0,
    ) -> None: ...
    def wanted_change(self) -> tuple[str, int, str]: ...
    def withdraw_change(self) -> tuple[str, int, str]: ...
    def await_change(self, timeout_s: float) -> tuple[str, int, str]: ...
    def ready(self, timeout_s: float) -> None: ...
    def joining_ranks(self) -> list[int]: ...
    def prepared_ranks(self) -> list[int]: ...
    def leaving_ranks(self) -> list[int]: ...
    def set_contract(self, contract: str) -> None: ...
    def ask_contract(self, timeout_s: float, of: Sequence[int] = ()) -> str: ...
    def members(self) -> list[int]: ...
    @staticmethod
    def local(hub: LocalHub, rank: int, first_epoch: int = 1) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def active_ranks(self) -> list[int]: ...
    def is_near(self, rank: int) -> bool: ...
    def group(self) -> bytes: ...
    def incarnation(self, rank: int) -> int: ...
    def check_one_machine(self, what: str) -> None: ...
    def broken(self) -> bool: ...
    def raise_if_broken(self) -> None: ...
    def meet(self, timeout_s: float) -> None: ...
    def exchange(self, tag: int, payload: bytes, timeout_s: float) -> list[bytes]: ...
    def detections(self) -> list[tuple[int, str, int]]: ...
    def has_ended(self, rank: int) -> bool: ...
    def rebuild(self, ranks: Sequence[int], timeout_s: float) -> None: ...
    def recover(
        self, evict: Sequence[int], min_ranks: int, timeout_s: float, spares: Sequence[int] | None = None
    ) -> None: ...
    def evicted_ranks(self) -> list[int]: ...
    def safe_to_delete(self) -> list[int]: ...
    def abort(self, reason: str) -> None: ...
    def note_refusal(self, text: str) -> None: ...
    def close(self, why: str = "") -> None: ...

class _CallSpec:
    layout: int
    alignment: int
    capacity: int
    max_tokens: int
    hidden: int
    dtype: int
    num_blocks: int
    object: int
    timeout_ns: int
    is_small: bool
    sends: bool
    receives: bool
    def __init__(self, **fields: int) -> None: ...

class DispatchSpec(_CallSpec):
    row_bytes: int
    quantize: int
    scale_row_bytes: int
    topk_is_int64: bool
    cached: bool
    zeroes_holes: bool
    tells_need: bool
    scale_stride: int
    scales_are_fp32: bool
    scale_word_bytes: int
    tells_counts: bool
    spread_blocks: int

class CombineSpec(_CallSpec):
    has_side: bool
    bias_is_2d: bool
    bias_is_fp32: bool
    order: int
    sum_domain: int
    wire_is_fp8: bool
    stage_blocks: int

class _Buffers:
    stream: int
    num_tokens: int
    send_plan: int
    recv_plan: int
    recv_plan_len: int
    def __init__(self, **fields: int) -> None: ...

class DispatchBuffers(_Buffers):
    x: int
    scales: int
    topk_idx: int
    topk_weights: int
    experts: int
    sizes: int
    overflow: int
    num_rows: int
    out_x: int
    out_scales: int
    out_ids: int
    out_weights: int

class CombineBuffers(_Buffers):
    y: int
    num_rows: int
    weights: int
    owner_weights: int
    side: int
    bias: int
    out: int
    side_out: int

class DispatchResult:
    @property
    def x(self) -> Any | None: ...
    @property
    def scales(self) -> Any | None: ...
    @property
    def topk_idx(self) -> Any | None: ...
    @property
    def topk_weights(self) -> Any | None: ...
    @property
    def recv_plan(self) -> Any | None: ...
    @property
    def has_begun(self) -> bool: ...
    @property
    def in_heap(self) -> bool: ...
    @property
    def result_rows(self) -> int: ...
    needed_tokens: int
    @property
    def counts(self) -> list[int]: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_bad_ids(self) -> int: ...
    @property
    def first_bad_id(self) -> int: ...
    @property
    def first_bad_at(self) -> int: ...
    @property
    def rows_sent(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...

class Routing:
    def tensor(self, name: str, from_dlpack: Callable[[Any], Any]) -> Any | None: ...
    @property
    def places(self) -> tuple[int, int, int, int, int]: ...
    @property
    def num_bad_ids(self) -> int: ...
    @property
    def first_bad_id(self) -> int: ...
    @property
    def first_bad_at(self) -> int: ...
    @property
    def counts(self) -> list[int]: ...
    @property
    def rows_sent(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...

class Together: ...

class Window:
    def dispatch(self, spec: DispatchSpec, buffers: DispatchBuffers) -> DispatchResult: ...
    def combine(self, spec: CombineSpec, buffers: CombineBuffers) -> None: ...
    def dispatch_first(
        self,
        spec: DispatchSpec,
        stream: int,
        num_tokens: int,
        x: int,
        scales: int,
        topk_idx: int,
        topk_weights: int,
        overflow: int,
        from_dlpack: Callable[[Any], Any],
        sizes: int = 0,
        send_plan: int = 0,
        experts: int = 0,
    ) -> tuple[Any, ...] | None: ...
    def dispatch_again(
        self,
        spec: DispatchSpec,
        stream: int,
        num_tokens: int,
        x: int,
        scales: int,
        overflow: int,
        sizes: int,
        send_plan: int,
        recv_plan: int,
        recv_plan_len: int,
        num_rows: int,
        out_x: int,
        out_scales: int,
        from_dlpack: Callable[[Any], Any],
    ) -> tuple[Any, ...]: ...
    def together(self, wanted: Sequence[tuple[Sequence[int], int]]) -> Together: ...
    def dispatch_small(
        self,
        spec: DispatchSpec,
        wanted: Together,
        stream: int,
        num_tokens: int,
        x: int,
        scales: int,
        topk_idx: int,
        topk_weights: int,
        overflow: int,
        room: int,
        out_x: int,
        out_scales: int,
    ) -> tuple[int, Routing] | int | None: ...
    def combine_rows(
        self,
        spec: CombineSpec,
        stream: int,
        num_tokens: int,
        y: int,
        num_rows: int,
        weights: int,
        send_plan: int,
        recv_plan: int,
        recv_plan_len: int,
        out: int,
        bias: int,
        side: int,
        side_out: int,
        owner_weights: int = 0,
    ) -> None: ...
    def gradients(
        self,
        stream: int,
        dtype: int,
        hidden: int,
        num_rows: int,
        rows: int,
        y: int,
        weights: int,
        out: int,
        grad_weights: int,
    ) -> None: ...
    def empty(self, shape: Sequence[int], dtype: int, stream: int = 0) -> Any | None: ...
    def barrier(self, deadline_s: float) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    @property
    def id(self) -> int: ...
    def close(self) -> None: ...

class CpuWindow(Window):
    def __init__(
        self,
        comm: Communicator,
        *,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        max_row_bytes: int,
        heap_bytes: int,
        staging_bytes: int = 0,
        timeout_s: float = 100.0,
        most_heap_bytes: int = 0,
        number: int = 0,
        node_ranks: int = 0,
    ) -> None: ...
    def resize(self, heap_bytes: int, timeout_s: float) -> None: ...
    def release_memory(self) -> None: ...
    def owns(self, ptr: int) -> bool: ...

def gpu_leave_graphs_to_the_exit() -> None: ...
def gpu_record_stream(ptr: int, stream: int) -> bool: ...
def gpu_send_plan_len(num_tokens: int, top_k: int, num_ranks: int, layout: int) -> int: ...
def count_picks(
    gpu: Gpu | None,
    stream: int,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    is_int64: bool,
    topk_idx: int,
    experts: int,
    ranks: int,
    is_in_rank: int,
) -> None: ...

gpu_plan_header: int
gpu_plan_dropped: int
recv_plan_num_meta_rows: int
recv_plan_dropped: int

def recv_plan_places(num_meta_rows: int, top_k: int, num_ranks: int) -> tuple[int, int, int]: ...
def gpu_recv_plan_len(max_tokens: int, top_k: int, num_ranks: int, layout: int) -> int: ...
def gpu_window_bytes(
    *,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    landing_row_bytes: int,
    num_blocks: int,
    small_tokens: int,
) -> tuple[int, int]: ...

class Gpu:
    def __init__(self, index: int, *, nvrtc: str, include: str, cache: str) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def num_sms(self) -> int: ...

class GpuWindow(Window):
    def __init__(
        self,
        comm: Communicator,
        gpu: Gpu,
        *,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        landing_row_bytes: int,
        num_blocks: int,
        heap_bytes: int,
        small_tokens: int = 0,
        timeout_s: float = 100.0,
    ) -> None: ...
    def receive(self, stream: int) -> None: ...
    def unload(self, to: DispatchBuffers) -> None: ...
    def check(self) -> None: ...
    def take_bad_ids(self) -> tuple[int, int, int] | None: ...
    @property
    def heap_used(self) -> int: ...
