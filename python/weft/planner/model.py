"""How long a call takes: bytes over each link and through the SMs, each at its rate, and what is left of it.

    t_network = rows a rank puts on (or takes from) the network x row / rate
    t_nvlink  = rows a rank puts on (or takes from) NVLink x row / rate
    t_sm      = what the SMs do for rows, rows in network rings and ranks, shared by the SMs of the call
    t         = t_0 + (t_network^p + t_nvlink^p + t_sm^p)^(1/p)

p says how well the three overlap: large, the slowest alone counts; 1, they add up. A call around a kernel adds
c + d x bytes received + e x (ranks x tokens x experts): launches, the copy out of buffers, the exchange of the routing
map. The constants of published systems are fitted (weft.planner.fit); Weft's own are in weft.planner.weft_rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weft.planner.traffic import Reach

__all__ = ["BINDERS", "Load", "Times", "load_of", "time_of", "time_of_copies_us"]

BINDERS = ("NIC", "NVLink", "SM")
_BYTES_PER_US = 1e3  # of one GB/s


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one call asks of the busiest rank. Rows; `row_bytes` each.

    Attributes:
        network_rows: over its NIC, the larger of sent and received. By rail: one a token and other domain.
        nvlink_rows: to or from other ranks of its domain, whichever is more.
        store_rows: final rows that its SMs store, those of other domains' tokens that it forwards included.
        ring_rows: rows that its SMs bring to the network.
        domain_rows, rank_rows: as published bandwidths count: own domain and own rank included.
    """

    row_bytes: float
    num_tokens: int
    num_ranks: int
    num_domains: int
    num_experts: int
    network_rows: float
    nvlink_rows: float
    store_rows: float
    ring_rows: float
    domain_rows: float
    rank_rows: float
    copies: float  # rows if every expert gets one, T x K
    far_copies: float  # of these, to other domains

    @property
    def is_network(self) -> bool:
        """Whether the ranks are in more than one domain."""
        return self.num_domains > 1

    def of_combine(self) -> Load:
        """The way back across domains: SMs load the rows of ranks and the sums of all domains, the own one too."""
        return replace(self, ring_rows=self.domain_rows) if self.is_network else self


def load_of(reach: Reach, *, num_tokens: int, row_bytes: float) -> Load:
    """The load of the busiest rank; with an even routing all are alike.

    Every rank sends `num_tokens` tokens that are spread by `reach`. A row crosses the network once a domain, to the
    rank of the same place there, which forwards it to the ranks that want it.
    """
    num_ranks, num_domains = len(reach.by_rank), len(reach.by_domain)
    size = reach.ranks_per_domain
    sent = received = stored = 0.0
    for domain, here in enumerate(reach.by_domain):
        sent = max(sent, reach.domains - here)
        received = max(received, (num_domains - 1) * here)
        stored = max(stored, num_domains * sum(reach.by_rank[domain * size : (domain + 1) * size]))
    busiest = max(reach.by_rank)
    to_others = max(reach.ranks - min(reach.by_rank), (num_ranks - 1) * busiest)
    if num_domains > 1:  # forwarded rows come from mates only: G - 1 of G ranks of the domain
        to_others = max(stored, num_ranks * busiest) * (size - 1) / size
    return Load(
        row_bytes=row_bytes,
        num_tokens=num_tokens,
        num_ranks=num_ranks,
        num_domains=num_domains,
        num_experts=reach.num_experts,
        network_rows=num_tokens * max(sent, received),
        nvlink_rows=num_tokens * to_others,
        store_rows=num_tokens * stored,
        ring_rows=num_tokens * sent,
        domain_rows=num_tokens * reach.domains,
        rank_rows=num_tokens * reach.ranks,
        copies=num_tokens * reach.top_k,
        far_copies=num_tokens * reach.top_k * (num_ranks - size) / num_ranks,
    )


@dataclass(frozen=True)
class Times:
    """Microseconds of a call and of its parts; `binds`: the part that takes longest."""

    total_us: float
    network_us: float
    nvlink_us: float
    sm_us: float
    start_us: float
    binds: str
    around_us: float = field(default=0.0)  # what a call adds to its kernel


def time_of(load: Load, constants: Mapping[str, float], num_sms: int) -> Times:
    """The time of a call on `num_sms` SMs. Constants that are absent take no time.

    network, nvlink: GB/s of a rank. sm_row, sm_ring_row: us a row; sm_rate, sm_ring_rate: GB/s of one SM; sm_rank: us a
    token and rank. start: us. overlap: p. call: us; call_mb: us a MB received; call_map: us a MB of R x T x E.
    """
    row = load.row_bytes

    def moving(rows: float, rate: str) -> float:
        return rows * row / (constants[rate] * _BYTES_PER_US) if rate in constants else 0.0

    network = moving(load.network_rows, "network") if load.is_network else 0.0
    nvlink = moving(load.nvlink_rows, "nvlink")
    work = load.store_rows * constants.get("sm_row", 0.0) + moving(load.store_rows, "sm_rate")
    work += load.ring_rows * constants.get("sm_ring_row", 0.0) + moving(load.ring_rows, "sm_ring_rate")
    work += load.num_tokens * load.num_ranks * constants.get("sm_rank", 0.0)
    sm = work / num_sms
    p = constants.get("overlap", 8.0)
    parts = (network, nvlink, sm)
    longest = max(parts)
    together = longest * sum((part / longest) ** p for part in parts) ** (1 / p) if longest > 0 else 0.0
    start = constants.get("start", 0.0)
    around = constants.get("call", 0.0)
    around += constants.get("call_mb", 0.0) * load.rank_rows * row / 1e6
    around += constants.get("call_map", 0.0) * load.num_ranks * load.num_tokens * load.num_experts / 1e6
    binds = BINDERS[parts.index(longest)]
    return Times(start + together + around, network, nvlink, sm, start, binds, around)


def time_of_copies_us(load: Load, constants: Mapping[str, float]) -> float:
    """Microseconds of a small batch of which every expert gets a copy through the NIC (DeepEP V1, low latency).

    network: GB/s; crowd: how much longer it takes, as a share, if all copies go to other domains.
    """
    share = load.far_copies / load.copies
    alone = load.copies * load.row_bytes / (constants["network"] * _BYTES_PER_US)
    return alone * (1 + constants.get("crowd", 0.0) * share)
