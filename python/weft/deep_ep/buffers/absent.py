"""What `ElasticBuffer` of DeepEP has and Weft refuses."""

from __future__ import annotations

from typing import Any, NoReturn

from weft.deep_ep.errors import refused

__all__ = ["Absent"]

_STORAGE = ("storage on other machines", "keep tensors with torch.distributed")
_RINGS = ("sending between pipeline stages", "use torch.distributed.isend and irecv")
_GATHERS = ("gathers of tensors", "use torch.distributed.all_gather_into_tensor")


def _absent(name: str, why: tuple[str, str]) -> Any:
    def refuse(self: Any, *args: Any, **named: Any) -> NoReturn:
        raise refused(name, *why)

    refuse.__name__ = name
    refuse.__doc__ = "Raises NotSupported."
    return refuse


class Absent:
    """Each raises `NotSupported`, whatever it is given."""

    engram_write = _absent("engram_write", _STORAGE)
    engram_fetch = _absent("engram_fetch", _STORAGE)
    get_engram_storage_size_hint = _absent("get_engram_storage_size_hint", _STORAGE)
    pp_set_config = _absent("pp_set_config", _RINGS)
    pp_send = _absent("pp_send", _RINGS)
    pp_recv = _absent("pp_recv", _RINGS)
    get_pp_buffer_size_hint = _absent("get_pp_buffer_size_hint", _RINGS)
    create_agrs_session = _absent("create_agrs_session", _GATHERS)
    destroy_agrs_session = _absent("destroy_agrs_session", _GATHERS)
    agrs_new_session = _absent("agrs_new_session", _GATHERS)
    agrs_set_config = _absent("agrs_set_config", _GATHERS)
    agrs_get_inplace_tensor = _absent("agrs_get_inplace_tensor", _GATHERS)
    get_agrs_num_max_session_bytes = _absent("get_agrs_num_max_session_bytes", _GATHERS)
    get_agrs_buffer_size_hint = _absent("get_agrs_buffer_size_hint", _GATHERS)
    all_gather = _absent("all_gather", _GATHERS)
