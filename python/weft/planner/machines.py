"""Machines to plan for: links, NICs and SMs of a GPU, from data sheets, with what was measured where it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import InvalidArgument

__all__ = ["PRESETS", "Machine", "preset"]

# GB/s a GPU and direction: bulk stores and loads between GPUs as 16 SMs reach them on H100 and H200 (450 by the data
# sheet). Other GPUs are taken to reach the same share of theirs.
_PUSH, _PULL, _HOPPER = 345.0, 327.0, 450.0
_IB_US = 8.4  # one way, put + signal from a GPU over ConnectX-7: arXiv 2511.15076
_PROXY_US = 20.0  # one way through a CPU proxy, as a guess


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan needs to know of a machine. Rates in GB/s of one GPU and direction.

    Attributes:
        name, gpu, description: in words.
        ranks_per_domain: GPUs that reach each other by load and store, one rank each.
        num_sms: of a GPU.
        nvlink_push, nvlink_pull: as SMs reach them with stores and with loads.
        nic: of the data sheet; 0: no NIC.
        nic_ports: a GPU; connections are spread over them.
        latency_us: one way over the network, from a put to its signal.
        assumed: what was neither measured nor read in a data sheet.
    """

    name: str
    gpu: str
    description: str
    ranks_per_domain: int = 8
    num_sms: int = 132
    nvlink_push: float = _PUSH
    nvlink_pull: float = _PULL
    nic: float = 50.0
    nic_ports: int = 1
    latency_us: float = _IB_US
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ranks_per_domain", "num_sms", "nic_ports", "nvlink_push", "nvlink_pull"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("nic", "latency_us"):
            if not 0 <= getattr(self, name) < 1e6:
                raise InvalidArgument(f"{name}={getattr(self, name)}: allowed is 0 to 1e6")

    def domain_size(self, num_ranks: int) -> int:
        """Ranks in each domain of a job: the most that fit and divide `num_ranks`."""
        return max(size for size in range(1, min(self.ranks_per_domain, num_ranks) + 1) if num_ranks % size == 0)


def _nvlink(data_sheet: float) -> dict[str, float]:
    return {"nvlink_push": _PUSH * data_sheet / _HOPPER, "nvlink_pull": _PULL * data_sheet / _HOPPER}


_RATE_OF_BLACKWELL = "NVLink at the share of its data sheet that H100 reaches; an SM stores as much as on H100"
_ROCE = "latency as over InfiniBand"

PRESETS: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(name="dgx-h100", gpu="H100", description="8 x H100, 8 x ConnectX-7 of 400 Gb/s, InfiniBand"),
        Machine(
            name="hgx-h200",
            gpu="H200",
            description="8 x H200, 8 x ConnectX-7 of 400 Gb/s, InfiniBand",
        ),
        Machine(name="azure-nd-h100-v5", gpu="H100", description="8 x H100, 8 x ConnectX-7 of 400 Gb/s, InfiniBand"),
        Machine(
            name="aws-p5",
            gpu="H100",
            description="p5.48xlarge: 8 x H100, 32 x EFA of 100 Gb/s",
            nic_ports=4,
            latency_us=_PROXY_US,
            assumed=("20 us one way, as through a CPU proxy", "EFA reaches the same share of its rate as InfiniBand"),
        ),
        Machine(
            name="gcp-a3-ultra",
            gpu="H200",
            description="a3-ultragpu-8g: 8 x H200, 8 x ConnectX-7 of 400 Gb/s, RoCE",
            assumed=(_ROCE,),
        ),
        Machine(
            name="gcp-a3-mega",
            gpu="H100",
            description="a3-megagpu-8g: 8 x H100, 8 x 200 Gb/s Ethernet (GPUDirect-TCPXO)",
            nic=25.0,
            latency_us=_PROXY_US,
            assumed=("20 us one way, as through a CPU proxy", "TCPXO reaches the same share of its rate as InfiniBand"),
        ),
        Machine(
            name="gb200-nvl72",
            gpu="GB200",
            description="72 GPUs on one NVLink, ConnectX-7 of 400 Gb/s for each GPU",
            ranks_per_domain=72,
            num_sms=148,
            assumed=(_RATE_OF_BLACKWELL,),
            **_nvlink(900.0),  # type: ignore[arg-type]
        ),
        Machine(
            name="b200-8",
            gpu="B200",
            description="8 x B200, 8 x ConnectX-7 of 400 Gb/s, InfiniBand",
            num_sms=148,
            assumed=(_RATE_OF_BLACKWELL,),
            **_nvlink(900.0),  # type: ignore[arg-type]
        ),
        Machine(
            name="h800-deepep",
            gpu="H800",
            description="8 x H800 (NVLink 400 GB/s), 8 x ConnectX-7 of 400 Gb/s, InfiniBand",
            assumed=("NVLink at the share of its data sheet that H100 reaches",),
            **_nvlink(200.0),  # type: ignore[arg-type]
        ),
    )
}


def preset(name: str) -> Machine:
    """The machine of that name.

    Raises:
        InvalidArgument: there is none.
    """
    if name not in PRESETS:
        raise InvalidArgument(f"preset={name!r}: allowed are {', '.join(PRESETS)}")
    return PRESETS[name]
