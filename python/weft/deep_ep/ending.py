"""How a buffer of any of the three kinds ends."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from weft.errors import InvalidState

if TYPE_CHECKING:
    from weft.communicator import Communicator
    from weft.deep_ep.layers import Layers
    from weft.deep_ep.ranks import Ranks

__all__ = ["Ending"]


class Ending:
    """Gives back the windows of a buffer, and its share of the communicator: when asked to, or with its last reference.

    A constructor sets `_ranks` and `_layers`, and `_destroyed = False` as its last statement.
    """

    _ranks: Ranks
    _layers: Layers
    _destroyed = True  # until there is something to give back
    explicitly_destroy = False
    runtime: Any = None

    @property
    def comm(self) -> Communicator:
        """Of the group: `comm.rebuild(ranks)` goes on without ranks that are lost."""
        return self._ranks.comm

    def _destroy(self) -> None:
        if not self.explicitly_destroy:
            raise AssertionError(f"destroy() of {type(self).__name__}: it was made without explicitly_destroy=True")
        self._end()

    def _end(self) -> None:
        if self._destroyed:
            return
        self._layers.close()  # refused inside a call of another thread: nothing is lost, and destroy may come again
        self._destroyed = True
        self._forget_calls()
        self.runtime = None
        self._ranks.release()

    def _forget_calls(self) -> None:
        if self._ranks.masks is not None:
            self._ranks.masks.journal.forget(self)

    def _check_alive(self, what: str) -> None:
        if self._destroyed:
            raise InvalidState(f"{what}: the buffer was destroyed; make a new one")

    def __del__(self) -> None:
        if self._destroyed or sys.is_finalizing():
            return
        self._destroyed = True
        self._forget_calls()
        self._layers.end()
        self._ranks.release()
