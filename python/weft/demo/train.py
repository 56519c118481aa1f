"""What every rank of the demo does: train its share, survive the death of a peer, write some text in the end."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

import weft
from weft.demo.baseline import rank_experts
from weft.demo.config import DemoConfig
from weft.demo.events import Sender
from weft.demo.exchange import SumOverRanks, Traffic, WeftExchange, kill_inside_next_call
from weft.demo.model import LanguageModel, generate, make_optimizer
from weft.demo.text import Text

RECORDED_STEPS = 20
"""The last steps of the training are recorded: what a trained gate chooses."""


@dataclass(frozen=True)
class Interruption:
    """What ended a step, and when (ns of the monotonic clock)."""

    error: weft.PeerLost
    at_ns: int


@dataclass(frozen=True)
class Loss:
    """A lost peer, as one survivor saw it. Times in ns of the monotonic clock, which all processes share."""

    step: int
    ranks: tuple[int, ...]
    error: str
    seen_ns: int
    rebuild_ms: float


@dataclass(frozen=True)
class RankResult:
    """What a rank brings home. Losses and loads are sums over all ranks, so each rank has the same."""

    rank: int
    engine: str
    device: str
    placement: str
    """Cores, memory and NICs, in a line."""
    losses: tuple[float, ...]
    loads: tuple[tuple[tuple[int, ...], ...], ...]
    """Picks per expert of each step and layer, [steps][layers][experts]."""
    train_s: float
    traffic: Traffic
    generated: bytes
    lost: tuple[Loss, ...]


def train_rank(comm: weft.Communicator, config: DemoConfig, text: Text, events: Sender) -> RankResult:
    """The whole life of a rank, for `weft.spawn`. Collective."""
    return Trainer(comm, config, text, events).run()


class Trainer:
    """A rank's share of the model and of the training."""

    def __init__(self, comm: weft.Communicator, config: DemoConfig, text: Text, events: Sender) -> None:
        self.comm, self.config, self.text, self.events = comm, config, text, events
        self.exchange = WeftExchange(comm, config)
        self.model = LanguageModel(config, local=rank_experts(config, comm.rank), exchange=self.exchange)
        self.model.to(comm.device)
        self.optimizer, self.set_rate = make_optimizer(self.model, config)
        num_shared = sum(parameter.numel() for parameter in self.model.dense_parameters())
        self.sum_over_ranks = SumOverRanks(comm, num_shared + config.layers * config.experts + 1)
        self.losses: list[float] = []
        self.loads: list[tuple[tuple[int, ...], ...]] = []
        self.lost: list[Loss] = []

    def run(self) -> RankResult:
        """Trains; a step in which a peer was lost is repeated without that peer."""
        start = time.perf_counter()
        interruption: Interruption | None = None
        with ExitStack() as recording:
            while (step := len(self.losses)) < self.config.steps:
                try:
                    if interruption is not None:
                        self.go_on_without(interruption)
                        interruption = None
                    if self.config.record is not None and step == max(0, self.config.steps - RECORDED_STEPS):
                        recording.enter_context(weft.routing.record(self.config.record))
                    self.train_step(step)
                except weft.PeerLost as error:
                    interruption = Interruption(error, time.monotonic_ns())
        return self.result(time.perf_counter() - start)

    def train_step(self, step: int) -> None:
        """One step: forward, backward, sum of what the ranks share, update."""
        if step == self.config.kill_step and self.comm.rank == self.config.kill_rank:
            self.exchange.before_combine = self.die
        self.set_rate(step)
        self.optimizer.zero_grad()
        loss = self.model.loss(self.batch(step))
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()  # in this thread: ranks that are threads would wait for each other in torch's one per GPU
        loads, mean_loss = self.share(loss.detach())
        self.optimizer.step()
        for layer, load in zip(self.model.moe_layers(), loads, strict=True):
            layer.gate.rebalance(load)
        self.losses.append(mean_loss)
        self.loads.append(tuple(tuple(int(picks) for picks in load) for load in loads))
        if self.comm.rank == self.comm.active_ranks[0]:
            self.events.send("step", step=step, loss=mean_loss)

    def batch(self, step: int) -> Tensor:
        """This rank's sequences of a step, int64 [sequences, context + 1]."""
        config = self.config
        pieces = self.text.batch(config.seed, step, self.comm.rank, config.sequences_per_rank, config.context + 1)
        return pieces.to(self.comm.device)

    @torch.no_grad()
    def share(self, loss: Tensor) -> tuple[Tensor, float]:
        """Averages the dense gradients over the ranks; returns loads [layers, experts] of all ranks and the mean loss.

        Experts need no exchange: dispatch brought their tokens from every rank, so their gradients are complete, as
        sums over ranks of gradients of means. Collective.
        """
        dense = self.model.dense_parameters()
        own = [layer.take_load() for layer in self.model.moe_layers()]
        sums = self.sum_over_ranks(torch.cat([*(gradient(p).flatten() for p in dense), *own, loss[None]]))
        num_ranks = len(self.comm.active_ranks)
        *gradients, loads, total_loss = sums.split([*(p.numel() for p in dense), sum(len(load) for load in own), 1])
        for parameter, summed in zip(dense, gradients, strict=True):
            parameter.grad = (summed / num_ranks).view_as(parameter)
        for parameter in self.model.expert_parameters():
            parameter.grad = gradient(parameter) / num_ranks
        return loads.view(len(own), -1), total_loss.item() / num_ranks

    def die(self) -> None:
        """Ends this process inside the combine that follows."""
        step, rank = len(self.losses), self.comm.rank
        kill_inside_next_call(lambda now_ns: self.events.send("kill", rank=rank, step=step, at_ns=now_ns))

    def go_on_without(self, interruption: Interruption) -> None:
        """Rebuilds the communicator of those who are left, and takes the lost experts out of the gates. Collective."""
        gone, step = interruption.error.ranks, len(self.losses)
        self.events.send(
            "lost", rank=self.comm.rank, step=step, error=repr(interruption.error), at_ns=interruption.at_ns
        )
        start = time.perf_counter()
        self.comm.rebuild([rank for rank in self.comm.active_ranks if rank not in gone])
        rebuild_ms = 1e3 * (time.perf_counter() - start)
        self.sum_over_ranks.prepare()
        self.check_same_step()
        for layer in self.model.moe_layers():
            layer.take_load()  # of the interrupted step
            for rank in gone:
                layer.gate.lose(rank_experts(self.config, rank))
        self.lost.append(Loss(step, gone, str(interruption.error), interruption.at_ns, rebuild_ms))
        self.events.send("rebuilt", rank=self.comm.rank, step=step, left=list(self.comm.active_ranks), ms=rebuild_ms)

    def check_same_step(self) -> None:
        """Raises where the peer died so late in a step that some ranks finished the step and others did not."""
        mine = torch.zeros(self.sum_over_ranks.num_values, device=self.comm.device, dtype=torch.float32)
        mine[self.comm.rank] = len(self.losses)
        steps = [int(self.sum_over_ranks(mine)[rank]) for rank in self.comm.active_ranks]
        if len(set(steps)) > 1:
            raise weft.InvalidState(
                f"ranks {list(self.comm.active_ranks)} were interrupted in different steps {steps}: "
                "a real training would go back to its last checkpoint here, the demo has none"
            )

    def result(self, train_s: float) -> RankResult:
        """Writes some text and packs up. Collective."""
        traffic = self.exchange.traffic()
        config = self.config
        generated = generate(
            self.model,
            config.prompt.encode(),
            config.generate,
            context=config.context,
            seed=config.seed + self.comm.rank,
        )
        return RankResult(
            rank=self.comm.rank,
            engine=repr(self.comm),
            device=str(self.comm.device),
            placement=self.comm.placement.describe(),
            losses=tuple(self.losses),
            loads=tuple(self.loads),
            train_s=train_s,
            traffic=traffic,
            generated=generated,
            lost=tuple(self.lost),
        )


def gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Its gradient, zeros where no token came by."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
