"""What a rank's communicator takes: memory, connections (QPs) and signals."""

from __future__ import annotations

from dataclasses import dataclass

from weft.limits import MAX_GPU_RANKS, gpu_window_bytes, landing_row_bytes, most_small_tokens
from weft.memory import Part, Shape, parts
from weft.planner.machines import Machine
from weft.planner.model import Load

__all__ = ["Network", "memory_of", "network_of"]

_CONTEXTS_PER_PORT = 4
_RING_BUDGET = 64 << 20  # bytes, each way
_SMALL_CHUNK_ROWS, _CHUNK_ROWS = 4, 16
_MIN_SLOTS, _MAX_SLOTS = 2, 4
_BYTES_PER_PICK = 4  # weight or id behind the rows of a chunk
_ROUTING_BYTES = 72 << 10  # of a message at T = 4096, as designed; in proportion to T
_ROUTING_TOKENS = 4096
_PARITIES = 2


@dataclass(frozen=True)
class Network:
    """What the network of one rank takes [model]: `peers` of its rail; `qps` as rails, `qps_full` if every rank is
    reached at once; `signals`; rings of `chunk_rows` rows a chunk and `slots` chunks; bytes of rings and of routing
    messages, both ways together.
    """

    peers: int
    qps: int
    qps_full: int
    signals: int
    chunk_rows: int
    slots: int
    ring_bytes: int
    routing_bytes: int


def network_of(
    machine: Machine, load: Load, *, top_k: int, num_blocks: int, row_bytes: float, is_small: bool
) -> Network | None:
    """Rings and connections by the rules of the scale-out design; None within one domain."""
    if not load.is_network:
        return None
    peers = load.num_domains - 1
    rings = peers * num_blocks
    rows = _SMALL_CHUNK_ROWS if is_small else _CHUNK_ROWS

    def chunk(num_rows: int) -> int:
        return int(num_rows * (row_bytes + _BYTES_PER_PICK * top_k))

    while rows > 1 and rings * _MIN_SLOTS * chunk(rows) > _RING_BUDGET:
        rows //= 2
    slots = max(_MIN_SLOTS, min(_MAX_SLOTS, _RING_BUDGET // (rings * chunk(rows))))
    contexts = _CONTEXTS_PER_PORT * machine.nic_ports
    routing = _PARITIES * peers * max(64, _ROUTING_BYTES * load.num_tokens // _ROUTING_TOKENS)
    return Network(
        peers=peers,
        qps=peers * contexts,
        qps_full=(load.num_ranks - 1) * contexts,
        signals=peers * (num_blocks * (slots + 1) + _PARITIES),
        chunk_rows=rows,
        slots=slots,
        ring_bytes=2 * rings * slots * chunk(rows),
        routing_bytes=2 * routing,
    )


def memory_of(load: Load, network: Network | None, *, hidden: int, top_k: int, busiest_rows: float) -> tuple[Part, ...]:
    """Bytes on each rank, the total last.

    Within a domain that Weft's nvlink engine runs on these are the figures of `weft size`; beyond it, a [model]:
    windows of the domain without a landing, rings and routing messages, and the rows that one dispatch leaves on the
    busiest rank.
    """
    size = load.num_ranks // load.num_domains
    if network is None and size <= MAX_GPU_RANKS:
        shape = Shape(
            ranks=size, tokens=load.num_tokens, hidden=hidden, experts=load.num_experts, top_k=top_k, engine="nvlink"
        )
        return parts(shape)
    small = most_small_tokens(load.num_tokens)
    row = landing_row_bytes(hidden, "bfloat16")
    words, _ = gpu_window_bytes(size, load.num_experts, top_k, load.num_tokens, row, small)
    slots = 2 * size * small * row
    rows = int(busiest_rows * (2 * hidden + 8 * top_k))
    found = [
        Part("control_bytes", words, "headers, plans and other small words of one window [model]"),
        Part("staging_bytes", slots, "slots of small batches; no landing [model]"),
        Part("rows_bytes", rows, "rows of one dispatch on the busiest rank, bf16 [model]"),
    ]
    if network is not None:
        found.append(Part("ring_bytes", network.ring_bytes, "send and receive rings, registered [model]"))
        found.append(Part("routing_bytes", network.routing_bytes, "routing messages, registered [model]"))
    total = sum(part.num_bytes for part in found)
    return (*found, Part("total_bytes", total, "all of these [model]"))
