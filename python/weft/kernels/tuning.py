"""Which kernels a call runs, those for small batches (latency) or the others (throughput), and on how many SMs.

From values equal on all ranks. `Table` holds what is measured; `choose` and `small_num_sms` are all that ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weft.limits import SMALL_SHARED_BYTES, small_shared_bytes

__all__ = [
    "DEFAULT",
    "DEFAULT_NUM_SMS",
    "FORMS",
    "Table",
    "choose",
    "choose_num_sms",
    "default_num_sms",
    "large_num_sms",
    "most_num_sms",
    "prefers_small",
    "small_num_sms",
    "suits_small",
]

# How rows travel. plain: in their own type of two bytes, bfloat16 or float16; wide: in float32; quantized: made FP8 by
# the kernel (dispatch: quantize=, combine: wire=); bytes: a weft.Quantized of the caller.
FORMS = {"dispatch": ("plain", "wide", "quantized", "bytes"), "combine": ("plain", "wide", "quantized")}


@dataclass(frozen=True)
class Table:
    """Crossovers of one machine. Every rank of an ExpertParallel has the same, that of rank 0.

    Attributes:
        most_tokens: ((op, layout, form), T) pairs: up to T tokens a rank, the bound of the call, the kernels for small
            batches are faster. `op` and `form` as in FORMS.
        most_tokens_else: T of what is not among them.
        num_sms: (T, SMs) pairs, T ascending: SMs of a small-batch call of at most T tokens a rank.
        num_sms_else: beyond them.
        node_num_sms: ((ranks of a node, op, layout), SMs) pairs: SMs of a large call between nodes of so many ranks.
    """

    most_tokens: tuple[tuple[tuple[str, str, str], int], ...] = ()
    most_tokens_else: int = 256
    num_sms: tuple[tuple[int, int], ...] = ((32, 32),)
    num_sms_else: int = 64
    node_num_sms: tuple[tuple[tuple[int, str, str], int], ...] = ()


DEFAULT = Table()

# SMs of a large call for which nobody has said how many. By expert an SM stores a row to several places, or adds
# several: such calls want more of them than the wire does (docs/decisions/0038).
DEFAULT_NUM_SMS, DISPATCH_BY_EXPERT_NUM_SMS, COMBINE_BY_EXPERT_NUM_SMS = 16, 24, 32


def choose(table: Table, op: str, layout: str, form: str, max_tokens: int) -> str:
    """The mode of an `op` whose ranks have at most `max_tokens` tokens: "latency" or "throughput"."""
    most = table.most_tokens_else
    for key, tokens in table.most_tokens:  # no dict: torch.compile traces this
        if key == (op, layout, form):
            most = tokens
            break
    return "latency" if max_tokens <= most else "throughput"


def small_num_sms(table: Table, max_tokens: int) -> int:
    """SMs of a small-batch call for which nobody has said how many."""
    for most, num_sms in table.num_sms:
        if max_tokens <= most:
            return num_sms
    return table.num_sms_else


def default_num_sms(op: str, layout: str) -> int:
    """SMs of a large call for which nobody has said how many, where there are so many."""
    if layout == "rank_major":
        return DEFAULT_NUM_SMS
    return DISPATCH_BY_EXPERT_NUM_SMS if op == "dispatch" else COMBINE_BY_EXPERT_NUM_SMS


def large_num_sms(table: Table, op: str, layout: str, node_ranks: int) -> int:
    """The same of ranks in nodes (0: none), where they were measured."""
    for key, num_sms in table.node_num_sms:
        if key == (node_ranks, op, layout):
            return num_sms
    return default_num_sms(op, layout)


class Layer(Protocol):
    """What the choice depends on, of an ExpertParallel: weft/call/shape.py."""

    engine: str
    num_ranks: int
    top_k: int
    num_sms: int
    has_num_sms: bool
    most_num_sms: int
    small_tokens: int
    node_ranks: int
    table: Table

    @property
    def num_local_experts(self) -> int:
        """Experts of each rank."""


def prefers_small(layer: Layer, op: str, layout: str, form: str, max_tokens: int) -> bool:
    """Whether mode "auto" takes the kernels for small batches, by what is measured."""
    if layer.engine == "cpu" or max_tokens > layer.small_tokens:
        return False
    return choose(layer.table, op, layout, form, max_tokens) == "latency"


def suits_small(layer: Layer, layout: str, capacity: int | None, max_tokens: int, num_sms: int | None) -> bool:
    """What the table does not know of: without capacity the others take the memory that expert_major needs and no more;
    few SMs may have no room for all places."""
    if layout == "expert_major" and capacity is None:
        return False
    sms = choose_num_sms(layer, "dispatch", layout, max_tokens, num_sms, is_small=True)
    width, groups = (1, 1) if layout == "rank_major" else (layer.top_k, layer.num_local_experts)
    num_places = layer.num_ranks * -(-max(layer.small_tokens, sms) // sms) * width
    return small_shared_bytes(num_places, groups, layer.num_local_experts) <= SMALL_SHARED_BYTES


def choose_num_sms(layer: Layer, op: str, layout: str, max_tokens: int, num_sms: int | None, *, is_small: bool) -> int:
    """SMs of a call; `num_sms`: what its caller has said."""
    if num_sms is not None:
        return num_sms
    if layer.has_num_sms or layer.engine == "cpu":
        return layer.num_sms
    if is_small:
        return min(small_num_sms(layer.table, max_tokens), layer.most_num_sms)
    return min(large_num_sms(layer.table, op, layout, layer.node_ranks), layer.most_num_sms)


def most_num_sms(max_num_sms: int, rank_sms: int, num_windows: int, *, has_nodes: bool = False) -> int:
    """SMs that a call may take: calls of all windows may run at once, and all their blocks must find an SM (R15), which
    one of them may fill; between nodes a block more, that is the network. 0 and less: none (the cpu engine)."""
    return min(max_num_sms, rank_sms // num_windows - has_nodes)
