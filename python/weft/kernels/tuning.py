"""Which kernels a call runs: those for small batches (latency) or the others (throughput).

From values equal on all ranks. `Table` holds what is measured; `choose` and `small_num_sms` are all that ask it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "FORMS", "Table", "choose", "small_num_sms"]

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
    """

    most_tokens: tuple[tuple[tuple[str, str, str], int], ...] = ()
    most_tokens_else: int = 256
    num_sms: tuple[tuple[int, int], ...] = ((32, 32),)
    num_sms_else: int = 64


DEFAULT = Table()


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
