"""A dispatch across domains, event by event: blocks with rings of chunks, credits, NIC ports, forwarding.

One rank stands for all: what it sends at a time arrives at its peers when theirs arrives here. It has its own
arithmetic, none of weft.planner.model, so that the two can be compared. What a block does is what the design says:
forward an arrived chunk first, since that gives a credit; else store an own token to the rings that it goes to, if
each has a place; rings are filled from the start, final places are known only after `place_us`.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

_LAUNCH_US = 5.0
_END_US = 4.0
_CHUNK_HEADER = 32  # bytes a row: weights and ids behind it


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Rates in bytes a us. `domains`, `ranks` that a token goes to on average. `late_us`: how late block 0 is."""

    domains: float
    ranks: float
    num_domains: int
    ranks_per_domain: int
    row_bytes: float
    num_tokens: int
    num_blocks: int
    chunk_rows: int = 16
    slots: int = 4
    nic: float = 47.5e3
    ports: int = 1
    latency_us: float = 8.4
    block: float = 50e3
    nvlink: float = 345e3
    place_us: float = 17.0
    rings_first: bool = False
    late_us: float = 0.0
    seed: int = 0


@dataclass
class Block:
    """A block of the rank: its tokens by the peers they go to, its rings, and what has arrived for it."""

    tokens: list[list[int]]
    filled: list[int]
    credits: list[int]
    left: list[int]
    arrived: deque[tuple[int, int]] = field(default_factory=deque)
    next_ring: int = 0
    next_local: int = 0
    expected: int = 0
    seen: int = 0
    is_idle: bool = True


class Simulation:
    """Run with `run()`: us of the call, and the share of it in which the NIC was busy."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        rng = random.Random(setup.seed)
        peers = setup.num_domains - 1
        chance = setup.domains / setup.num_domains
        per_block = setup.num_tokens // setup.num_blocks
        self.blocks = []
        for _ in range(setup.num_blocks):
            tokens = [[p for p in range(peers) if rng.random() < chance] for _ in range(per_block)]
            left = [sum(p in token for token in tokens) for p in range(peers)]
            chunks = sum(-(-rows // setup.chunk_rows) for rows in left)
            self.blocks.append(Block(tokens, [0] * peers, [setup.slots] * peers, left, expected=chunks))
        self.us_per_byte = 1 / min(
            setup.block,
            setup.nvlink / setup.num_blocks * setup.ranks_per_domain / max(1, setup.ranks_per_domain - 1),
        )
        self.local_rows = setup.ranks / setup.num_domains
        self.fan_out = setup.ranks / setup.domains
        self.port_free = [0.0] * setup.ports
        self.busy = self.done = 0.0
        self.events: list[tuple[float, int, str, int, tuple[int, int]]] = []
        self.num_events = 0

    def at(self, time: float, kind: str, block: int, what: tuple[int, int] = (0, 0)) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, kind, block, what))

    def run(self) -> tuple[float, float]:
        for idx in range(len(self.blocks)):
            self.at(_LAUNCH_US + (self.setup.late_us if idx == 0 else 0.0), "step", idx)
            self.blocks[idx].is_idle = False
        while self.events:
            time, _, kind, idx, what = heapq.heappop(self.events)
            block = self.blocks[idx]
            if kind == "post":
                self.post(time, idx, what)
                continue
            if kind == "arrive":
                block.arrived.append(what)
            elif kind == "credit":
                block.credits[what[0]] += 1
            elif kind == "forwarded":
                self.at(time + self.setup.latency_us, "credit", idx, what)
            if kind in ("step", "forwarded"):
                self.step(time, idx)
            elif block.is_idle:
                block.is_idle = False
                self.at(time, "step", idx)
        assert all(block.seen == block.expected for block in self.blocks)
        end = self.done + _END_US
        return end, self.busy / end

    def post(self, time: float, idx: int, what: tuple[int, int]) -> None:
        peer, rows = what
        setup = self.setup
        port = idx % setup.ports
        takes = rows * (setup.row_bytes + _CHUNK_HEADER) / (setup.nic / setup.ports)
        self.port_free[port] = max(time, self.port_free[port]) + takes
        self.busy += rows * setup.row_bytes / setup.nic
        self.at(self.port_free[port] + setup.latency_us, "arrive", idx, (peer, rows))

    def step(self, time: float, idx: int) -> None:
        """What a block does next; it is idle if it has to wait."""
        setup, block = self.setup, self.blocks[idx]
        knows_places = time >= setup.place_us
        if not knows_places and not setup.rings_first:
            self.at(setup.place_us, "step", idx)
            return
        if block.arrived and knows_places:
            peer, rows = block.arrived.popleft()
            block.seen += 1
            self.at(time + rows * self.fan_out * setup.row_bytes * self.us_per_byte, "forwarded", idx, (peer, rows))
            return
        if block.next_ring < len(block.tokens):
            token = block.tokens[block.next_ring]
            if all(block.credits[p] > 0 or block.filled[p] > 0 for p in token):
                self.store_to_rings(time, idx, token)
                return
        elif not knows_places:
            self.at(setup.place_us, "step", idx)
            return
        is_local_left = setup.rings_first and block.next_local < len(block.tokens)
        if is_local_left and knows_places and block.next_ring == len(block.tokens):
            block.next_local += 1
            self.at(time + self.local_rows * setup.row_bytes * self.us_per_byte, "step", idx)
            return
        block.is_idle = True
        if block.next_ring == len(block.tokens) and block.seen == block.expected:
            self.done = max(self.done, time)

    def store_to_rings(self, time: float, idx: int, token: list[int]) -> None:
        setup, block = self.setup, self.blocks[idx]
        block.next_ring += 1
        rows = len(token) + (0 if setup.rings_first else self.local_rows)
        end = time + rows * setup.row_bytes * self.us_per_byte
        for peer in token:
            if block.filled[peer] == 0:
                block.credits[peer] -= 1
            block.filled[peer] += 1
            block.left[peer] -= 1
            if block.filled[peer] == setup.chunk_rows or block.left[peer] == 0:
                self.at(end, "post", idx, (peer, block.filled[peer]))
                block.filled[peer] = 0
        self.at(end, "step", idx)
