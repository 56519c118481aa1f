"""Guards against a late rank that hangs the others or goes unnamed, a process that does not end, or reports leaks, with
buffers in its globals, and random shapes that come out wrong."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep_cases as cases
import weft
from weft import deep_ep, reference
from weft.deep_ep import ranks

PYTHON_FOLDER = Path(weft.__file__).parents[1]

ENDING = """
import sys
import torch.distributed as dist, torch
import weft.deep_ep as deep_ep
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8, explicitly_destroy=True)
hybrid = deep_ep.HybridEPBuffer(dist.group.WORLD, 64, 8, 4)
x = torch.ones((4, 64), dtype=torch.bfloat16)
ids = torch.tensor([[0, 1]] * 4)
weights = torch.ones((4, 2))
kept = [buffer.low_latency_dispatch(x, ids, 8, 4), elastic.dispatch(x, ids, weights, num_experts=4, do_expand=True)]
kept.append(hybrid.dispatch_with_permute(hidden=x, topk_idx=ids, topk_weights=weights))
if sys.argv[2] == "group first":
    dist.destroy_process_group()
if sys.argv[2] == "in the middle":
    elastic.destroy()
print("done")
"""


@pytest.mark.parametrize("how", ["as it is", "group first", "in the middle"])
def test_a_process_ends_with_buffers_in_its_globals(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path / "store"), how],
        env={**os.environ, "PYTHONPATH": str(PYTHON_FOLDER)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "leak" not in done.stderr


def with_a_late_rank(comm: weft.Communicator, kind: str) -> str:
    os.environ["WEFT_DEEP_EP_TIMEOUT_S"] = "4"  # which both must meet in the calls before
    given = cases.make(comm.num_ranks, even=True)
    x, ids, weights = given.xs[comm.rank], given.ids[comm.rank], given.weights[comm.rank]
    v1 = deep_ep.Buffer(comm, explicitly_destroy=True)
    v2 = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=16, explicitly_destroy=True)
    hybrid = deep_ep.HybridEPBuffer(comm, 64, 16, 3)
    per_rank, _, per_expert, in_rank, _ = v1.get_dispatch_layout(ids, given.num_experts)
    calls: dict[str, Any] = {
        "v1": lambda: v1.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights,
        ),
        "low": lambda: v1.low_latency_dispatch(x, ids, 16, given.num_experts),
        "v2": lambda: v2.dispatch(x, ids, weights, num_experts=given.num_experts),
        "hybrid": lambda: hybrid.dispatch_with_permute(hidden=x, topk_idx=ids),
        "barrier": v2.barrier,
    }  # fmt: skip
    if kind == "first":  # the first meeting of all
        calls[kind] = v2.barrier
    else:
        calls[kind]()
    if comm.rank == 1:  # alive, and waiting for something else
        with contextlib.suppress(weft.PeerTimeout):
            comm.meet(60.0)
        return "late"
    with pytest.raises(weft.PeerTimeout) as caught:
        calls[kind]()
    assert caught.value.peers == (1,)
    v1.destroy()
    v2.destroy()
    return "named"


@pytest.mark.parametrize("kind", ["v1", "low", "v2", "hybrid", "barrier", "first"])
def test_a_late_rank_is_named(kind: str) -> None:
    assert weft.spawn(with_a_late_rank, 2, (kind,), device="cpu") == ["named", "late"]


def destroyed_beside_a_call(comm: weft.Communicator, told: Path) -> None:
    """Rank 1 comes to the call only after rank 0 has tried."""
    v1 = deep_ep.Buffer(comm, explicitly_destroy=True)
    v2 = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=16, explicitly_destroy=True)
    third = deep_ep.HybridEPBuffer(comm, 64, 16, 3)
    given = cases.make(comm.num_ranks, even=True)
    x, ids = given.xs[comm.rank], given.ids[comm.rank]
    v1.low_latency_dispatch(x, ids, 16, given.num_experts)
    third.dispatch(x, topk_idx=ids)
    v2.barrier()
    if comm.rank == 1:
        while not told.exists():
            time.sleep(0.01)
        v2.barrier()
    else:
        waiting = threading.Thread(target=v2.barrier)
        waiting.start()
        while not comm._busy.locked():
            time.sleep(0.01)
        with pytest.raises(weft.InvalidState, match="another thread"):
            v1.destroy()
        ended = [each.calls for each in third._layers._all]
        del third
        told.touch()
        waiting.join()
    v1.low_latency_dispatch(x, ids, 16, given.num_experts)  # still there
    v2.barrier()
    if comm.rank == 0:
        assert [each.closed for each in ended] == [True]
    v1.destroy()
    v2.destroy()
    assert comm.rank == 1 or v1._ranks.num_users == 0


def test_destroy_beside_a_call_of_another_thread(tmp_path: Path) -> None:
    weft.spawn(destroyed_beside_a_call, 2, (tmp_path / "told",), device="cpu")


def test_ranks_connect_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setenv("WEFT_DEEP_EP_TIMEOUT_S", "7")
    monkeypatch.setattr(weft.Communicator, "from_process_group", lambda group, **named: given.update(named))
    ranks._connect(None, can_mask=False)
    assert given["timeout_s"] == 7.0


def kept(comm: weft.Communicator) -> None:
    def made() -> list[Any]:
        return [
            deep_ep.Buffer(comm), deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=8),
            deep_ep.HybridEPBuffer(comm, 64, 8, 3),
        ]  # fmt: skip

    buffers = made()
    buffers[1].barrier()
    known = weakref.ref(buffers[0]._ranks)
    assert {id(each._ranks) for each in buffers} == {id(known())}
    for make in (
        lambda: deep_ep.ElasticBuffer(comm, num_gpu_timeout_secs="many"),
        lambda: deep_ep.HybridEPBuffer(comm, 64, "many", 3),
        lambda: deep_ep.Buffer(comm, "many"),
    ):
        with pytest.raises(TypeError):
            make()
    assert buffers[0]._ranks.num_users == 3
    del buffers
    assert known() is None


def test_a_communicator_is_not_kept() -> None:
    weft.spawn(kept, 1, device="cpu")


def random_shapes(comm: weft.Communicator, seeds: range) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        top_k, num_local = chance.randint(1, 6), chance.randint(2, 5)
        hidden, tokens = 8 * chance.randint(1, 40), chance.randint(0, 30)
        given = cases.make(
            comm.num_ranks, num_local=num_local, top_k=top_k, hidden=hidden, tokens=tokens, seed=seed,
            duplicates=chance.random() < 0.3, dtype=chance.choice([torch.bfloat16, torch.float32]),
        )  # fmt: skip
        rank, num_experts, alignment = comm.rank, given.num_experts, chance.choice([1, 4, 16])
        x, ids, weights = given.xs[rank], given.ids[rank], given.weights[rank]
        by_token = reference.dispatch(given.xs, given.ids, given.weights, num_experts=num_experts)
        by_expert = reference.dispatch(
            given.xs, given.ids, given.weights, num_experts=num_experts, layout="expert_major", alignment=alignment
        )
        v1, v2 = deep_ep.Buffer(comm), deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=32)
        hybrid = deep_ep.HybridEPBuffer(comm, hidden, 32, num_local)
        per_rank, _, per_expert, in_rank, _ = v1.get_dispatch_layout(ids, num_experts)
        recv, recv_ids, recv_weights, counts, handle, _ = v1.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights,
        )  # fmt: skip
        y = reference.combine([part.x for part in by_token], by_token, weighted=False)[rank]
        assert torch.equal(recv, by_token[rank].x)
        assert torch.equal(recv_ids, by_token[rank].topk_idx)
        assert torch.equal(recv_weights, by_token[rank].topk_weights)
        assert counts == by_token[rank].num_tokens_per_expert.tolist()
        assert torch.equal(v1.combine(recv, handle)[0], y)
        recv, recv_ids, recv_weights, v2_handle, _ = v2.dispatch(x, ids, weights, num_experts=num_experts)
        assert torch.equal(recv, by_token[rank].x)
        assert torch.equal(recv_weights, by_token[rank].topk_weights)
        y = reference.combine([part.x for part in by_token], by_token, weighted=False, order="last_pick")[rank]
        assert torch.equal(v2.combine(recv, v2_handle)[0], y)
        y, lanes = reference.combine(
            [part.x for part in by_expert], by_expert, weighted=False, sides=[part.topk_weights for part in by_expert]
        )[rank]
        recv, _, recv_weights, expanded, _ = v2.dispatch(
            x, ids, weights, num_experts=num_experts, do_expand=True, expert_alignment=alignment, do_zero_padding=True
        )
        assert torch.equal(recv, by_expert[rank].x)
        assert torch.equal(recv_weights, by_expert[rank].topk_weights)
        combined, back, _ = v2.combine(recv, expanded, recv_weights)
        assert torch.equal(back, lanes)
        by_lane = reference.combine([part.x for part in by_expert], by_expert, weighted=False, order="last_pick")[rank]
        assert torch.equal(combined, by_lane)
        rows, probs, _, padded, hybrid_handle = hybrid.dispatch_with_permute(
            hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=num_experts, pad_multiple=alignment
        )
        assert torch.equal(rows, by_expert[rank].x)
        assert torch.equal(probs, by_expert[rank].topk_weights)
        assert int(padded.sum()) == len(rows)
        assert torch.equal(hybrid.combine_with_unpermute(hidden=rows, handle=hybrid_handle)[0], y)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_random_shapes(num_ranks: int) -> None:
    weft.spawn(random_shapes, num_ranks, (range(8),), device="cpu")


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_more_random_shapes(num_ranks: int) -> None:
    weft.spawn(random_shapes, num_ranks, (range(100, 200),), device="cpu")
