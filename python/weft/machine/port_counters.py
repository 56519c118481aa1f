"""Counters of RDMA ports: what they carried, and what slowed them or went wrong. Read before and after a run.

Files: Linux's sysfs-class-infiniband (counters), the drivers of mlx5, irdma and EFA (hw_counters).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["MEANINGS", "Counts", "growth", "read"]

Counts = dict[str, dict[str, int]]  # of a port ("mlx5_0/1"): values by file

_DEVICES = Path("/sys/class/infiniband")
_WORD = 4  # bytes that port_xmit_data and port_rcv_data count
_SENT = (("counters/port_xmit_data", _WORD), ("hw_counters/tx_bytes", 1))  # EFA has the second one
_RECEIVED = (("counters/port_rcv_data", _WORD), ("hw_counters/rx_bytes", 1))
# What grows when something is not as it should be.
MEANINGS = {
    "counters/port_xmit_wait": "something to send, but no credit, or stopped: congestion further on",
    "counters/port_xmit_discards": "packets were thrown away here",
    "counters/port_rcv_errors": "packets came damaged: the cable or transceiver",
    "counters/symbol_error": "the cable or transceiver",
    "counters/link_downed": "the link was lost: the cable or transceiver",
    "counters/local_link_integrity_errors": "the cable or transceiver",
    "hw_counters/out_of_sequence": "packets were lost, or overtook where that is not allowed",
    "hw_counters/packet_seq_err": "packets were lost, or overtook where that is not allowed",
    "hw_counters/local_ack_timeout_err": "nothing came back: a cable, a switch, a firewall, another MTU",
    "hw_counters/rnr_nak_retry_err": "a receiver was not ready",
    "hw_counters/np_cnp_sent": "ECN marks came here",
    "hw_counters/rp_cnp_handled": "senders here were slowed by ECN",
    "hw_counters/rx_drops": "packets were thrown away here",
}


def read() -> Counts:
    """What this machine's ports say now: only counters that can be read."""
    found: Counts = {}
    for port in sorted(_DEVICES.glob("*/ports/*")):
        names = [*MEANINGS, *(name for name, _ in (*_SENT, *_RECEIVED))]
        values = {name: _number(port / name) for name in names}
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            found[f"{port.parents[1].name}/{port.name}"] = known
    return found


def growth(before: Counts, after: Counts) -> list[dict[str, Any]]:
    """A row for each port that was there both times and has a counter that grew (docs/benchmarking.md, kind "port")."""
    rows = []
    for port in sorted(before.keys() & after.keys()):
        grown = {name: after[port][name] - old for name, old in before[port].items() if name in after[port]}
        if any(value > 0 for value in grown.values()):
            # A driver that was loaded again has begun at 0.
            suspects = {name: value for name, value in grown.items() if name in MEANINGS and value > 0}
            row = {"sent_bytes": _bytes(grown, _SENT), "received_bytes": _bytes(grown, _RECEIVED), "grown": suspects}
            rows.append({"kind": "port", "port": port, **row})
    return rows


def _bytes(grown: dict[str, int], files: tuple[tuple[str, int], ...]) -> int | None:
    return next((grown[name] * unit for name, unit in files if grown.get(name, -1) >= 0), None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
