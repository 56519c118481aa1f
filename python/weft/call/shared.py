"""What belongs to this process and its peers: a copy of it is the object itself, and it can't be pickled."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from weft.errors import Unsupported

Self = TypeVar("Self", bound="Shared")


class Shared:
    """Base of objects that hold windows: `copy.copy` and `copy.deepcopy` (of a module that holds one, an
    `AveragedModel`) share them, as all objects of equal shape do; pickle and `torch.save` raise `Unsupported`."""

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise Unsupported(
            f"pickling a weft.{type(self).__name__}",
            "memory that it shares with its peers in these processes alone",
            "torch.save(module.state_dict()) in place of the module; make the object anew where the state is loaded",
        )
