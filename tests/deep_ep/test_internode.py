"""Guards against a `deep_ep` whose ranks are several nodes and get other rows, counts, handles or sums than the
reference with these domains has: nodes of one size and a smaller last one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_ep_cases as cases
import weft
from weft import deep_ep, reference
from weft.deep_ep.nodes import Nodes, runs_of

NODES = "WEFT_DEEP_EP_NODE_RANKS"
SHAPES = [(4, 2), (8, 2), (4, 3)]  # ranks, and ranks of a node: 2 x 2, 4 x 2, 3 + 1


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def of_nodes(ids: Tensor, given: cases.Data, node_ranks: int) -> list[int]:
    """Tokens that have a pick in each node."""
    owners = torch.where(ids >= 0, ids // given.num_local, -node_ranks)
    nodes = torch.div(owners, node_ranks, rounding_mode="floor")
    return [int((nodes == node).any(1).sum()) for node in range(-(-given.num_ranks // node_ranks))]


def v1(comm: weft.Communicator, node_ranks: int, dtype: torch.dtype) -> None:
    """Twice: what a first dispatch made is there for the second."""
    rank, num_ranks = comm.rank, comm.num_ranks
    buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
    assert buffer.runtime is not None
    num_nodes = -(-num_ranks // node_ranks)
    assert (buffer.runtime.get_num_rdma_ranks(), buffer.runtime.get_rdma_rank()) == (num_nodes, rank // node_ranks)
    for seed in range(2):
        given = cases.make(num_ranks, dtype=dtype, seed=seed, tokens=13 + 600 * seed)
        wanted = reference.dispatch(given.xs, given.ids, given.weights, num_experts=given.num_experts)
        x, ids, weights, mine = given.xs[rank], given.ids[rank], given.weights[rank], wanted[rank]
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, given.num_experts)
        assert per_node is not None
        assert per_node.dtype == torch.int32
        assert per_node.tolist() == of_nodes(ids, given, node_ranks)
        layout: dict[str, Any] = {
            "num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node, "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
        }  # fmt: skip
        config = deep_ep.Buffer.get_dispatch_config(num_ranks)
        recv_x, recv_ids, recv_weights, counts, handle, _ = buffer.internode_dispatch(
            x, topk_idx=ids, topk_weights=weights, config=config, **layout
        )
        assert torch.equal(recv_x, mine.x)
        assert torch.equal(recv_ids, mine.topk_idx)
        assert torch.equal(recv_weights, mine.topk_weights)
        assert counts == mine.num_tokens_per_expert.tolist()
        ten_items(handle, mine, in_rank, node_ranks)
        combined(comm, buffer, given, wanted, handle, node_ranks)

        fp8 = (x.to(torch.float8_e4m3fn), torch.rand((3, len(x)), dtype=torch.float32, device="cpu").mT)
        whole = [each.to(torch.float8_e4m3fn) for each in given.xs]
        data = reference.dispatch([each.view(torch.uint8) for each in whole], given.ids, num_experts=given.num_experts)
        (got, scales), *_, by_mask, _ = buffer.dispatch(fp8, **layout)
        assert torch.equal(bits(got), bits(data[rank].x))
        assert scales.shape == (len(mine.x), 3)
        again = buffer.dispatch(fp8, handle=by_mask)[0]
        assert torch.equal(bits(again[0]), bits(got))
        assert torch.equal(again[1], scales)

        room = num_ranks * max(map(len, given.xs)) + 3
        worst = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_worst_tokens=room, **layout)
        assert (len(worst[0]), worst[3]) == (room, [])
        assert torch.equal(worst[0][: len(mine.x)], mine.x)
        assert bool((worst[1][len(mine.x) :] == -1).all())
    buffer.destroy()


def ten_items(handle: Any, mine: reference.Dispatched, in_rank: Tensor, node_ranks: int) -> None:
    assert len(handle) == 10
    items = list(handle)
    ends = mine.offsets[1:].tolist()
    assert handle[0] is in_rank
    assert items[6].tolist() == handle[-4].tolist() == ends  # as DeepEP's own test reads it
    assert items[4].tolist() == [*ends[node_ranks - 1 :: node_ranks], *ends[-1:]][: len(items[1])]
    assert items[7].shape == (len(mine.x), 2)
    counts = (mine.offsets[1:] - mine.offsets[:-1]).tolist()
    assert items[7][:, 0].tolist() == [rank for rank, count in enumerate(counts) for _ in range(count)]
    assert [len(items[each]) for each in (1, 2, 3, 5)] == [len(items[4]), len(ends), len(items[4]), len(ends)]
    assert (len(items[8]), len(items[9])) == (len(in_rank), len(mine.x))


def combined(
    comm: weft.Communicator, buffer: Any, given: cases.Data, wanted: list[reference.Dispatched], handle: Any,
    node_ranks: int,
) -> None:  # fmt: skip
    """Cached dispatch and combine along the handle, also as each other's gradient."""
    rank, mine = comm.rank, wanted[comm.rank]
    routing = mine.routing
    outputs = [each.x for each in wanted]
    sums: dict[str, Any] = {"weighted": False, "sum_domain": node_ranks}
    for _ in range(2):
        y, none, _ = buffer.internode_combine(mine.x.clone(), handle)
        assert none is None
        assert torch.equal(y, reference.combine(outputs, wanted, **sums)[rank])
    biases = [torch.full_like(each, 0.5) for each in given.xs]
    twice = [each.float() + each.float() for each in biases]
    y, _, _ = buffer.combine(mine.x.clone(), handle, bias=(biases[rank], biases[rank]))
    assert torch.equal(y, reference.combine(outputs, wanted, biases=twice, **sums)[rank])

    grads = [(each.float() / 3).to(given.xs[0].dtype) for each in outputs]  # of what dispatch gave
    lanes = [(each + 1).contiguous() for each in (part.topk_weights for part in wanted)]
    x_grad, weight_grad, _ = buffer.combine(grads[rank], handle, topk_weights=lanes[rank])
    assert torch.equal(x_grad, reference.combine(grads, wanted, **sums)[rank])
    lanes_sum = reference.combine([each.clone() for each in lanes], wanted, **sums)[rank]
    assert torch.equal(weight_grad, lanes_sum)
    for dtype in (given.xs[0].dtype, torch.float32):
        back = [each.to(dtype) / 3 for each in given.xs]  # of what combine gave
        got = buffer.internode_dispatch(back[rank], handle)
        assert got[1:5] == (None, None, None, None)
        assert torch.equal(got[0], reference.repeat_dispatch(back, routing)[rank])


@pytest.mark.parametrize(("num_ranks", "node_ranks"), SHAPES)
def test_v1(monkeypatch: pytest.MonkeyPatch, num_ranks: int, node_ranks: int) -> None:
    monkeypatch.setenv(NODES, str(node_ranks))
    weft.spawn(v1, num_ranks, (node_ranks, torch.bfloat16), device="cpu")


def test_v1_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODES, "2")
    weft.spawn(v1, 3, (2, torch.float32), device="cpu")


def low_latency(comm: weft.Communicator, node_ranks: int) -> None:
    """Both windows, twice: sums are those of fp32 rows, by node."""
    rank, num_ranks, most = comm.rank, comm.num_ranks, 16
    buffer = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
    for seed in range(4):
        given = cases.make(num_ranks, seed=seed)
        options: dict[str, Any] = {"num_experts": given.num_experts, "layout": "masked", "capacity": num_ranks * most}
        wanted = reference.dispatch(given.xs, given.ids, given.weights, **options)
        mine = wanted[rank]
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            given.xs[rank], given.ids[rank], most, given.num_experts, use_fp8=False, return_recv_hook=seed % 2 == 1
        )
        if hook is not None:
            hook()
        assert torch.equal(counts, mine.num_tokens_per_expert)
        for expert, count in enumerate(counts.tolist()):
            assert torch.equal(rows[expert, :count], mine.x[expert, :count])
        weighted = [each.x.float() * each.topk_weights[..., None] for each in wanted]
        y = reference.combine(weighted, wanted, weighted=False, sum_domain=node_ranks)[rank].bfloat16()
        got, _, hook = buffer.low_latency_combine(
            rows, given.ids[rank], given.weights[rank], handle, return_recv_hook=seed % 2 == 1
        )
        if hook is not None:
            hook()
        assert torch.equal(got, y)
    fp8, _, _, _, _ = buffer.low_latency_dispatch(
        torch.ones((1, 128), dtype=torch.bfloat16, device="cpu"), given.ids[rank][:0].new_zeros((1, 4)), most,
        given.num_experts,
    )  # fmt: skip
    assert fp8[0].dtype == torch.float8_e4m3fn
    buffer.destroy()


@pytest.mark.parametrize(("num_ranks", "node_ranks"), SHAPES)
def test_low_latency(monkeypatch: pytest.MonkeyPatch, num_ranks: int, node_ranks: int) -> None:
    monkeypatch.setenv(NODES, str(node_ranks))
    weft.spawn(low_latency, num_ranks, (node_ranks,), device="cpu")


PROGRAM = """
import os
import deep_ep, torch
from deep_ep.utils.envs import get_logical_domain_size, init_dist

def work(local_rank, num_local_ranks):
    rank, num_ranks, group = init_dist(local_rank, num_local_ranks)
    assert get_logical_domain_size(group) == (2, 2)
    buffer = deep_ep.Buffer(group, 1 << 20, 1 << 20, explicitly_destroy=True)
    assert buffer.runtime.get_rdma_rank() == int(os.environ["RANK"]) == rank // 2
    x = torch.full((3, 64), rank + 1.0, device="cuda")
    ids = torch.arange(num_ranks, device="cuda").expand(3, num_ranks).contiguous()
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, num_ranks)
    assert per_node.tolist() == [3, 3]
    rows, _, _, counts, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    assert counts == [12]
    assert handle[-4].tolist() == [3, 6, 9, 12]
    combined, _, _ = buffer.combine(rows, handle)
    assert torch.equal(combined, 4 * x)
    buffer.destroy()
    print(f"rank {rank} is done", flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(2,), nprocs=2)
"""


def test_a_program_on_two_nodes(tmp_path: Path) -> None:
    """Started as on two machines, written for GPUs."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    runner = str(Path(__file__).with_name("cuda_as_cpu.py"))
    python = os.pathsep.join(each for each in sys.path if each)
    found = subprocess.run(
        [sys.executable, runner, "--nodes", "2", str(script)], env={**os.environ, NODES: "2", "PYTHONPATH": python},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    done = re.findall(r"rank \d is done", found.stdout)  # of two ranks also in one line
    assert sorted(done) == [f"rank {rank} is done" for rank in range(4)]


def refusals(comm: weft.Communicator) -> None:
    os.environ[NODES] = "2"
    given = cases.make(comm.num_ranks)
    buffer = deep_ep.Buffer(comm)
    ids, x = given.ids[comm.rank], given.xs[comm.rank]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, given.num_experts)
    with pytest.raises(weft.InvalidArgument, match=r"num_tokens_per_rdma_rank is \[3\]; allowed is \[2\]"):
        buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )  # fmt: skip
    with pytest.raises(deep_ep.NotSupported, match="masks are not for groups of several nodes"):
        deep_ep.Buffer(comm, enable_shrink=True)
    for made in (lambda: deep_ep.ElasticBuffer(comm, 1 << 20), lambda: deep_ep.HybridEPBuffer(comm, 64, 16, 3)):
        with pytest.raises(deep_ep.NotSupported, match="nodes of 2 ranks and a last one of 1"):
            made()
    with pytest.raises(deep_ep.NotSupported, match=r"get_physical_domain_size .*use nodes of one size"):
        deep_ep.get_physical_domain_size(comm)
    with pytest.raises(deep_ep.NotSupported, match="dispatch_pcie"):
        buffer.dispatch_pcie(x)
    found = buffer.dispatch(  # the layout is known from the mask
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
    )
    other = deep_ep.Buffer(comm)
    with pytest.raises(weft.InvalidState, match="another buffer"):
        other.combine(found[0], found[4])


def test_what_is_refused() -> None:
    weft.spawn(refusals, 3, device="cpu")


def asked_of_the_network(comm: weft.Communicator) -> None:
    assert deep_ep.Buffer(comm).network == (None, 24)
    with pytest.raises(weft.InvalidArgument, match="num_qps_per_rank is 0; allowed are 1 and more"):
        deep_ep.Buffer(comm, num_qps_per_rank=0)
    os.environ["NVSHMEM_IB_SL"] = "5"
    assert deep_ep.Buffer(comm, num_qps_per_rank=7).network == (5, 7)
    os.environ["NVSHMEM_IB_SL"] = "16"
    with pytest.raises(weft.InvalidArgument, match="NVSHMEM_IB_SL is 16 in the environment; allowed are 0 to 15"):
        deep_ep.Buffer(comm)


def test_service_level_and_queue_pairs() -> None:
    weft.spawn(asked_of_the_network, 1, device="cpu")


def test_nodes() -> None:
    assert [Nodes(rank, 7, 3).node for rank in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [Nodes(rank, 7, 3).idx for rank in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert (Nodes(0, 7, 3).num_nodes, Nodes(0, 7, 7).num_nodes, Nodes(0, 7, 3).node_ranks) == (3, 1, 3)
    assert Nodes(0, 7, 7).node_ranks is None
    assert Nodes(0, 6, 3).even("it", "less").size == 3
    with pytest.raises(deep_ep.NotSupported, match="nodes of 3 ranks and a last one of 1"):
        Nodes(0, 7, 3).even("it", "less")


def test_machines() -> None:
    assert runs_of([[0, 1, 2], [3, 4, 5]], 6) == 3
    assert runs_of([[3], [0, 1, 2], [0, 2, 1]], 4) == 3
    assert runs_of([[0], [1]], 2) == 1
    for wrong in ([[0, 2], [1, 3]], [[0], [1, 2]], [[0, 1], [2], [3, 4]]):
        with pytest.raises(deep_ep.NotSupported, match="number them machine by machine"):
            runs_of(wrong, 1 + max(map(max, wrong)))
