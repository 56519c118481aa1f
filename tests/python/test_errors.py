"""Guards against errors that do not say what is wrong, against refusals that come after something was sent, and against
ranks that learn of a failure late, wrongly or never."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from joining_cases import dies_behind
from test_api import tokens

import weft
from weft import errors

SHAPE: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 64, "dtype": torch.float32
}  # fmt: skip


# ---- the classes


def every_error() -> list[weft.Error]:
    return [
        weft.InvalidArgument("x"), weft.InvalidState("x"), weft.Unsupported("wire", "the cpu engine", "a GPU"),
        weft.CapacityExceeded(7), weft.PeerTimeout("combine", 12, [1, 3]), weft.PeerLost([2]), weft.CompileError("x"),
        weft.CudaError("x"), weft.InternalError("x"), weft.Aborted("why", 1, "why it aborted"),
    ]  # fmt: skip


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_errors_survive_pickle(error: weft.Error) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert isinstance(again, weft.Error)
    assert isinstance(again, RuntimeError)


def test_attributes_and_texts() -> None:
    assert isinstance(weft.InvalidArgument(""), ValueError)
    timeout = weft.PeerTimeout("combine", 12, [1, 3])
    assert (timeout.op, timeout.seq, timeout.peers) == ("combine", 12, (1, 3))
    assert re.search(r"combine 12: no answer from ranks 1, 3 before the deadline", str(timeout))
    lost = weft.PeerLost([2])
    assert lost.ranks == (2,)
    assert str(lost) == "lost rank 2; comm.rebuild(ranks left) goes on without it"
    unsupported = weft.Unsupported("wire='fp8'", "the cpu engine", "a GPU engine")
    assert (unsupported.feature, unsupported.have, unsupported.need) == ("wire='fp8'", "the cpu engine", "a GPU engine")
    assert str(unsupported) == "wire='fp8' is not supported: have the cpu engine, need a GPU engine"
    assert weft.CapacityExceeded(7).num_dropped == 7


@pytest.mark.parametrize(
    ("code", "kind"), list(enumerate([type(error) for error in every_error()], 1)), ids=lambda value: str(value)
)
def test_native_codes(code: int, kind: type[weft.Error]) -> None:
    error = errors.from_native(code, "a text", "dispatch", 5, [1])
    assert type(error) is kind
    assert str(error) == "a text"
    if kind is weft.PeerTimeout:
        assert (error.op, error.seq, error.peers) == ("dispatch", 5, (1,))  # type: ignore[attr-defined]


def test_unknown_native_code_is_internal() -> None:
    assert type(errors.from_native(99, "a text")) is weft.InternalError


# ---- refused arguments


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 0}, r"num_experts is 0; allowed: 1 to 1048576"),
        ({"num_experts": 1 << 31}, r"num_experts is 2147483648; allowed: 1 to 1048576"),
        ({"hidden": 1 << 62}, r"hidden is \d+; allowed: 1 to 1048576"),
        ({"top_k": 129}, r"top_k is 129; allowed: 1 to 128"),
        ({"top_k": 0}, r"top_k is 0; allowed: 1 to 128"),
        (
            {"hidden": 6},
            r"hidden is 6; allowed with float32 are multiples of 4, so that a row is",
        ),
        ({"hidden": "16"}, r"hidden is '16'; allowed: 1 to 1048576"),
        ({"max_tokens_per_rank": -1}, r"max_tokens_per_rank is -1; allowed: 0 to 16777215"),
        ({"dtype": torch.float64}, r"dtype is 'float64'; allowed: bfloat16, float16, float32"),
        ({"num_sms": 0}, r"num_sms is 0; allowed: None, or 1 to 64"),
        ({"deadline_s": 0}, r"deadline_s is 0; allowed: seconds above 0"),
        ({"heap_bytes": -1}, r"heap_bytes is -1; allowed: None, or 0 to 70368744177664"),
        ({"heap_bytes": 1 << 70}, r"heap_bytes is \d+; allowed: None, or 0 to 70368744177664"),
        ({"num_windows": 0}, r"num_windows is 0; allowed: 1 to 1024"),
        ({"num_windows": 1 << 40}, r"num_windows is 1099511627776; allowed: 1 to 1024"),
        ({"sum_domain": 0}, r"sum_domain is 0; allowed: None, or 1 to the number of ranks"),
        ({"sum_domain": True}, r"sum_domain is True; allowed: None, or 1 to the number of ranks"),
        ({"small_tokens": 0}, r"small_tokens is 0; allowed: None, or 1 to 16777215"),
        ({"traffic_class": -1}, r"traffic_class is -1; allowed: None, or 0 to 255"),
        ({"traffic_class": 256}, r"traffic_class is 256; allowed: None, or 0 to 255"),
        ({"node_ranks": 0}, r"node_ranks is 0; allowed: None, or 1 to the number of ranks"),
        ({"node_ranks": 2}, r"node_ranks is 2; allowed: None, or 1 to the number of ranks, 1"),
        ({"sum_domain": 2}, r"sum_domain is 2; allowed: None, or 1 to the number of ranks, 1"),
        ({"deadline_s": None}, r"deadline_s is None; allowed: seconds above 0, at most 1e9"),
        ({"deadline_s": 10**400}, r"deadline_s is 10+; allowed: seconds above 0, at most 1e9"),
        ({"dtype": "bfloat16"}, r"dtype is 'bfloat16'; allowed: torch.bfloat16, torch.float16, torch.float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_constructor_refuses(solo: weft.Communicator, change: dict[str, Any], text: str) -> None:
    with pytest.raises(weft.InvalidArgument, match=text):
        weft.ExpertParallel(solo, **{**SHAPE, **change})
    weft.ExpertParallel(solo, **SHAPE).close()


def test_constructor_wants_a_communicator() -> None:
    with pytest.raises(weft.InvalidArgument, match=r"comm is None; a weft.Communicator is expected"):
        weft.ExpertParallel(None, **SHAPE)  # type: ignore[arg-type]


X, IDX, WEIGHTS = tokens()
BYTES = torch.zeros(5, 32, dtype=torch.uint8)

DISPATCH: list[tuple[dict[str, Any], type[weft.Error], str]] = [
    ({"x": [1.0]}, weft.InvalidArgument, r"x is a list; a tensor \[T, 16\] or a weft.Quantized is expected"),
    ({"x": X[:, :8]}, weft.InvalidArgument, r"x has shape \[5, 8\]; allowed is \[T, 16\]"),
    ({"x": X.bfloat16()}, weft.InvalidArgument, r"x has dtype torch.bfloat16; allowed is .* torch.float32"),
    ({"x": X.to("meta")}, weft.InvalidArgument, r"x is on meta; allowed is the device of the communicator, cpu"),
    ({"x": torch.zeros(65, 16)}, weft.InvalidArgument, r"x has 65 tokens; allowed are 0 to max_tokens = 64"),
    ({"max_tokens": 4}, weft.InvalidArgument, r"x has 5 tokens; allowed are 0 to max_tokens = 4"),
    ({"max_tokens": 65}, weft.InvalidArgument, r"max_tokens is 65; allowed are 0 to max_tokens_per_rank = 64"),
    ({"topk_idx": None}, weft.InvalidArgument, r"topk_idx is None; a tensor \[T, 2\], or a handle, is expected"),
    ({"topk_idx": IDX[:4]}, weft.InvalidArgument, r"topk_idx has shape \[4, 2\]; allowed is \[T, top_k\] = \[5, 2\]"),
    ({"topk_idx": IDX.short()}, weft.InvalidArgument, r"topk_idx has dtype torch.int16; allowed are torch.int32 and"),
    ({"topk_weights": 1.0}, weft.InvalidArgument, r"topk_weights is 1.0; a tensor \[T, 2\] or None is expected"),
    ({"topk_weights": WEIGHTS[:, :1]}, weft.InvalidArgument, r"topk_weights has shape \[5, 1\]; allowed .* \[5, 2\]"),
    ({"topk_weights": WEIGHTS.double()}, weft.InvalidArgument, r"topk_weights has dtype torch.float64; allowed is"),
    ({"layout": "flat"}, weft.InvalidArgument, r"layout is 'flat'; allowed: rank_major, expert_major, masked"),
    ({"alignment": 0}, weft.InvalidArgument, r"alignment is 0; allowed: 1 to 1048576"),
    ({"alignment": 1 << 70, "layout": "expert_major"}, weft.InvalidArgument, r"alignment is \d+; allowed: 1 to 104"),
    ({"alignment": 8}, weft.InvalidArgument, r"alignment is 8 with layout 'rank_major'; allowed are"),
    ({"layout": "masked"}, weft.InvalidArgument, r"capacity is None; layout 'masked' needs the number of rows"),
    ({"capacity": -2}, weft.InvalidArgument, r"capacity is -2; allowed: None, or 0 to 2147483647"),
    ({"capacity": 1 << 70}, weft.InvalidArgument, r"capacity is \d+; allowed: None, or 0 to 2147483647"),
    ({"quantize": "int8"}, weft.InvalidArgument, r"quantize is 'int8'; allowed: None, fp8, fp8_ue8m0, fp8_pow2"),
    ({"quantize": "fp8", "x": X.clone().requires_grad_()}, weft.Unsupported, r"an x that requires grad"),
    ({"scale_layout": "flat"}, weft.InvalidArgument, r"scale_layout is 'flat'; allowed: row_major, column_major"),
    ({"zero_holes": None}, weft.InvalidArgument, r"zero_holes is None; allowed: True, False"),
    ({"scale_layout": "column_major"}, weft.InvalidArgument, r"'column_major' with rows that have no scales; allowed"),
    ({"scale_layout": "column_major", "x": weft.Quantized(BYTES)}, weft.InvalidArgument, r"rows that have no scales"),
    ({"mode": "fast"}, weft.InvalidArgument, r"mode is 'fast'; allowed: auto, throughput, latency"),
    ({"num_sms": 0}, weft.InvalidArgument, r"num_sms is 0; allowed: None, or 1 to 64"),
    ({"deadline_s": -1.0}, weft.InvalidArgument, r"deadline_s is -1.0; allowed: seconds above 0"),
    ({"staged": 1}, weft.InvalidArgument, r"staged is 1; allowed: True, False"),
    ({"async_op": None}, weft.InvalidArgument, r"async_op is None; allowed: True, False"),
    ({"window": True}, weft.InvalidArgument, r"window is True; allowed are 0 to num_windows - 1 = 0"),
    ({"x": X.to_sparse()}, weft.InvalidArgument, r"x has layout torch.sparse_coo; allowed is a dense tensor"),
    ({"topk_idx": IDX.to_sparse()}, weft.InvalidArgument, r"topk_idx has layout torch.sparse_coo; allowed is a dense"),
    ({"window": 1}, weft.InvalidArgument, r"window is 1; allowed are 0 to num_windows - 1 = 0"),
    ({"x": weft.Quantized(BYTES), "quantize": "fp8"}, weft.InvalidArgument, r"an x that is quantised already"),
    ({"x": weft.Quantized(BYTES.int())}, weft.InvalidArgument, r"x.data is a tensor \[5, 32\] torch.int32; allowed is"),
    ({"x": weft.Quantized(BYTES[:, :24])}, weft.InvalidArgument, r"rows of 24 bytes; allowed are multiples of 16"),
    ({"x": weft.Quantized(BYTES, BYTES[:4])}, weft.InvalidArgument, r"x.scales is .*; allowed is None or"),
    ({"x": weft.Quantized(BYTES, BYTES.float())}, weft.InvalidArgument, r"rows of 160 bytes, scales included; allowed"),
    ({"handle": 3, "topk_idx": None}, weft.InvalidArgument, r"handle is 3; the handle of a dispatch is expected"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "text"), DISPATCH)
def test_dispatch_refuses(ep: weft.ExpertParallel, change: dict[str, Any], kind: type[weft.Error], text: str) -> None:
    right: dict[str, Any] = {"x": X, "topk_idx": IDX, "topk_weights": None}
    with pytest.raises(kind, match=text):
        ep.dispatch(**{**right, **change})
    assert ep.stats()["num_dispatches"] == 0, "nothing was sent"
    assert torch.equal(ep.dispatch(**right).x, X), "the call may be repeated"


HANDLE: list[tuple[dict[str, Any], str]] = [
    ({"topk_idx": IDX}, r"topk_idx or topk_weights is given beside handle"),
    ({"layout": "masked"}, r"layout is 'masked' beside handle; allowed is that of the handle, 'expert_major', or none"),
    ({"alignment": 8}, r"alignment is 8 beside handle; allowed is that of the handle, 4, or none"),
    ({"scale_layout": "column_major"}, r"scale_layout is 'column_major' with rows that have no scales"),
    ({"capacity": 5}, r"capacity is 5 beside handle; allowed is that of the handle, None, or none"),
    ({"x": X[:4]}, r"x has 4 tokens; allowed are 5, the tokens of the handle"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), HANDLE)
def test_repeated_dispatch_refuses(ep: weft.ExpertParallel, change: dict[str, Any], text: str) -> None:
    handle = ep.dispatch(X, IDX, layout="expert_major", alignment=4).handle
    with pytest.raises(weft.InvalidArgument, match=text):
        ep.dispatch(**{"x": X, "handle": handle, **change})
    ep.dispatch(X, handle=handle, layout="expert_major", alignment=4)


COMBINE: list[tuple[dict[str, Any], type[weft.Error], str]] = [
    ({"expert_output": None}, weft.InvalidArgument, r"expert_output is None; a tensor \[5, 16\] is expected"),
    ({"expert_output": X[:4]}, weft.InvalidArgument, r"expert_output has shape \[4, 16\]; allowed is that of"),
    ({"expert_output": X.double()}, weft.InvalidArgument, r"expert_output has dtype torch.float64; allowed are"),
    ({"expert_output": X.to_sparse()}, weft.InvalidArgument, r"expert_output has layout torch.sparse_coo; allowed"),
    ({"out": X.to_sparse()}, weft.InvalidArgument, r"out has layout torch.sparse_coo; allowed is a dense tensor"),
    ({"handle": None}, weft.InvalidArgument, r"handle is None; the handle of a dispatch is expected"),
    ({"weighted": 1}, weft.InvalidArgument, r"weighted is 1; allowed: True, False"),
    ({"side": X}, weft.InvalidArgument, r"side has shape \[5, 16\]; allowed: \[5\] or \[5, 2\]"),
    ({"side": WEIGHTS.double()}, weft.InvalidArgument, r"side has dtype torch.float64; allowed: torch.float32"),
    ({"side": WEIGHTS.clone().requires_grad_()}, weft.Unsupported, r"gradients of side is not supported"),
    ({"bias": X[:, 0]}, weft.InvalidArgument, r"bias has shape \[5\]; allowed: \[5, 16\] or \[16\]"),
    ({"bias": X.half()}, weft.InvalidArgument, r"bias has dtype torch.float16; allowed: torch.float32"),
    ({"out": X[:3]}, weft.InvalidArgument, r"out has shape \[3, 16\]; allowed: \[5, 16\]"),
    ({"out": torch.zeros(16, 5).t()}, weft.InvalidArgument, r"out has strides \[1, 5\]; allowed is a contiguous"),
    ({"out": X.clone(), "expert_output": X.clone().requires_grad_()}, weft.InvalidArgument, r"out is given while"),
    ({"wire": "fp4"}, weft.InvalidArgument, r"wire is 'fp4'; allowed: None, fp8"),
    ({"window": -1}, weft.InvalidArgument, r"window is -1; allowed are 0 to num_windows - 1 = 0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "text"), COMBINE)
def test_combine_refuses(ep: weft.ExpertParallel, change: dict[str, Any], kind: type[weft.Error], text: str) -> None:
    right: dict[str, Any] = {"expert_output": X, "handle": ep.dispatch(X, IDX).handle}
    with pytest.raises(kind, match=text):
        ep.combine(**{**right, **change})
    assert ep.stats()["num_combines"] == 0, "nothing was sent"
    assert torch.equal(ep.combine(**right), X)


@pytest.mark.parametrize("name", ["expert_output", "side", "bias"])
def test_out_must_not_overlap_what_is_read(ep: weft.ExpertParallel, name: str) -> None:
    handle = ep.dispatch(X, IDX).handle
    memory = torch.zeros(6 * 16)
    out = memory[16:].view(5, 16)
    inputs = {"expert_output": memory[:80].view(5, 16), "side": memory[12:22].view(5, 2), "bias": memory[10:26]}
    given = {"expert_output": X, name: inputs[name]}
    with pytest.raises(weft.InvalidArgument, match=rf"out lies at 0x\w+ to 0x\w+ and overlaps {name} at 0x.*; allowed"):
        ep.combine(**given, handle=handle, out=out)
    assert not memory.any(), "nothing was written"
    ep.combine(memory[:80].view(5, 16).copy_(X), handle, out=torch.empty(5, 16))


def test_out_may_lie_beside_what_is_read(ep: weft.ExpertParallel) -> None:
    memory = torch.cat([X, X])
    out = ep.combine(memory[:5], ep.dispatch(X, IDX).handle, out=memory[5:].zero_())
    assert torch.equal(out, X), "ranges count, not storages"
    empty = torch.empty(0, 16)
    assert ep.combine(empty, ep.dispatch(empty, IDX[:0]).handle, out=empty) is empty


def test_empty_output_refuses(ep: weft.ExpertParallel) -> None:
    r = ep.dispatch(X, IDX)
    for wrong, text in ((None, "dispatched is None"), (r.handle, r"dispatched is weft.Handle\(rank_major")):
        with pytest.raises(weft.InvalidArgument, match=rf"{text}.*; the result of a dispatch is expected"):
            ep.empty_output(wrong)  # type: ignore[arg-type]


def test_results_can_not_be_assigned(ep: weft.ExpertParallel) -> None:
    """Checks look at what a dispatch has made: weights of another dtype would be read as fp32."""
    r = ep.dispatch(X, IDX)
    weights = r.topk_weights.double()
    for made in (r, r.handle):
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'topk_weights'"):
            made.topk_weights = weights  # type: ignore[misc]
    assert dataclasses.replace(r.handle, num_tokens=1).num_tokens == 1, "a copy may have others"
    assert r.handle.num_tokens == 5


def test_supports_agrees_with_dispatch(ep: weft.ExpertParallel) -> None:
    for layout in ("rank_major", "expert_major", "masked"):
        for alignment in (1, 16, 1 << 20, 1 << 21):
            options: dict[str, Any] = {"layout": layout, "alignment": alignment, "capacity": 8}
            if weft.supports(**options):
                ep.dispatch(X, IDX, **options)
            else:
                assert isinstance(raised(lambda: ep.dispatch(X, IDX, **options)), weft.InvalidArgument)  # noqa: B023
    assert weft.supports(alignment=16)


def test_fp8_needs_a_multiple_of_16(solo: weft.Communicator) -> None:
    with (
        weft.ExpertParallel(solo, **{**SHAPE, "hidden": 24}) as ep,
        pytest.raises(weft.Unsupported, match=r"hidden=24 is not supported: have hidden 24, need a multiple of 16"),
    ):
        ep.dispatch(torch.zeros(5, 24), IDX, quantize="fp8")


def test_device_texts(solo: weft.Communicator) -> None:
    with pytest.raises(weft.InvalidArgument, match=r"device is 'shelf'; allowed are"):
        weft.Communicator.from_env(device="shelf")
    with pytest.raises(weft.Unsupported, match=r"device meta is not supported"):
        weft.Communicator.from_env(device="meta")


# ---- what only the data shows


def test_bad_ids_raise_once_at_the_next_call(ep: weft.ExpertParallel) -> None:
    bad = IDX.clone()
    bad[1, 1], bad[3, 0] = 8, -2
    text = (
        r"2 ids out of range, the first 8 at token 1, pick 1; allowed are -1 to 7. They counted as -1; this combine "
        r"sent nothing and may be repeated"
    )
    r = ep.dispatch(X, bad)
    assert int((r.topk_idx >= 0).sum()) == 8
    with pytest.raises(weft.InvalidArgument, match=text):
        ep.combine(r.x, r.handle)
    assert torch.equal(ep.combine(r.x, r.handle), X), "raised once, then the call goes through"
    ep.dispatch(X, bad)
    with pytest.raises(weft.InvalidArgument, match=r"2 ids out of range"):
        ep.check()
    ep.check()


# ---- wrong handles and closed objects


def test_handle_of_another_object(solo: weft.Communicator, ep: weft.ExpertParallel) -> None:
    with weft.ExpertParallel(solo, **SHAPE) as other:
        handle = other.dispatch(X, IDX).handle
        with pytest.raises(weft.InvalidState, match=r"combine: the handle is of another ExpertParallel"):
            ep.combine(X, handle)
        with pytest.raises(weft.InvalidState, match=r"dispatch: the handle is of another ExpertParallel"):
            ep.dispatch(X, handle=handle)
        with pytest.raises(weft.InvalidState, match=r"empty_output: the handle is of another ExpertParallel"):
            ep.empty_output(other.dispatch(X, IDX))


def test_closed(solo: weft.Communicator, ep: weft.ExpertParallel) -> None:
    r = ep.dispatch(X, IDX)
    ep.close()
    ep.close()
    for call in (lambda: ep.dispatch(X, IDX), lambda: ep.combine(r.x, r.handle), ep.warmup, ep.check):
        with pytest.raises(weft.InvalidState, match="the ExpertParallel is closed; make a new one"):
            call()
    assert torch.equal(r.x, X), "results outlive what made them"
    assert "closed" in repr(ep)
    with weft.ExpertParallel(solo, **SHAPE) as open_ep:
        last = open_ep.dispatch(X, IDX)
        with pytest.raises(weft.InvalidState, match="empty_output: the handle is of another ExpertParallel"):
            open_ep.empty_output(r)
        solo.close()
        with pytest.raises(weft.InvalidState, match="empty_output: the communicator is closed; make a new one"):
            open_ep.empty_output(last)
    solo.close()
    with pytest.raises(weft.InvalidState, match="the communicator is closed; make a new one"):
        weft.ExpertParallel(solo, **SHAPE)
    assert torch.equal(r.x, X)
    assert "closed" in repr(solo)


# ---- several ranks


def raised(call: Callable[[], Any]) -> weft.Error:
    """The error of a call that must fail."""
    try:
        call()
    except weft.Error as error:
        return error
    raise AssertionError("nothing was raised")


def test_arguments_that_differ_between_ranks() -> None:
    def rank(comm: weft.Communicator) -> tuple[str, list[float]]:
        mine = {**SHAPE, "top_k": 2 if comm.rank < 2 else 3}
        error = raised(lambda: weft.ExpertParallel(comm, **mine))
        assert isinstance(error, weft.InvalidArgument)
        with weft.ExpertParallel(comm, **SHAPE) as ep:  # all is well afterwards
            return str(error), ep.dispatch(X, IDX).x.sum().tolist()

    for text, _ in weft.spawn(rank, 4):
        assert text == "top_k differs between ranks: 2 on ranks 0, 1; 3 on ranks 2, 3. It must be equal on all ranks"


def test_refusal_on_one_rank_may_be_repeated_while_the_others_wait() -> None:
    def rank(comm: weft.Communicator) -> bool:
        with weft.ExpertParallel(comm, **SHAPE) as ep:
            if comm.rank == 1:
                assert "x has shape" in str(raised(lambda: ep.dispatch(X[:, :8], IDX)))
            r = ep.dispatch(X, IDX, WEIGHTS, layout="expert_major")
            if comm.rank == 1:
                assert "expert_output has shape" in str(raised(lambda: ep.combine(r.x[:1], r.handle)))
            torch.testing.assert_close(ep.combine(r.x, r.handle), X * WEIGHTS.sum(1, keepdim=True))
            return True

    assert weft.spawn(rank, 2) == [True, True]


def test_ranks_that_call_different_things() -> None:
    def rank(comm: weft.Communicator) -> str:
        with weft.ExpertParallel(comm, **SHAPE) as ep:
            options = {"layout": "expert_major"} if comm.rank else {}
            error = raised(lambda: ep.dispatch(X, IDX, **options))
            assert isinstance(error, weft.InvalidArgument)
            assert torch.equal(ep.combine(X[:0], ep.dispatch(X[:0], IDX[:0]).handle), X[:0])
            return str(error)

    for text in weft.spawn(rank, 2):
        assert "rank_major" in text
        assert "expert_major" in text


def test_late_peer_is_a_timeout_and_never_before_the_deadline() -> None:
    deadline_s = 0.4
    reader, writer = os.pipe()  # rank 1 stays away until rank 0 has given up

    def rank(comm: weft.Communicator) -> tuple[float, tuple[int, ...], str, str]:
        with weft.ExpertParallel(comm, **SHAPE) as ep:
            ep.warmup()
            if comm.rank == 1:
                os.read(reader, 1)
                error = raised(lambda: ep.dispatch(X, IDX))
                assert isinstance(error, weft.PeerTimeout)
                return deadline_s, error.peers, str(error), error.op
            begin = time.monotonic()
            error = raised(lambda: ep.dispatch(X, IDX, deadline_s=deadline_s))
            seconds = time.monotonic() - begin
            os.write(writer, b".")
            assert isinstance(error, weft.PeerTimeout)
            assert comm.broken
            assert ep.stats()["num_dispatches"] == 0, "a call that failed does not count"
            assert str(raised(lambda: ep.dispatch(X, IDX))) == str(error), "the same error until a rebuild"
            assert type(raised(ep.check)) is weft.PeerTimeout
            assert "broken" in repr(comm)
            return seconds, error.peers, str(error), error.op

    for seconds, peers, text, op in weft.spawn(rank, 2):
        assert deadline_s <= seconds < 60
        assert peers == (1,)
        assert op == "dispatch"
        assert "rank 1" in text or "ranks 1" in text


def test_killed_peer_is_lost_on_every_rank_and_the_rest_goes_on(tmp_path: Path) -> None:
    def rank(comm: weft.Communicator) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
        with weft.ExpertParallel(comm, **SHAPE) as ep:
            old = ep.dispatch(X, IDX).handle
            dies_behind(comm, 2, tmp_path)
            error = raised(lambda: [ep.dispatch(X, IDX) for _ in range(100)])
            assert isinstance(error, weft.PeerLost)
            comm.rebuild([0, 1, 3])
            assert (comm.rank, comm.num_ranks) == (comm.rank, 4), "slots are stable"
            stale = raised(lambda: ep.combine(torch.zeros(len(old.topk_weights), 16), old))
            assert "the handle is of epoch 1, a rebuild began epoch" in str(stale)
            r = ep.dispatch(X, IDX, layout="expert_major")
            y = ep.combine(r.x, r.handle, weighted=False)
            left = torch.tensor([idx // 2 != 2 for idx in IDX.flatten().tolist()]).view(5, 2).sum(1, keepdim=True)
            torch.testing.assert_close(y, X * left)
            return str(error), error.ranks, comm.active_ranks, comm.epoch

    results = weft.spawn(rank, 4, on_failure="return")
    dead = results.pop(2)
    assert isinstance(dead, weft.PeerLost)
    assert dead.ranks == (2,)
    assert "rank 2 (pid " in str(dead)
    assert "SIGKILL" in str(dead)
    for text, ranks, active, epoch in results:
        assert ranks == (2,)
        assert "rank 2" in text
        assert active == (0, 1, 3)
        assert epoch > 1


def test_rebuild_refuses() -> None:
    def rank(comm: weft.Communicator) -> list[str]:
        return [str(raised(partial(comm.rebuild, ranks))) for ranks in ([0, 1, 7], [1 - comm.rank])]

    for number, (unknown, without_me) in enumerate(weft.spawn(rank, 2)):
        assert unknown == "ranks is [0, 1, 7]; allowed are active ranks: [0, 1]"
        assert f"lacks this rank, {number}" in without_me
