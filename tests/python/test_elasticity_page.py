"""Guards against examples of docs/elasticity.md that do not run: they are executed as they stand there; what they leave
to the caller is played here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joining_cases import LONG_S, Outer, open_group
from test_meeting import free_port
from test_readme import ROOT, blocks
from test_standby import until

import weft

STEPS = 6
HEAD = "while serving:"


def _text(phrase: str) -> str:
    """Of the one example that has this in it."""
    (found,) = [
        each.text for each in blocks(ROOT / "docs/elasticity.md") if each.language == "python" and phrase in each.text
    ]
    return found


def _run(text: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(text, "docs/elasticity.md", "exec"), names)
    return names


class _Serving:
    """What a rank of the serving example does: steps with checked words, until all that is to happen has happened."""

    def __init__(self, happens: dict[tuple[int, ...], Callable[[Any], None]], last: tuple[int, ...]) -> None:
        self.happens, self.last = happens, last
        self.comm: Any = None
        self.at, self.count = -1, 0

    def step(self, ep: weft.ExpertParallel) -> None:
        comm = self.comm = ep.comm
        if comm.epoch != self.at:
            self.at, self.count = comm.epoch, 0
        self.count += 1
        active = comm.active_ranks
        if self.count == STEPS and active in self.happens and comm.is_member:
            self.happens[active](comm)
        per_rank = ep.num_experts // comm.num_ranks
        x = torch.full((5, ep.hidden), float(comm.rank + 1), dtype=ep.dtype)
        ids = torch.arange(comm.num_ranks).repeat(5, 1) * per_rank
        found = ep.dispatch(x, ids)
        assert torch.equal(ep.combine(found.x, found.handle), x * len(active))

    def __bool__(self) -> bool:
        return self.comm is None or self.comm.active_ranks != self.last or self.count < 2 * STEPS


def _serve(outer_comm: Any, port: int) -> tuple[tuple[int, ...], bool]:
    """Four founders take two in and let rank 1 go; then rank 3 is killed."""
    outer = Outer(outer_comm)
    loop = _text(HEAD)
    loop = loop[loop.index(HEAD) :]

    def propose(comm: Any) -> None:
        if comm.rank == 0:
            ticket = _run(_text("ticket = comm.propose"), {"comm": comm})["ticket"]
            assert isinstance(ticket, weft.Ticket)

    def die(comm: Any) -> None:
        if comm.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    serving = _Serving({(0, 1, 2, 3): propose, (0, 2, 3, 4, 5): die}, (0, 2, 4, 5))
    names: dict[str, Any] = {"weft": weft, "serving": serving, "step": serving.step, "print": print}
    if outer.rank < 4:
        names["publish"] = lambda address: outer.tell(address.encode())
        os.environ |= {
            "RANK": str(outer.rank), "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        _run(_text("from_env(max_ranks=8)"), names)
    else:
        names["address"] = outer.tell()[0].decode()
        _run(_text("Communicator.join(address)"), names)
        _run(loop, names)
    return serving.comm.active_ranks if outer.rank != 1 else (), names["comm"]._closed


def test_a_serving_engine() -> None:
    """It grows, lets a rank go, and loses one."""
    seen = weft.spawn(_serve, 6, (free_port(),), device="cpu", on_failure="return")
    assert isinstance(seen.pop(3), weft.PeerLost)
    assert seen.pop(1) == ((), True)
    assert seen == [((0, 2, 4, 5), True)] * 4


def _train(outer_comm: Any) -> list[float]:
    """Rank 0 trains; rank 3 comes between two versions, rank 2 goes."""
    outer = Outer(outer_comm)
    comm, address = open_group(outer, 3, 4)
    seen: list[float] = []
    weights = torch.zeros(64)
    text = _text('comm.share("policy", weights)')
    trainer = 0

    class _Done(Exception):
        pass

    def make(of: weft.Communicator) -> weft.ExpertParallel:
        return weft.ExpertParallel(
            of, num_experts=8, top_k=4, hidden=64, max_tokens_per_rank=16, dtype=torch.float32, heap_bytes=1 << 20
        )

    def play(ep: weft.ExpertParallel, policy: torch.Tensor) -> None:
        seen.append(float(policy[0]))
        ids = torch.arange(4).repeat(3, 1) * 2
        for _ in range(3):
            found = ep.dispatch(policy.repeat(3, 1), ids)
            y = ep.combine(found.x, found.handle)
            assert torch.equal(y, policy.repeat(3, 1) * ep.comm.num_active)
        if ep.comm.active_ranks == (0, 1, 3) and policy[0] == 6:
            raise _Done
        if ep.comm.rank == trainer and policy[0] == 2:
            ep.comm.propose(admit=[3], remove=[2])

    def train(policy: torch.Tensor) -> None:
        policy += 1

    names: dict[str, Any] = {"play": play, "train": train, "trainer": trainer, "weights": weights}
    if comm is None:
        outer.wait()
        comm = weft.Communicator.join(address, device="cpu")
        ep = make(comm)
        comm.ready()
        outer.wait()
        assert comm.boundary(LONG_S) is not None
        comm.fetch("policy", rank=trainer, out=weights)
        text = text.replace("change = None\n", "", 1)
        names["change"] = None
    else:
        ep = make(comm)
        outer.wait()
        outer.wait()
        until(lambda: comm.membership.standby == (3,))
        comm.meet(LONG_S)
    try:
        _run(text, {**names, "comm": comm, "ep": ep})
    except _Done:
        pass
    else:
        assert comm.rank == 2
    outer.wait()
    comm.close()
    return seen


def test_an_rl_trainer() -> None:
    """All play by the weights of one version, also who comes between two; who goes ends its loop."""
    seen = weft.spawn(_train, 4, device="cpu")
    assert seen[0] == seen[1] == [float(version) for version in range(7)]
    assert seen[2] == seen[0][: len(seen[2])]
    assert seen[3] == seen[0][-len(seen[3]) :]
    assert len(seen[2]) + len(seen[3]) == 7


def _maps(comm: Any) -> tuple[Any, ...]:
    """The map of the page, another one behind a change, and one after a death."""
    names: dict[str, Any] = {
        "weft": weft, "torch": torch, "comm": comm, "x": torch.ones((4, 2048), dtype=torch.bfloat16),
        "logical_ids": torch.tensor([[0, 3, 6]] * 4), "weights": torch.ones((4, 3)),
    }  # fmt: skip
    _run(_text("num_logical_experts=7"), names)
    ep = names["ep"]
    found = {pick + 4 * comm.rank for pick in names["r"].topk_idx.flatten().tolist() if pick >= 0}
    assert found <= {0, 11, 9, 6}  # where the page puts them
    loaded: list[Any] = []
    names |= {"load": loaded.append}
    comm.meet(LONG_S)
    if comm.rank == 2:
        assert comm.leave().removed == (2,)
        return ()
    names["change"] = None
    while names["change"] is None:
        _run(_text("ExpertMap.spread(7"), names)
    assert [str(ep.expert_map)] == [str(each) for each in loaded]
    assert ep.uncovered == ()
    comm.meet(LONG_S)

    def step() -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            comm.meet(LONG_S)

    asked: list[tuple[int, ...]] = []

    def load_and_map(uncovered: tuple[int, ...]) -> weft.ExpertMap:
        asked.append(uncovered)
        replicas = torch.full((7, 1), -1, dtype=torch.int32)
        for slot, expert in enumerate(uncovered[:4]):  # of the 4 on rank 0
            replicas[expert] = slot
        return weft.ExpertMap(replicas)

    _run(_text("load_and_map"), names | {"step": step, "load_and_map": load_and_map})
    ((lost, *_),) = asked
    return lost in ep.uncovered, len(asked[0]) in (3, 4)


def test_maps() -> None:
    """They are installed, and what was lost with a rank is brought back."""
    seen = weft.spawn(_maps, 3, device="cpu", max_ranks=3, on_failure="return")
    assert seen[0] == (False, True)
    assert isinstance(seen[1], weft.PeerLost)


def _beside(comm: Any) -> tuple[Any, ...]:
    """Line by line, since what one rank fetches another one has to share first."""
    weights, mine = torch.full((3, 4), float(comm.rank)), torch.zeros((3, 4))
    names: dict[str, Any] = {"comm": comm, "my_load": torch.tensor([comm.rank]), "weights": weights, "mine": mine}
    for line in _text("my_load").splitlines():
        _run(line, names)
        comm.meet(LONG_S)
    shape = "num_experts=6, top_k=2, hidden=64, max_tokens_per_rank=8, dtype=torch.float32"
    grows = _text("max_heap_bytes=1 << 30")
    assert grows.count("...") == 1
    _run(grows.replace("...", shape), names | {"weft": weft, "torch": torch})
    ep = weft.ExpertParallel(comm, num_experts=6, top_k=2, hidden=64, max_tokens_per_rank=8, heap_bytes=1 << 20)
    x, ids = torch.ones((4, 64), dtype=torch.bfloat16), torch.zeros((4, 2), dtype=torch.int64)
    r = ep.dispatch(x, ids)
    names |= {"r": r, "y": ep.combine(r.x, r.handle)}
    del r
    slept: list[Any] = []

    def train(given: Any) -> None:
        with pytest.raises(weft.InvalidState, match="asleep"):
            ep.dispatch(x, ids)
        slept.append(given)

    names["train"] = train
    _run(_text("del r, y"), names)
    assert ep.dispatch(x, ids).num_rows is not None
    comm.meet(LONG_S)
    return float(mine[0, 0]), len(names["loads"]), len(slept)


def test_calls_beside_calls() -> None:
    """Bytes, tensors, sleep, and a heap that grows."""
    assert weft.spawn(_beside, 3, device="cpu") == [(2.0, 3, 1)] * 3
