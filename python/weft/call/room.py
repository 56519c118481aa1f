"""What a dispatch raises where `Shape.tells_need` is set: internal, whoever sets it makes larger windows."""

from __future__ import annotations

from weft.errors import InvalidArgument

__all__ = ["NeedsRoom"]


class NeedsRoom(InvalidArgument):
    """A rank has more tokens than the windows hold; every rank raises it. Nothing was sent.

    Attributes: `num_tokens`, the most of any rank.
    """

    _is_of_all = True

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(f"a rank has {num_tokens} tokens; allowed are up to max_tokens_per_rank")

    def __reduce__(self) -> tuple[type[NeedsRoom], tuple[int]]:
        return type(self), (self.num_tokens,)
