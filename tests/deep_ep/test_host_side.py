"""Guards against cases that only hold where a buffer's tensors are in host memory: seen from there, and back again."""

from __future__ import annotations

import host_side
import pytest
from case_table import pairs, run_case
from gpu_steps import NAMES, random_steps, run_step

import weft
from pool import RankState


def seen_from_the_host(comm: weft.Communicator, name: str) -> None:
    host_side.always[0] = True
    run_case(RankState(comm.rank, {comm.num_ranks: comm}, comm.num_ranks), name)


@pytest.mark.parametrize(("name", "num_ranks"), pairs((1, 2, 3)))
def test_copies_do_not_matter(name: str, num_ranks: int) -> None:
    weft.spawn(seen_from_the_host, num_ranks, (name,), device="cpu")


def one_step(comm: weft.Communicator, name: str) -> None:
    run_step(RankState(comm.rank, {comm.num_ranks: comm}, comm.num_ranks), name)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_gpus_on_the_cpu_engine(name: str, num_ranks: int) -> None:
    weft.spawn(one_step, num_ranks, (name,), device="cpu")


def random_ones(comm: weft.Communicator, seed: int, count: int) -> None:
    random_steps(RankState(comm.rank, {comm.num_ranks: comm}, comm.num_ranks), (seed, count))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_random_shapes(num_ranks: int) -> None:
    weft.spawn(random_ones, num_ranks, (num_ranks, 25), device="cpu")
