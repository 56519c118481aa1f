"""Guards against ranks that wait for one that has refused its own call, or left by an exception, without being told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import weft
from weft.call import ops

SHAPE = {"num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8}
REFUSAL = "rank 1 refused its call: InvalidArgument: topk_idx has dtype torch.float32; allowed are torch.int32"
LOG = "rank 0: waiting for rank 1, which refused its call: InvalidArgument: topk_idx has dtype torch.float32"


class Ear(logging.Handler):
    """What Weft logs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("weft").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def rows() -> torch.Tensor:
    return torch.ones(2, 16, dtype=torch.bfloat16)


def picks() -> torch.Tensor:
    return torch.tensor([[0, 3]] * 2)


def step(ep: weft.ExpertParallel, **options: Any) -> float:
    r = ep.dispatch(rows(), picks(), **options)
    return float(ep.combine(r.x, r.handle, **options)[0, 0])


def refuse(call: Callable[[], object]) -> None:
    with pytest.raises(weft.Error) as caught:
        call()
    assert not isinstance(caught.value, weft.PeerTimeout | weft.PeerLost)


def timeout_of(call: Callable[[], object]) -> str:
    with pytest.raises(weft.PeerTimeout) as caught:
        call()
    return str(caught.value)


def _refuse_and_be_late(comm: weft.Communicator) -> tuple[str, list[str]]:
    ear = Ear()
    ep = weft.ExpertParallel(comm, **SHAPE)
    if comm.rank == 1:
        refuse(lambda: ep.dispatch(rows(), picks().float()))
        end = time.monotonic() + 60
        while not comm.broken and time.monotonic() < end:
            time.sleep(0.01)
        return timeout_of(lambda: step(ep)), []
    return timeout_of(lambda: step(ep, deadline_s=3.0)), [line for line in ear.lines if "waiting for" in line]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_the_peers_of_a_rank_that_refused_its_call_are_told(isolation: str) -> None:
    (text, lines), (own, _) = weft.spawn(_refuse_and_be_late, 2, device="cpu", isolation=isolation)
    assert REFUSAL in text
    assert REFUSAL in own
    assert len(lines) == 1
    assert LOG in lines[0]


def _refuse_and_repeat(comm: weft.Communicator) -> tuple[float, str, list[str]]:
    ear = Ear()
    ep = weft.ExpertParallel(comm, **SHAPE)
    if comm.rank == 1:
        refuse(lambda: ep.dispatch(rows(), picks().float()))
        time.sleep(2.5)
    value = step(ep)
    if comm.rank == 1:
        time.sleep(3.0)
    text = timeout_of(lambda: step(ep, deadline_s=1.5 if comm.rank == 0 else 30.0))
    return value, text, [line for line in ear.lines if "waiting for" in line]


def test_a_refused_call_may_be_repeated_and_is_forgotten_then() -> None:
    """A later delay of the same rank has another cause."""
    (value, text, lines), (own, late, _) = weft.spawn(_refuse_and_repeat, 2, device="cpu")
    assert value == own == 2.0
    assert "refused" not in text
    assert "refused" not in late
    assert len(lines) == 1
    assert LOG in lines[0]


class WithoutMemory(torch.autograd.Function):
    """A gradient that can't be sent."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.clone()
        grad.untyped_storage().resize_(0)
        return grad


class Sparse(WithoutMemory):
    """A gradient that is no dense tensor."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.contiguous().to_sparse()


def tracked(ep: weft.ExpertParallel, x: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """The result of a layer by expert, whose backward is a dispatch."""
    r = ep.dispatch((rows() if x is None else x).requires_grad_(), picks(), layout="expert_major", **options)
    y: torch.Tensor = ep.combine(r.x, r.handle, **options)
    return y


def _refuse(comm: weft.Communicator, what: str) -> str:
    """Rank 1 refuses its call, for which rank 0 waits."""
    ep = None if what == "constructor" else weft.ExpertParallel(comm, **SHAPE)
    if ep is None:
        wrong, right = (partial(weft.ExpertParallel, comm, **dict(SHAPE, num_experts=num)) for num in (5, 4))
        right = partial(right, deadline_s=1.0)
    else:
        wrong, right = _calls(comm, ep, what)
    if comm.rank == 0:
        return timeout_of(right)
    refuse(wrong)
    time.sleep(2.0)
    return ""


def _calls(comm: weft.Communicator, ep: weft.ExpertParallel, what: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What rank 1 calls, and what rank 0 does."""
    right: Callable[[], Any] = partial(step, ep, deadline_s=1.0)
    if what == "rebuild":
        return lambda: comm.rebuild([0, 7]), lambda: comm.rebuild([0, 1], deadline_s=1.0)
    if what == "bad ids":
        ep.dispatch(rows(), picks() + 50 * comm.rank)
        return partial(step, ep), right
    if what == "staged":
        return lambda: ep.dispatch(rows().requires_grad_(), picks(), capacity=8, staged=True), right
    if what == "closed":
        if comm.rank == 1:
            ep.close()
        return partial(step, ep), right
    if what == "gradient":
        y = tracked(ep, deadline_s=1.0)
        return lambda: WithoutMemory.apply(y).sum().backward(), lambda: y.sum().backward()  # type: ignore[no-untyped-call]
    if what == "batched gradient":
        x = rows()
        y = tracked(ep, x, deadline_s=1.0)
        several = torch.ones(3, *y.shape, dtype=y.dtype)
        other_x = rows().requires_grad_()
        torch.autograd.grad(other_x * 1, other_x, several, is_grads_batched=True)  # the first one takes longer
        return lambda: torch.autograd.grad(y, x, several, is_grads_batched=True), lambda: y.sum().backward()
    if what == "sparse gradient":
        y = tracked(ep, deadline_s=1.0)
        return lambda: Sparse.apply(y).sum().backward(), lambda: y.sum().backward()  # type: ignore[no-untyped-call]
    other = weft.ExpertParallel(comm, **SHAPE) if what == "other object" else ep
    r = other.dispatch(rows(), picks())
    if what == "old epoch":
        comm.rebuild([0, 1])
        return lambda: ep.dispatch(rows(), handle=r.handle), right
    if what == "other object":
        return lambda: ep.combine(r.x, r.handle), right
    assert what == "combine"
    return lambda: ep.combine(r.x[:, :8], r.handle), lambda: ep.combine(r.x, r.handle, deadline_s=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("constructor", "InvalidArgument: num_experts is 5"),
        ("rebuild", "InvalidArgument: ranks is [0, 7]"),
        ("bad ids", "InvalidArgument: topk_idx of an earlier dispatch had 4 ids"),
        ("combine", "InvalidArgument: expert_output"),
        ("staged", "Unsupported: staged=True with gradients"),
        ("closed", "InvalidState: dispatch: the ExpertParallel is closed"),
        ("gradient", "InvalidArgument: the gradient of the result of combine has no memory"),
        ("batched gradient", "InvalidArgument: the gradient of the result of combine belongs to a transform"),
        ("sparse gradient", "InvalidArgument: the gradient of the result of combine has layout torch.sparse_coo"),
        ("old epoch", "InvalidState: dispatch: the handle is of epoch"),
        ("other object", "InvalidState: combine: the handle is of another ExpertParallel"),
    ],
)
def test_every_collective_call_tells(what: str, says: str) -> None:
    assert f"rank 1 refused its call: {says}" in weft.spawn(_refuse, 2, args=(what,), device="cpu")[0]


@pytest.fixture
def told(comm: weft.Communicator) -> Callable[[Callable[[], object]], bool]:
    """Whether the peers, if there were any, would be told of what a call refuses."""

    def told(call: Callable[[], object]) -> bool:
        comm._has_refused = False
        refuse(call)
        return comm._has_refused

    return told


@pytest.fixture
def comm() -> Iterator[weft.Communicator]:
    with weft.Communicator.from_env() as comm:
        yield comm


def test_what_else_is_told(comm: weft.Communicator, told: Any) -> None:
    """Where a call begins without `dispatch` or `combine`, and refusals of what lies below them."""
    ep = weft.ExpertParallel(comm, **SHAPE, num_windows=2)
    h = ep.dispatch(rows(), picks()).handle
    staged = ep.dispatch(rows(), picks(), capacity=8, staged=True, window=1)
    assert told(lambda: ep.dispatch(rows(), picks(), window=1))
    weights = torch.ones(2, 2).requires_grad_()
    hidden = ep.dispatch(rows().requires_grad_(), picks(), weights, layout="expert_major")
    outputs = hidden.x * 2
    ep.combine(outputs, hidden.handle)
    outputs.detach().zero_()
    assert told(lambda: outputs.sum().backward())  # found by the hook: the result is not used
    assert told(lambda: torch.compile(ep.dispatch, backend="eager")(rows(), picks().float()))
    y = tracked(ep)
    with comm.alone("test"):
        for call in (
            lambda: step(ep),
            staged.wait,
            ep.warmup,
            lambda: comm.rebuild([0]),
            lambda: weft.ExpertParallel(comm, **SHAPE),
            lambda: y.sum().backward(),
        ):
            assert told(call)
        for call in (ep.check, lambda: ep.empty_output(staged), comm.close):
            assert not told(call)  # nobody waits for it
    comm.rebuild([0])
    old = (h.weights, h.send_plan, h.recv_plan, h.tie, h.sizes)
    its = (h.call.numbers, h.call.deadline_s)
    assert told(lambda: ops.combine(rows(), *old, None, None, 2, 2, *its, True, False))
    assert told(lambda: ops.dispatch_again(rows(), None, *old, *its, False, 0))
    ep.close()
    assert told(lambda: ops.dispatch(rows(), None, picks(), None, ep.calls.name, *its, 0, False))
    assert told(ep.warmup)


def _mismatch(comm: weft.Communicator) -> str:
    ep = weft.ExpertParallel(comm, **SHAPE)
    refuse(lambda: ep.dispatch(rows(), picks(), layout="expert_major" if comm.rank else "rank_major"))
    if comm.rank == 1:
        time.sleep(2.0)
        return ""
    return timeout_of(lambda: step(ep, deadline_s=1.0))


def test_what_every_rank_raises_is_no_refusal() -> None:
    assert "refused" not in weft.spawn(_mismatch, 2, device="cpu")[0]


def _refusal_of_an_epoch_before(comm: weft.Communicator) -> str:
    ep = weft.ExpertParallel(comm, **SHAPE)
    if comm.rank == 1:
        refuse(lambda: ep.dispatch(rows(), picks().float()))
    comm._native.rebuild([0, 1], 60.0)  # without Python's part, which takes the refusal back
    if comm.rank == 1:
        time.sleep(2.0)
        return ""
    return timeout_of(lambda: step(ep, deadline_s=1.0))


def test_a_refusal_of_an_earlier_epoch_does_not_count() -> None:
    assert "refused" not in weft.spawn(_refusal_of_an_epoch_before, 2, device="cpu")[0]


def _leave_by_an_exception(comm: weft.Communicator, error: BaseException | None, where: str) -> str:
    ep = None if where == "constructor" else weft.ExpertParallel(comm, **SHAPE)
    if comm.rank == 1:
        with comm:
            if error is not None:
                raise error
        return ""
    with pytest.raises(weft.PeerLost) as caught:
        weft.ExpertParallel(comm, **SHAPE) if ep is None else (time.sleep(0.5), step(ep))
    with pytest.raises(weft.PeerLost) as again:
        comm.raise_if_broken() if ep is None and comm.broken else step(ep or weft.ExpertParallel(comm, **SHAPE))
    assert caught.value.ranks == again.value.ranks == (1,)
    return str(caught.value)


@pytest.mark.parametrize("where", ["call", "constructor"])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no data\nsecond line"), "rank 1 closed its communicator after ValueError: no data"),
        (KeyboardInterrupt(), "rank 1 closed its communicator after KeyboardInterrupt"),
        (SystemExit(4), "rank 1 closed its communicator after SystemExit: 4"),
        (SystemExit(0), "closed its communicator"),
        (None, "closed its communicator"),
    ],
)
def test_the_peers_of_a_rank_that_left_by_an_exception_are_told(
    error: BaseException | None, says: str, where: str
) -> None:
    text = weft.spawn(_leave_by_an_exception, 2, args=(error, where), device="cpu", on_failure="return")[0]
    assert isinstance(text, str), text
    assert says in text
    assert "second line" not in text
    assert ("after" in text) == (says != "closed its communicator")


def test_spawn_tells_the_peers_of_a_rank_that_failed() -> None:
    def rank(comm: weft.Communicator) -> str:
        ep = weft.ExpertParallel(comm, **SHAPE)
        if comm.rank == 1:
            raise ValueError("wrong weights")
        with pytest.raises(weft.PeerLost) as caught:
            step(ep)
        return str(caught.value)

    text = weft.spawn(rank, 2, device="cpu", on_failure="return")[0]
    assert "rank 1 closed its communicator after ValueError: wrong weights; call rebuild" in text
