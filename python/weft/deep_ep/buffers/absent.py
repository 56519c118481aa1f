"""What `ElasticBuffer` of DeepEP has and Weft refuses."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from weft.deep_ep.errors import refused
from weft.deep_ep.utils.math import align

__all__ = ["HINT_MULTIPLE", "Absent", "absent"]

HINT_MULTIPLE = 2 << 20

_STORAGE = ("storage on other machines", "keep tensors with torch.distributed")
_RINGS = ("sending between pipeline stages", "use torch.distributed.isend and irecv")
_GATHERS = ("gathers of tensors", "use torch.distributed.all_gather_into_tensor")


def absent(name: str, why: tuple[str, str]) -> Any:
    """A method that raises `NotSupported`, whatever it is given; `why`: what it needs, and what to use instead."""

    def refuse(self: Any, *args: Any, **named: Any) -> NoReturn:
        raise refused(name, *why)

    refuse.__name__ = name
    refuse.__doc__ = "Raises NotSupported."
    return refuse


class Absent:
    """Each raises `NotSupported`, whatever it is given; two hints are arithmetic."""

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Bytes of the entries and of those that are fetched, a multiple of 2 MiB; and 0 on the host. Local."""
        return align((num_entries + num_max_tokens_per_rank) * hidden * dtype.itemsize, HINT_MULTIPLE), 0

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes of the tensors on their way to and from two neighbours, a multiple of 2 MiB. Local."""
        return align(4 * num_max_inflight_tensors * num_max_tensor_bytes, HINT_MULTIPLE)

    engram_write = absent("engram_write", _STORAGE)
    engram_fetch = absent("engram_fetch", _STORAGE)
    pp_set_config = absent("pp_set_config", _RINGS)
    pp_send = absent("pp_send", _RINGS)
    pp_recv = absent("pp_recv", _RINGS)
    create_agrs_session = absent("create_agrs_session", _GATHERS)
    destroy_agrs_session = absent("destroy_agrs_session", _GATHERS)
    agrs_new_session = absent("agrs_new_session", _GATHERS)
    agrs_set_config = absent("agrs_set_config", _GATHERS)
    agrs_get_inplace_tensor = absent("agrs_get_inplace_tensor", _GATHERS)
    get_agrs_num_max_session_bytes = absent("get_agrs_num_max_session_bytes", _GATHERS)
    get_agrs_buffer_size_hint = absent("get_agrs_buffer_size_hint", _GATHERS)
    all_gather = absent("all_gather", _GATHERS)
