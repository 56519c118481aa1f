"""Guards against drift of the public API: names, signatures, shapes and dtypes that docs and users rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import weft
from weft.limits import gpu_window_bytes, memory

LAYOUTS = [("rank_major", {}), ("expert_major", {"alignment": 4}), ("masked", {"capacity": 40})]


def tokens(num_tokens: int = 5, hidden: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator)
    topk_idx = torch.rand(num_tokens, 8, generator=generator).topk(2).indices
    return x, topk_idx, torch.rand(num_tokens, 2, generator=generator)


def test_import_loads_neither_torch_nor_the_native_module() -> None:
    code = (
        "import sys, weft; weft.limits(); weft.supports(hidden=64);"
        "assert weft.__version__ and weft.InvalidArgument;"
        "assert not {'torch', 'weft._native'} & set(sys.modules), sorted(sys.modules);"
        "weft.limits.memory(4, 64, 8, 2048, 1024);"
        "assert 'torch' not in sys.modules, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("first", ["weft.spawn", "weft.limits"])
def test_functions_are_functions_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}, weft; assert callable(weft.spawn) and weft.limits().max_ranks and weft.limits.memory"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_every_exported_name_exists() -> None:
    for name in weft.__all__:
        assert getattr(weft, name) is not None, name
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = weft.nothing_like_it


def defaults(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "self"}


def test_signatures() -> None:
    empty = inspect.Parameter.empty
    assert defaults(weft.ExpertParallel) == {
        "comm": empty, "num_experts": None, "top_k": empty, "hidden": empty, "max_tokens_per_rank": empty,
        "dtype": torch.bfloat16, "num_sms": None, "deadline_s": 100.0, "heap_bytes": None, "num_windows": 1,
        "num_logical_experts": None, "sum_domain": None, "max_heap_bytes": None, "min_ranks": None,
        "node_ranks": None, "small_tokens": None, "traffic_class": None, "name": None,
    }  # fmt: skip
    common = {
        "num_sms": None, "deadline_s": None, "mode": "auto", "staged": False, "async_op": False, "window": 0
    }  # fmt: skip
    assert defaults(weft.ExpertParallel.dispatch) == {
        "x": empty, "topk_idx": None, "topk_weights": None, "handle": None, "side": None, "layout": "rank_major",
        "alignment": 1,
        "quantize": None, "scale_layout": "row_major", "zero_holes": True, "absent": "drop",
        "host_counts": False, "capacity": None, "max_tokens": None, **common,
    }  # fmt: skip
    assert defaults(weft.ExpertParallel.combine) == {
        "expert_output": empty, "handle": empty, "weighted": True, "side": None, "bias": None, "out": None,
        "wire": None, "weights": None, "topk_idx": None, "order": "rank", "side_lanes": "own", **common,
    }  # fmt: skip
    spawn = {"fn": empty, "num_ranks": 4, "args": (), "device": "auto", "isolation": "process"}
    assert defaults(weft.spawn).items() >= spawn.items()
    connect = {
        "device": None, "engine": "auto", "placement": "auto", "timeout_s": 300.0, "decide": None, "secret": None,
        "max_ranks": None,
    }  # fmt: skip
    assert defaults(weft.Communicator.from_process_group) == {"group": None, **connect}
    assert defaults(weft.Communicator.from_env) == connect


def test_one_rank_communicator(solo: weft.Communicator) -> None:
    assert (solo.rank, solo.num_ranks, solo.active_ranks) == (0, 1, (0,))
    assert solo.engine == "cpu"
    assert solo.device == torch.device("cpu")
    assert solo.topology.scaleup == (0,)
    text = repr(solo)
    assert "rank 0 of 1" in text
    assert "engine=cpu (" in text, "the repr says why"


def test_rank_major_shapes(ep: weft.ExpertParallel) -> None:
    x, topk_idx, topk_weights = tokens()
    r = ep.dispatch(x, topk_idx.to(torch.int32), topk_weights)
    assert torch.equal(r.x, x)
    assert r.topk_idx is not None
    assert r.topk_idx.dtype == torch.int32
    assert torch.equal(r.topk_idx, topk_idx.to(torch.int32))
    assert torch.equal(r.topk_weights, topk_weights)
    assert r.num_tokens_per_expert.tolist() == torch.bincount(topk_idx.flatten(), minlength=8).tolist()
    assert r.offsets.tolist() == [0, 5]
    assert int(r.num_rows) == 5
    assert {r.num_tokens_per_expert.dtype, r.offsets.dtype, r.num_rows.dtype} == {torch.int32}
    assert r.overflow.dtype == torch.int64
    assert r.event.query()
    assert r.wait() is r


def test_expert_major_shapes(ep: weft.ExpertParallel) -> None:
    x, topk_idx, topk_weights = tokens()
    r = ep.dispatch(x, topk_idx, topk_weights, layout="expert_major", alignment=4)
    counts = torch.bincount(topk_idx.flatten(), minlength=8)
    padded = (counts + 3) // 4 * 4
    assert r.topk_idx is None
    assert r.offsets.tolist() == [0, *padded.cumsum(0).tolist()]
    assert r.x.shape == (int(padded.sum()), 16)
    assert r.topk_weights.shape == (int(padded.sum()),)


def test_masked_shapes(ep: weft.ExpertParallel) -> None:
    x, topk_idx, topk_weights = tokens()
    r = ep.dispatch(x, topk_idx, topk_weights, layout="masked", capacity=6)
    assert r.x.shape == (8, 6, 16)
    assert r.topk_weights.shape == (8, 6)
    assert int(r.num_rows) == 10


@pytest.mark.parametrize(("layout", "options"), LAYOUTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_round_trip(ep: weft.ExpertParallel, layout: str, options: dict[str, int], num_tokens: int) -> None:
    x, topk_idx, topk_weights = tokens(num_tokens)
    r = ep.dispatch(x, topk_idx, topk_weights, layout=layout, **options)
    factor = topk_weights.sum(1, keepdim=True)
    outputs = ep.empty_output(r)
    outputs.copy_(r.x)
    if layout == "rank_major":
        outputs *= r.topk_weights.sum(1, keepdim=True)
    torch.testing.assert_close(ep.combine(outputs, r.handle), x * factor)
    plain = ep.combine(r.x, r.handle, weighted=False)
    torch.testing.assert_close(plain, x * (1 if layout == "rank_major" else 2))


def test_options_of_combine(ep: weft.ExpertParallel) -> None:
    x, topk_idx, topk_weights = tokens()
    r = ep.dispatch(x, topk_idx, topk_weights, layout="expert_major")
    bias = torch.arange(16.0)
    out = torch.empty_like(x)
    y, side, event = ep.combine(r.x, r.handle, side=r.topk_weights, bias=bias, out=out, async_op=True)
    assert y is out
    assert torch.equal(side, topk_weights)
    assert event.query()
    torch.testing.assert_close(y, x * topk_weights.sum(1, keepdim=True) + bias)
    rows = ep.dispatch(x, topk_idx)
    _, side = ep.combine(rows.x, rows.handle, side=torch.arange(5.0))
    assert torch.equal(side, torch.arange(5.0)[:, None].expand(5, 2)), "one value a row stands for each of its picks"


@pytest.mark.parametrize(
    ("quantize", "dtype"), [("fp8", torch.float32), ("fp8_ue8m0", torch.float8_e8m0fnu), ("fp8_pow2", torch.float32)]
)
def test_quantised_on_the_way(solo: weft.Communicator, quantize: str, dtype: torch.dtype) -> None:
    with weft.ExpertParallel(solo, num_experts=8, top_k=2, hidden=144, max_tokens_per_rank=8) as ep:
        x, topk_idx, _ = tokens(5, 144)
        r = ep.dispatch(x.bfloat16(), topk_idx, quantize=quantize)
        assert isinstance(r.x, weft.Quantized)
        assert (r.x.data.shape, r.x.data.dtype) == ((5, 144), torch.float8_e4m3fn)
        assert r.x.scales is not None
        assert (r.x.scales.shape, r.x.scales.dtype) == ((5, 2), dtype)
        wide = r.x.data.float() * r.x.scales.float().repeat_interleave(128, 1)[:, :144]
        torch.testing.assert_close(wide, x.bfloat16().float(), rtol=0.07, atol=0.02)
        again = ep.dispatch(r.x, topk_idx, layout="masked", capacity=9).x
        assert isinstance(again, weft.Quantized)
        assert again.data.shape == (8, 9, 144)
        assert again.scales is not None
        assert again.scales.shape == (8, 9, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64])
def test_column_major_scales(solo: weft.Communicator, dtype: torch.dtype) -> None:
    """Strides for TMA; bytes in words of four; the values are compared in test_property."""
    with weft.ExpertParallel(solo, num_experts=8, top_k=2, hidden=144, max_tokens_per_rank=8) as ep:
        _, topk_idx, _ = tokens(5, 144)
        scales = torch.arange(5 * 6).view(5, 6).to(dtype)
        given = weft.Quantized(torch.zeros(5, 144, dtype=torch.uint8), scales)
        first = ep.dispatch(given, topk_idx, scale_layout="column_major")
        again = ep.dispatch(given, handle=first.handle, scale_layout="column_major")
        masked = ep.dispatch(given, topk_idx, layout="masked", capacity=9, scale_layout="column_major")
        word, num_words = (torch.int32, 2) if dtype == torch.uint8 else (dtype, 6)
        for r, shape in ((first, (5, num_words)), (again, (5, num_words)), (masked, (8, 9, num_words))):
            assert isinstance(r.x, weft.Quantized)
            assert r.x.scales is not None
            per_column = 16 // word.itemsize
            stride = (shape[-2] + per_column - 1) // per_column * per_column
            assert (r.x.scales.shape, r.x.scales.dtype) == (shape, word)
            assert r.x.scales.stride() == (stride * num_words, 1, stride)[-len(shape) :]
            whole = r.x.scales.untyped_storage().nbytes()
            assert whole == word.itemsize * stride * num_words * (len(r.x.scales) if len(shape) == 3 else 1)
        assert torch.equal(again.x.scales, first.x.scales)  # type: ignore[union-attr]


def test_opaque_bytes(ep: weft.ExpertParallel) -> None:
    data = torch.arange(5 * 32, dtype=torch.uint8).view(5, 32)
    scales = torch.arange(5 * 3, dtype=torch.int16).view(5, 3)
    _, topk_idx, _ = tokens()
    for given in (weft.Quantized(data), weft.Quantized(data, scales)):
        r = ep.dispatch(given, topk_idx)
        assert isinstance(r.x, weft.Quantized)
        assert torch.equal(r.x.data, data)
        assert (r.x.scales is None) == (given.scales is None)
        if given.scales is not None:
            assert torch.equal(r.x.scales, scales)
        repeated = ep.dispatch(given, handle=r.handle).x
        assert torch.equal(repeated.data, data)


@pytest.mark.parametrize(("layout", "options"), LAYOUTS)
def test_nvfp4_passes(solo: weft.Communicator, layout: str, options: dict[str, int]) -> None:
    """Two values a byte, a scale of its own type per 16: they arrive in the types that they were given in."""
    values, scales = torch.randint(0, 256, (5, 32), dtype=torch.uint8), torch.randint(0, 100, (5, 4), dtype=torch.uint8)
    given = weft.Quantized(values.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn))
    topk_idx = torch.arange(5).view(5, 1)
    with weft.ExpertParallel(solo, num_experts=5, top_k=1, hidden=64, max_tokens_per_rank=8) as ep:
        r = ep.dispatch(given, topk_idx, layout=layout, **options)
        for rows in (r.x, ep.dispatch(given, handle=r.handle).x):
            assert isinstance(rows, weft.Quantized)
            assert rows.scales is not None
            assert (rows.data.dtype, rows.scales.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
            used = (slice(None), 0) if layout == "masked" else r.offsets[:-1] if layout == "expert_major" else slice(5)
            assert torch.equal(rows.data.view(torch.uint8)[used], values)
            assert torch.equal(rows.scales.view(torch.uint8)[used], scales)
        y = ep.combine(torch.zeros(*r.handle.rows_shape, 64), r.handle)
        assert y.shape == (5, 64)


@pytest.mark.parametrize(("layout", "options"), LAYOUTS)
def test_handle_serves_again(ep: weft.ExpertParallel, layout: str, options: dict[str, int]) -> None:
    x, topk_idx, topk_weights = tokens()
    r = ep.dispatch(x, topk_idx, topk_weights, layout=layout, **options)
    other, _, _ = tokens(seed=1)
    fresh = ep.dispatch(other, topk_idx, topk_weights, layout=layout, **options)
    repeated = ep.dispatch(other, handle=r.handle)
    wide = ep.dispatch(other.bfloat16(), handle=r.handle)
    for left, right in ((repeated, fresh), (r, r)):
        torch.testing.assert_close(
            ep.combine(left.x, left.handle, weighted=False), ep.combine(right.x, right.handle, weighted=False)
        )
    assert wide.x.dtype == torch.bfloat16
    assert torch.equal(repeated.topk_weights, r.topk_weights)


def test_capacity_counts_what_it_drops(ep: weft.ExpertParallel) -> None:
    x, topk_idx, topk_weights = tokens()
    r = ep.dispatch(x, topk_idx, topk_weights, capacity=3)
    assert r.x.shape == (3, 16)
    assert int(r.num_rows) == 3
    assert int(r.overflow) == 4
    y = ep.combine(r.x, r.handle)
    assert torch.equal(y[3:], torch.zeros(2, 16)), "dropped picks are absent"
    assert ep.stats()["num_dropped"] == 4
    with pytest.raises(weft.CapacityExceeded, match="4 picks"):
        ep.check()
    ep.check()
    r.overflow.zero_()  # not allowed, but no dropped picks
    ep.check()


def test_stats_count_calls(ep: weft.ExpertParallel) -> None:
    x, topk_idx, _ = tokens()
    r = ep.dispatch(x, topk_idx)
    ep.combine(r.x, r.handle)
    stats = ep.stats()
    assert (stats["num_dispatches"], stats["num_combines"]) == (1, 1)
    assert stats["rows_sent"] == 0, "nothing leaves for another rank"
    assert stats["windows"][0]["heap_bytes"] > 0


def test_layers_of_equal_shape_share_their_windows(solo: weft.Communicator) -> None:
    shape = {"num_experts": 8, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 64}
    first, second = (weft.ExpertParallel(solo, **shape) for _ in range(2))
    other = weft.ExpertParallel(solo, **{**shape, "top_k": 3}, num_windows=2)
    assert first.calls.windows == second.calls.windows
    assert len(set(other.calls.windows) | set(first.calls.windows)) == 3
    first.close()
    x, topk_idx, _ = tokens()
    assert torch.equal(second.dispatch(x.bfloat16(), topk_idx).x, x.bfloat16())
    second.close()
    assert second.calls.windows[0].closed
    third = weft.ExpertParallel(solo, **shape)
    assert torch.equal(third.dispatch(x.bfloat16(), topk_idx).x, x.bfloat16())


def test_second_window(solo: weft.Communicator) -> None:
    x, topk_idx, _ = tokens()
    with weft.ExpertParallel(
        solo, num_experts=8, top_k=2, hidden=16, max_tokens_per_rank=8, dtype=torch.float32, num_windows=2
    ) as ep:
        first, second = (ep.dispatch(x, topk_idx, window=window) for window in range(2))
        assert (first.handle.window, second.handle.window) == (0, 1)
        output = ep.empty_output(second).copy_(second.x)
        assert ep.calls.windows[1].native.owns(output.data_ptr())
        y = ep.combine(first.x, first.handle, window=0)
        assert torch.equal(ep.combine(output, second.handle, window=1), y)
        assert ep.dispatch(x, handle=second.handle, window=1).handle.window == 1
        text = "window is 0 with a handle of window 1; allowed is that of the handle"
        with pytest.raises(weft.InvalidArgument, match=text):
            ep.combine(output, second.handle, window=0)
        with pytest.raises(weft.InvalidArgument, match=text):
            ep.dispatch(x, handle=second.handle, window=0)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "masked"])
def test_scales_of_no_columns(ep: weft.ExpertParallel, layout: str) -> None:
    x, topk_idx, _ = tokens()
    given = weft.Quantized(torch.zeros(len(x), 32, dtype=torch.uint8), torch.empty(len(x), 0, dtype=torch.float16))
    first = ep.dispatch(given, topk_idx, layout=layout, capacity=9 if layout == "masked" else None)
    for rows in (first.x, ep.dispatch(given, handle=first.handle).x):
        assert isinstance(rows, weft.Quantized)
        assert rows.scales is not None
        assert rows.scales.shape == (*rows.data.shape[:-1], 0)
        assert rows.scales.dtype == torch.float16


def test_warmup_and_reprs(ep: weft.ExpertParallel) -> None:
    ep.warmup()
    x, topk_idx, _ = tokens()
    r = ep.dispatch(x, topk_idx)
    assert "8 experts" in repr(ep)
    assert "rank_major" in repr(r)
    assert "num_tokens=5" in repr(r.handle)
    assert "5, 16" in repr(weft.Quantized(x.to(torch.float8_e4m3fn)))
    assert repr(r.event) == "weft.Event(complete)"


def test_profiler_sees_the_calls(ep: weft.ExpertParallel) -> None:
    x, topk_idx, _ = tokens()
    with torch.profiler.profile() as profile:
        r = ep.dispatch(x, topk_idx)
        ep.combine(r.x, r.handle)
    names = {event.key for event in profile.key_averages()}
    assert {"weft::dispatch rank_major", "weft::combine rank_major"} <= names


def test_limits_and_supports() -> None:
    limits = weft.limits()
    assert (limits.max_ranks, limits.max_top_k) == (64, 128)
    assert weft.supports(layout="masked", quantize="fp8", hidden=7168, dtype=torch.bfloat16, num_ranks=8)
    refused = [
        {"wire": "fp4"}, {"engine": "nvlink", "num_ranks": 17}, {"wire": "fp8", "hidden": 24},
        {"num_sms": 65}, {"top_k": 129}, {"hidden": 12}, {"hidden": 24, "quantize": "fp8"},
        {"num_experts": 10, "num_ranks": 4}, {"layout": "masked", "capacity": None}, {"dtype": torch.float64},
        {"max_tokens": 9, "max_tokens_per_rank": 8}, {"window": 1, "num_windows": 1}, {"mode": "fast"},
        {"scale_layout": "flat"}, {"zero_holes": 1}, {"host_counts": 1},
    ]  # fmt: skip
    for options in refused:
        assert not weft.supports(**options), options
    on_gpus = {"engine": "nvlink", "num_ranks": 4, "num_experts": 8, "node_ranks": 2}
    assert weft.supports(**on_gpus)
    for more in ({"mode": "latency"}, {"staged": True, "capacity": 8}):
        assert weft.supports(**on_gpus, **more), more
    for more in ({"order": "last_pick"}, {"order": "pick"}, {"side_lanes": "all"}):
        assert not weft.supports(**on_gpus, **more), more
        assert weft.supports(**(on_gpus | {"node_ranks": 4}), **more), more
    with pytest.raises(weft.InvalidArgument, match=r"unknown options colour; allowed are .*layout"):
        weft.supports(colour="red")


GPU_WINDOWS = {
    (1, 8, 2, 16, 64): (52736, 110592),
    (4, 64, 8, 2048, 1024): (501440, 38408192),
    (16, 256, 128, 7168, 100): (4120768, 76189696),
    (3, 9, 1, 8, 1): (133632, 8192),
}
CPU_WINDOWS = {
    (1, 8, 2, 16, 64): (4096, 262144),
    (4, 64, 8, 2048, 1024): (8192, 1048576),
    (8, 256, 128, 7168, 4096): (20480, 2097152),
    (64, 64, 1, 8, 0): (180224, 16777216),
}


@pytest.mark.parametrize(("engine", "windows"), [("nvlink", GPU_WINDOWS), ("cpu", CPU_WINDOWS)])
def test_memory_of_windows(engine: str, windows: dict[tuple[int, ...], tuple[int, int]]) -> None:
    for shape, expected in windows.items():
        figures = memory(*shape, engine=engine)
        assert (figures["control_bytes"], figures["staging_bytes"]) == expected, shape
        assert figures["windows_bytes"] == sum(expected) + figures["heap_bytes"]


def test_memory_of_an_engine_that_there_is_not() -> None:
    with pytest.raises(weft.InvalidArgument, match="engine is 'gpu'; allowed: cpu, nvlink"):
        memory(1, 8, 2, 16, 64, engine="gpu")


def test_memory_of_more_gpus_than_the_engine_serves() -> None:
    assert gpu_window_bytes(72, 288, 8, 512, 14848, 512) == (8354496, 1649152000)


def test_memory_keeps_layers_only_in_training() -> None:
    once = memory(4, 64, 8, 2048, 1024, num_layers=10)
    training = memory(4, 64, 8, 2048, 1024, num_layers=10, training=True)
    assert training["layers_bytes"] == 10 * once["layers_bytes"]
    with pytest.raises(weft.InvalidArgument, match="num_experts is 10"):
        memory(4, 10, 8, 2048, 1024)


def test_stub_names_what_the_module_has() -> None:
    from weft import _native

    for name in ("Communicator", "Window", "DispatchResult", "Listener", "LocalHub"):
        assert hasattr(_native, name), name
    for name in ("version", "build_info", "send_plan_len", "window_bytes", "set_error_factory", "set_log_sink"):
        assert callable(getattr(_native, name)), name
    assert _native.version() == weft.__version__
