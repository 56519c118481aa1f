"""Names of the original that only its own buffers use."""

from __future__ import annotations

__all__ = ["get_nccl_comm_handle"]


def get_nccl_comm_handle(group: object) -> None:
    """None: Weft does not use NCCL."""
