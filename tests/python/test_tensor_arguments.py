"""Guards against tensors without plain memory that reach the native module (address 0 means "none" there), results that
share memory with their handle, and calls that depend on torch's ambient state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import _load

X = torch.arange(5 * 16, dtype=torch.float32).view(5, 16)
IDX = torch.tensor([[0, 1], [1, 7], [3, -1], [2, 2], [5, 4]])
WEIGHTS = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))


class Wrapped(Tensor):
    """A tensor that is made of another one and has no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda value: value.inner if isinstance(value, Wrapped) else value  # noqa: E731
        return func(*map(unwrap, args), **(kwargs or {}))


class Named(Tensor):
    """A tensor with memory of its own, and a name."""


@pytest.fixture
def mesh() -> Iterator[Any]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def given(ep: weft.ExpertParallel, name: str, change: Any, **options: Any) -> Any:
    """A dispatch or combine in which one argument is changed."""
    sent: dict[str, Any] = {"x": X, "topk_idx": IDX, "topk_weights": WEIGHTS, "layout": "expert_major", **options}
    if name in ("x", "topk_idx", "topk_weights"):
        return ep.dispatch(**{**sent, name: change(sent[name])})
    if name in ("data", "scales"):
        parts = {"data": torch.zeros(5, 32, dtype=torch.uint8), "scales": torch.ones(5, 4)}
        parts[name] = change(parts[name])
        return ep.dispatch(**{**sent, "x": weft.Quantized(**parts)})
    r = ep.dispatch(**sent)
    num_rows = len(r.x)
    combined: dict[str, Any] = {
        "expert_output": r.x.clone(), "side": torch.ones(num_rows), "bias": torch.ones(16), "out": torch.zeros(5, 16)
    }  # fmt: skip
    combined[name] = change(combined[name])
    return ep.combine(combined.pop("expert_output"), r.handle, **combined)


NAMES = ["x", "topk_idx", "topk_weights", "data", "scales", "expert_output", "side", "bias", "out"]
SHOWN = {"data": r"x\.data", "scales": r"x\.scales"}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_without_memory_are_refused(ep: weft.ExpertParallel, mesh: Any, name: str) -> None:
    shown = SHOWN.get(name, name)

    def to_dtensor(tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor, mesh)

    for change, text in (
        (to_dtensor, rf"^{shown} is a DTensor; give \.to_local\(\)"),
        (Wrapped, rf"^{shown} is a Wrapped; give the plain tensors"),
        (freed, rf"^{shown} has no memory"),
    ):
        with pytest.raises(weft.InvalidArgument, match=text):
            given(ep, name, change)
    assert ep.dispatch(X, IDX, layout="expert_major").x.shape == (9, 16)


def test_tensors_without_memory_are_neither_shared_nor_fetched_into(solo: weft.Communicator, mesh: Any) -> None:
    solo.share("rows", X)
    fake = FakeTensorMode()  # type: ignore[no-untyped-call]
    for change in (lambda tensor: DTensor.from_local(tensor, mesh), Wrapped, freed, fake.from_tensor):
        with pytest.raises(weft.InvalidArgument, match=r"^tensor "):
            solo.share("others", change(X))
        with pytest.raises(weft.InvalidArgument, match=r"^out "):
            solo.fetch("rows", 0, change(torch.zeros_like(X)))
    solo.share("others", AsyncCollectiveTensor(X + 1))
    out = torch.zeros_like(X)
    solo.fetch("others", 0, out.as_subclass(Named))
    assert torch.equal(out, X + 1)
    for name in ("rows", "others"):
        solo.share(name, None)


@pytest.mark.parametrize("name", NAMES)
def test_asynchronous_collectives_are_waited_for(ep: weft.ExpertParallel, mesh: Any, name: str) -> None:
    want, got = given(ep, name, lambda tensor: tensor), given(ep, name, AsyncCollectiveTensor)
    if isinstance(want, weft.Dispatched):
        want, got = (list(each.x) if isinstance(each.x, weft.Quantized) else [each.x] for each in (want, got))
        assert all(type(part) is Tensor for part in got)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_gradients_of_waited_tensors(ep: weft.ExpertParallel, mesh: Any) -> None:
    x, weights = X.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
    waiting = AsyncCollectiveTensor(x), AsyncCollectiveTensor(weights)
    r = ep.dispatch(waiting[0], IDX, waiting[1], layout="expert_major")
    ep.combine(AsyncCollectiveTensor(r.x * 2), r.handle).sum().backward()
    assert waiting[0].grad is not None and waiting[1].grad is not None  # noqa: PT018


def test_subclasses_that_only_name_things_are_used_as_they_are(ep: weft.ExpertParallel) -> None:
    for name in NAMES:
        want, got = (given(ep, name, change) for change in (torch.clone, lambda t: t.as_subclass(Named)))
        if isinstance(want, weft.Dispatched):
            want, got = want.x, got.x
            want, got = (list(each) if isinstance(each, weft.Quantized) else [each] for each in (want, got))
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b), name


def test_negative_views_and_symbolic_zeros(ep: weft.ExpertParallel) -> None:
    r = ep.dispatch(torch._neg_view(X), IDX, layout="expert_major")
    assert torch.equal(r.x[0], -X[0])
    with pytest.raises(weft.InvalidArgument, match="topk_weights has no memory"):
        ep.dispatch(X, IDX, torch._efficientzerotensor((5, 2)))
    with pytest.raises(weft.InvalidArgument, match="out is a negative view"):
        ep.combine(r.x, r.handle, out=torch._neg_view(torch.zeros(5, 16)))


def test_transforms_of_functions(ep: weft.ExpertParallel) -> None:
    with pytest.raises(weft.InvalidArgument, match=r"x belongs to a transform of torch\.func"):
        torch.func.grad(lambda x: ep.dispatch(x, IDX).x.sum())(X)
    with pytest.raises(weft.InvalidArgument, match=r"x belongs to a transform of torch\.func"):
        torch.vmap(lambda x: ep.dispatch(x, IDX).x)(X.expand(2, 5, 16))


def test_gradients_without_memory_are_refused_in_the_backward(ep: weft.ExpertParallel) -> None:
    class Wrapping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return Wrapped(grad)

    r = ep.dispatch(X.clone().requires_grad_(), IDX, layout="expert_major")
    with pytest.raises(weft.InvalidArgument, match="gradient of the result of combine is a Wrapped"):
        Wrapping.apply(ep.combine(r.x, r.handle)).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("capacity", [None, 16])
def test_fakes(ep: weft.ExpertParallel, capacity: int | None) -> None:
    """Inside of FakeTensorMode and with fakes outside of it: what comes back is a fake, nothing is sent."""
    before = ep.stats()["num_dispatches"]
    mode = FakeTensorMode(shape_env=ShapeEnv())  # type: ignore[no-untyped-call]
    fakes = [mode.from_tensor(each) for each in (X, IDX, WEIGHTS)]
    for inside in (True, False):
        with mode if inside else contextlib.nullcontext():
            r = ep.dispatch(*fakes, layout="expert_major", capacity=capacity)
            y = ep.combine(r.x, r.handle, bias=mode.from_tensor(torch.ones(16)))
            again = ep.dispatch(fakes[0], handle=r.handle)
            assert isinstance(r.num_tokens_per_expert, FakeTensor)
        for each in (r.x, y, again.x, r.topk_weights):
            assert isinstance(each, FakeTensor)
        assert y.shape == (5, 16)
        assert y.dtype == torch.float32
    assert ep.stats()["num_dispatches"] == before
    with FakeTensorMode() as no_sizes, pytest.raises(weft.Unsupported, match="ShapeEnv"):
        ep.dispatch(*(no_sizes.from_tensor(each) for each in (X, IDX)))


class Passing(TorchDispatchMode):
    """Looks on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Replacing(TorchDispatchMode):
    """Every new tensor is a wrapped one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_new = func in (torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default)
        return Wrapped(made) if is_new else made


def test_dispatch_modes(ep: weft.ExpertParallel) -> None:
    r = ep.dispatch(X, IDX, layout="expert_major")
    want = ep.combine(r.x, r.handle)
    with Passing():
        assert torch.equal(ep.dispatch(X, IDX, layout="expert_major").x, r.x)
        assert torch.equal(ep.combine(r.x, r.handle), want)
    with Replacing(), pytest.raises(weft.InvalidArgument, match="Wrapped without memory"):
        ep.combine(r.x, r.handle)
    assert torch.equal(ep.combine(r.x, r.handle), want)


def test_the_native_module_refuses_address_0(ep: weft.ExpertParallel) -> None:
    r = ep.dispatch(X, IDX, layout="expert_major")
    window = ep.calls.windows[0].native
    sizes = torch.zeros(32, dtype=torch.int32)
    plan = torch.zeros(_load.native().send_plan_len(5, 2, 1, 8), dtype=torch.int32)
    overflow = torch.zeros((), dtype=torch.int64)
    call = {"layout": 1, "max_tokens": 64, "hidden": 16, "dtype": 3, "timeout_ns": 10**9}
    sent = {
        "num_tokens": 5, "x": X.data_ptr(), "topk_idx": IDX.data_ptr(), "send_plan": plan.data_ptr(),
        "overflow": overflow.data_ptr(), "sizes": sizes.data_ptr(),
    }  # fmt: skip
    native = _load.native()
    for name in ("x", "topk_idx", "send_plan", "overflow"):
        spec = native.DispatchSpec(**call, row_bytes=64)
        with pytest.raises(weft.InvalidArgument, match="no memory at address 0"):
            window.dispatch(spec, native.DispatchBuffers(**{**sent, name: 0}))
    spec = native.DispatchSpec(**{**call, "dtype": 0}, row_bytes=48, scale_row_bytes=4)
    with pytest.raises(weft.InvalidArgument, match="scales: no memory at address 0"):
        window.dispatch(spec, native.DispatchBuffers(**sent))
    out, handle = torch.zeros(5, 16), r.handle
    combined = {
        "num_tokens": 5, "y": r.x.data_ptr(), "num_rows": len(r.x), "side": r.x.data_ptr(), "out": out.data_ptr(),
        "side_out": out.data_ptr(), "send_plan": handle.send_plan.data_ptr(), "recv_plan": handle.recv_plan.data_ptr(),
        "recv_plan_len": handle.recv_plan.numel(),
    }  # fmt: skip
    for name in ("y", "side", "out", "side_out", "send_plan", "recv_plan"):
        with pytest.raises(weft.InvalidArgument, match="no memory at address 0"):
            window.combine(native.CombineSpec(**call, has_side=True), native.CombineBuffers(**{**combined, name: 0}))


def test_specs_and_buffers_have_the_fields_of_their_structs() -> None:
    """Given by name, read and written, enums as numbers; a name that no struct has is refused."""
    native = _load.native()
    spec = native.DispatchSpec(layout=2, dtype=3, quantize=1, capacity=7, cached=True)
    assert (spec.layout, spec.dtype, spec.quantize, spec.capacity, spec.cached) == (2, 3, 1, 7, True)
    assert (spec.alignment, spec.topk_is_int64, spec.receives) == (1, True, True), "defaults"
    spec.layout, spec.object = 1, 2**32 - 1
    assert (spec.layout, spec.object) == (1, 2**32 - 1)
    buffers = native.CombineBuffers(stream=2**63, side_out=5)
    assert (buffers.stream, buffers.side_out, buffers.num_tokens) == (2**63, 5, 0)
    for make in (native.DispatchSpec, native.CombineSpec, native.DispatchBuffers, native.CombineBuffers):
        with pytest.raises(AttributeError, match="no field nothing"):
            make(nothing=1)


# ---- results and handles


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
@pytest.mark.parametrize("tracked", [False, True])
def test_results_do_not_alias_the_handle(ep: weft.ExpertParallel, layout: str, tracked: bool) -> None:
    """What a caller writes to the results changes no later call with the handle, backward too."""

    def run(*, spoils: bool) -> list[Any]:
        x = X.clone().requires_grad_(tracked)
        r = ep.dispatch(x, IDX, WEIGHTS, layout=layout, capacity=12)
        y = r.x * 1
        if spoils:
            with torch.no_grad():
                for part in (r.topk_idx, r.topk_weights, r.num_tokens_per_expert, r.offsets, r.num_rows):
                    if part is not None:
                        part.fill_(1)
        again = ep.dispatch(X + 1, handle=r.handle)
        side = torch.ones(r.handle.rows_shape)
        z, sides = ep.combine(y, r.handle, side=side)
        if tracked:
            z.sum().backward()
        valid = int(ep.dispatch(X, IDX, layout=layout, capacity=12).num_rows)
        rows = again.x[:valid] if layout != "masked" else again.x[:, :1]
        return [rows.detach().nan_to_num(), z.detach(), sides, x.grad]

    for got, want in zip(run(spoils=True), run(spoils=False), strict=True):
        assert got is want is None or torch.equal(got, want)


def test_results_of_a_repeated_dispatch_are_the_users_own(ep: weft.ExpertParallel) -> None:
    r = ep.dispatch(X, IDX, WEIGHTS, layout="expert_major")
    want = ep.combine(r.x, r.handle)
    ep.dispatch(X, handle=r.handle).topk_weights.zero_()
    r.handle.topk_weights.zero_()
    assert torch.equal(ep.combine(r.x, r.handle), want)
    assert torch.equal(r.topk_weights, torch.zeros(9))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_overflow_counts_in_every_dispatch(ep: weft.ExpertParallel, layout: str) -> None:
    capacity = 1 if layout == "masked" else 3
    r = ep.dispatch(X, IDX, layout=layout, capacity=capacity)
    dropped = int(r.overflow)
    assert dropped > 0
    for repeat in (2, 3):
        again = ep.dispatch(X, handle=r.handle)
        assert int(again.overflow) == repeat * dropped
    again = ep.dispatch(X.clone().requires_grad_(), handle=r.handle)
    ep.combine(again.x, again.handle).sum().backward()  # sends again what the forward has counted
    assert int(r.overflow) == 4 * dropped
    with pytest.raises(weft.CapacityExceeded):
        ep.check()


def test_quantized_is_iterable(ep: weft.ExpertParallel) -> None:
    data, scales = ep.dispatch(X, IDX, quantize="fp8").x
    assert data.dtype == torch.float8_e4m3fn
    assert scales.shape == (5, 1)
    data, nothing = weft.Quantized(data)
    assert nothing is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_two_bytes_are_converted(ep: weft.ExpertParallel, dtype: torch.dtype) -> None:
    weights = WEIGHTS.to(dtype).requires_grad_()
    r = ep.dispatch(X, IDX, weights, layout="expert_major")
    want = ep.dispatch(X, IDX, weights.detach().float(), layout="expert_major")
    assert r.topk_weights.dtype == torch.float32
    assert torch.equal(r.topk_weights, want.topk_weights)
    ep.combine(r.x, r.handle).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == dtype


def test_whose_handle_comes_before_its_shape(solo: weft.Communicator, ep: weft.ExpertParallel) -> None:
    with weft.ExpertParallel(
        solo, num_experts=4, top_k=1, hidden=64, max_tokens_per_rank=8, dtype=torch.float32
    ) as other:
        handle = other.dispatch(torch.ones(3, 64), torch.zeros(3, 1, dtype=torch.int64)).handle
        for call in (lambda: ep.combine(torch.ones(9, 16), handle), lambda: ep.dispatch(X, handle=handle)):
            with pytest.raises(weft.InvalidState, match="the handle is of another ExpertParallel"):
                call()


# ---- options and ambient state

STRANGE: list[Any] = [torch.tensor(1), torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64), [1], {}, object(), 1.5j]
DISPATCH_OPTIONS = [
    "layout", "alignment", "quantize", "scale_layout", "zero_holes", "capacity", "max_tokens", "num_sms", "deadline_s",
    "mode", "staged", "async_op", "window", "host_counts",
]  # fmt: skip
COMBINE_OPTIONS = ["weighted", "wire", "num_sms", "deadline_s", "mode", "staged", "async_op", "window"]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: type(value).__name__)
def test_options_of_another_kind_are_refused(ep: weft.ExpertParallel, value: Any) -> None:
    r = ep.dispatch(X, IDX)
    for name in DISPATCH_OPTIONS:
        with pytest.raises(weft.InvalidArgument, match=name):
            ep.dispatch(X, IDX, **{name: value})
        if name not in ("scale_layout", "zero_holes", "host_counts"):
            with pytest.raises(weft.InvalidArgument, match=name):
                ep.dispatch(X, handle=r.handle, **{name: value})
        assert not weft.supports(**{name: value})
    for name in COMBINE_OPTIONS:
        with pytest.raises(weft.InvalidArgument, match=name):
            ep.combine(r.x, r.handle, **{name: value})
    for call in (lambda: ep.dispatch(X, handle=value), lambda: ep.combine(r.x, value)):
        with pytest.raises(weft.InvalidArgument, match="handle"):
            call()


def test_supports_wants_names() -> None:
    with pytest.raises(weft.InvalidArgument, match=r"'nvlink' without a name.*engine="):
        weft.supports("nvlink")


@pytest.mark.parametrize("where", ["constructor", "calls"])
@pytest.mark.parametrize("state", ["meta", "bfloat16", "float64", "deterministic"])
def test_ambient_state_changes_nothing(solo: weft.Communicator, where: str, state: str) -> None:
    """Default device and dtype, and deterministic fills, as a user's constructors and models set them."""
    shape: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 64}

    def run(ep: weft.ExpertParallel) -> list[Tensor]:
        made: list[Tensor] = []
        for options in ({}, {"layout": "expert_major"}, {"layout": "masked", "capacity": 3}, {"quantize": "fp8"}):
            x = X.clone().requires_grad_("quantize" not in options)
            r = ep.dispatch(x, IDX, WEIGHTS, **options)
            parts = list(r.x) if isinstance(r.x, weft.Quantized) else [r.x]
            y = ep.empty_output(r).copy_(parts[0].detach())
            z, side = ep.combine(y, r.handle, side=r.topk_weights.detach())
            if x.requires_grad:
                ep.combine(r.x * 2, r.handle).sum().backward()
                made.append(x.grad)  # type: ignore[arg-type]
            made += [r.topk_weights, r.num_tokens_per_expert, r.offsets, r.num_rows, r.overflow, z, side]
        ep.warmup()
        ep.check()
        assert ep.stats()["num_dropped"] == int(r.overflow)
        return made

    def make() -> weft.ExpertParallel:
        return weft.ExpertParallel(solo, **shape, dtype=torch.float32)

    with make() as ep:
        want = run(ep)
    was = torch.get_default_dtype()
    try:
        if state == "deterministic":
            torch.use_deterministic_algorithms(True)
        elif state != "meta":
            torch.set_default_dtype(getattr(torch, state))
        with torch.device("meta" if state == "meta" else "cpu"):
            ep = make()
            got = run(ep) if where == "calls" else []
    finally:
        torch.set_default_dtype(was)
        torch.use_deterministic_algorithms(False)
    got = got or run(ep)
    ep.close()
    for a, b in zip(got, want, strict=True):
        assert a.device == b.device
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
