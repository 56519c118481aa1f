"""`ExpertMap`: which physical experts hold each logical one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import InvalidArgument

__all__ = ["ExpertMap"]

_ID_DTYPES = (torch.int32, torch.int64)


class ExpertMap:
    """Replicas of logical experts. N logical experts, up to R replicas each; E physical ones, of which p lives on rank
    p // (E / ranks) and holds at most one logical expert. It never changes: equal maps compare equal.

    Args:
        replicas: int32 or int64 [N, R], N and R at least 1: physical ids, -1 for none, in any order of columns. No
            physical id may stand twice. A row of -1: the expert is nowhere, and its picks are absent.

    Raises:
        InvalidArgument: `replicas` is none of these.
    """

    def __init__(self, replicas: Tensor) -> None:
        if not isinstance(replicas, Tensor) or replicas.dtype not in _ID_DTYPES or replicas.dim() != 2:
            raise InvalidArgument(f"replicas is {_shown(replicas)}; allowed is a tensor [N, R] of int32 or int64")
        if 0 in replicas.shape:
            raise InvalidArgument(f"replicas is {list(replicas.shape)}; allowed are N and R of at least 1")
        rows = replicas.detach().to("cpu", torch.int64)
        least, most = int(rows.min()), int(rows.max())
        if least < -1 or most >= 1 << 31:
            raise InvalidArgument(f"replicas has the id {least if least < -1 else most}; allowed are -1 to 2^31 - 1")
        ids, counts = rows[rows >= 0].unique(return_counts=True)
        if bool((counts > 1).any()):
            twice = int(ids[counts > 1][0])
            logical = (rows == twice).any(dim=1).nonzero().flatten().tolist()
            raise InvalidArgument(
                f"replicas has the physical id {twice} more than once, for logical experts {logical}; a physical "
                "expert holds one logical expert at most"
            )
        self._replicas = rows.to(torch.int32).contiguous()
        said = f"{list(rows.shape)}".encode() + self._replicas.numpy().tobytes()
        self._digest = int.from_bytes(hashlib.sha256(said).digest()[:8], "little") or 1

    @classmethod
    def spread(
        cls, num_logical_experts: int, num_experts: int, num_ranks: int, ranks: Sequence[int] | None = None
    ) -> ExpertMap:
        """Each logical expert once, in ascending order over the ranks, as evenly as can be: the first N % ranks get one
        more. With N = num_experts logical and physical ids are the same. What an ExpertParallel begins with.

        `ranks`: on these of the num_ranks alone, such as `comm.active_ranks`; None: on all.

        Raises:
            InvalidArgument: a number is below 1, num_experts is no multiple of num_ranks, or N is above the physical
                experts of the ranks; `ranks` are none of 0 to num_ranks - 1, or not distinct.
        """
        for name, value in (
            ("num_logical_experts", num_logical_experts), ("num_experts", num_experts), ("num_ranks", num_ranks),
        ):  # fmt: skip
            if type(value) is not int or value < 1:
                raise InvalidArgument(f"{name} is {value!r}; allowed is an int of at least 1")
        if num_experts % num_ranks:
            raise InvalidArgument(f"num_experts is {num_experts}; allowed are multiples of num_ranks = {num_ranks}")
        there = sorted(range(num_ranks) if ranks is None else ranks)
        if not there or len(set(there)) < len(there) or not 0 <= there[0] <= there[-1] < num_ranks:
            raise InvalidArgument(f"ranks is {ranks!r}; allowed are distinct ranks, 0 to {num_ranks - 1}")
        num_local = num_experts // num_ranks
        if num_logical_experts > num_local * len(there):
            raise InvalidArgument(
                f"num_logical_experts is {num_logical_experts}; allowed are 1 to {num_local * len(there)}"
            )
        few, more = divmod(num_logical_experts, len(there))
        found: list[int] = []
        for idx, rank in enumerate(there):
            found += range(rank * num_local, rank * num_local + few + (idx < more))
        return cls(torch.tensor(found, dtype=torch.int32, device="cpu").unsqueeze(1))

    @property
    def replicas(self) -> Tensor:
        """int32 [N, R], a copy in host memory."""
        return self._replicas.clone()

    @property
    def num_logical_experts(self) -> int:
        """N."""
        return len(self._replicas)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell maps apart; errors name a map by them."""
        return f"{self._digest:016x}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertMap):
            return NotImplemented
        return torch.equal(self._replicas, other._replicas)

    def __hash__(self) -> int:
        return self._digest

    def __reduce__(self) -> tuple[Any, ...]:
        return ExpertMap, (self._replicas,)

    def __repr__(self) -> str:
        number = int((self._replicas >= 0).sum())
        return f"weft.ExpertMap({self.num_logical_experts} logical experts, {number} replicas, {self.digest})"


def _shown(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
