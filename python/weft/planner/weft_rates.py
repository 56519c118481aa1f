"""Weft's own part of the model: its rates, where each comes from, and the time of its calls. Never more than a model.

Of the network nothing is measured: Weft has none yet. Rates inside a machine are those of its kernels on H100 and H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.planner.machines import Machine
from weft.planner.model import Load, Times, time_of

__all__ = ["CALLS", "Call", "rates", "weft_time"]

_STORE = 50.0  # GB/s that one SM stores in bulk, measured on NVLink
_LOAD = 60.0  # GB/s that one SM loads and adds: 60 to 64 of heap tensors on 2 x H100 with 4 to 8 SMs
_LOAD_OF_SUMS = 52.0  # the same of ranks' rows and sums of domains, as designed
_NETWORK = 0.95  # of a NIC's rate, large calls
_NETWORK_SMALL = 0.93  # small batches: short chunks
_START_US = 20.0  # launch, counting, headers: what large calls take beyond their bytes, measured on 4 x H200
_START_SMALL_US = 9.0  # the same of small batches, measured on 2 x H100 and 4 x H200
# Beside two ways over the network (counts there, last rows back) a call across machines takes, event by event:
_START_NETWORK_US = 13.2
_START_NETWORK_SMALL_US = 14.2
_OVERLAP = 8.0


@dataclass(frozen=True)
class Call:
    """One operation with the type in which its rows travel."""

    op: str
    dtype: str

    @property
    def words(self) -> str:
        """As tables show it."""
        return f"{self.op} {self.dtype.upper()}"


CALLS = (Call("dispatch", "fp8"), Call("dispatch", "bf16"), Call("combine", "bf16"))


def rates(machine: Machine, call: Call, *, is_network: bool, is_small: bool) -> Mapping[str, float]:
    """The constants of weft.planner.model for a call of Weft on a machine."""
    is_dispatch = call.op == "dispatch"
    constants = {"nvlink": machine.nvlink_push if is_dispatch else machine.nvlink_pull, "overlap": _OVERLAP}
    if not is_network:
        start = _START_SMALL_US if is_small else _START_US
        return {**constants, "sm_rate": _STORE if is_dispatch else _LOAD, "start": start}
    start = (_START_NETWORK_SMALL_US if is_small else _START_NETWORK_US) + 2 * machine.latency_us
    constants["nvlink"] = machine.nvlink_push  # sums are pushed to whoever forwards them, rows are stored
    constants["network"] = machine.nic * (_NETWORK_SMALL if is_small else _NETWORK)
    rate = _STORE if is_dispatch else _LOAD_OF_SUMS
    return {**constants, "sm_rate": rate, "sm_ring_rate": rate, "start": start}


def weft_time(load: Load, machine: Machine, call: Call, *, num_sms: int, is_small: bool) -> Times:
    """The time of one call of Weft, everything inside the boundary of the public call [model]."""
    constants = rates(machine, call, is_network=load.is_network, is_small=is_small)
    return time_of(load.of_combine() if call.op == "combine" else load, constants, num_sms)
