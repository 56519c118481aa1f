"""Builds the file tree of a made-up machine, as `weft.topology.read` finds it below a root."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.topology.tree import to_hex

NVIDIA, MELLANOX, AMAZON = 0x10DE, 0x15B3, 0x1D0F
COMPLETES_ALL = 0b111 << 7  # DevCap2: 32, 64, 128 bit
ROUTES = 1 << 6


def numbers(text: str) -> list[int]:
    """ "0-2,8" as [0, 1, 2, 8]."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def config_space(kind: str, devcap2: int = 0, devctl2: int = 0, acs: int | None = None) -> dict[str, Any]:
    """A configuration space with a PCIe capability at 0x60 and, if `acs` (its control word) is given, ACS at 0x100."""
    data = bytearray(4096)
    data[0x06], data[0x34] = 0x10, 0x60
    data[0x60:0x64] = bytes(
        (0x10, 0, 2 | {"endpoint": 0, "root port": 4, "upstream": 5, "downstream": 6}[kind] << 4, 0)
    )
    data[0x84:0x88] = devcap2.to_bytes(4, "little")
    data[0x88:0x8A] = devctl2.to_bytes(2, "little")
    if acs is not None:
        data[0x100:0x108] = (0x1000D).to_bytes(4, "little") + (0x1F).to_bytes(2, "little") + acs.to_bytes(2, "little")
    return to_hex(bytes(data))


@dataclass(frozen=True)
class Link:
    """Speed in GT/s and width of a PCIe link; None: the driver says "Unknown" and 0."""

    speed: float | None = 32.0
    width: int = 16


@dataclass(frozen=True)
class Pci:
    """A PCI function. `above`: the root bus and the bridges' addresses; `node` -1: the kernel does not know."""

    address: str
    above: Sequence[str]
    vendor: int
    device: int
    class_code: int
    node: int = -1
    driver: str = ""
    link: Link = Link()
    config: dict[str, Any] | None = None
    max_vfs: int | None = None


@dataclass(frozen=True)
class Port:
    """Port 1 of an RDMA device. `gids`: (value, type, netdev)."""

    rate: str = "400 Gb/sec (4X NDR)"
    layer: str = "InfiniBand"
    state: str = "4: ACTIVE"
    phys_state: str = "5: LinkUp"
    lid: str = "0x1"
    gids: Sequence[tuple[str, str, str]] = ()


class Tree:
    """The tree under construction: `nodes` is what tree.json holds."""

    def __init__(self, above_root_bus: str = "/sys/devices") -> None:
        self.nodes: dict[str, Any] = {}
        self.node_cpus: dict[int, str] = {}
        self._above = above_root_bus
        self._num_guids = 0
        self._gpus: list[dict[str, Any]] = []
        self._nvml: dict[str, Any] = {}

    def put(self, path: str, content: Any) -> None:
        """A file (text), a link ({"@link": ...}), or a directory ({})."""
        *above, name = path.strip("/").split("/")
        here = self.nodes
        for part in above:
            here = here.setdefault(part, {})
        here.setdefault(name, content) if content == {} else here.__setitem__(name, content)

    def files(self, folder: str, contents: dict[str, Any]) -> None:
        """Several files of one folder."""
        for name, content in contents.items():
            self.put(f"{folder}/{name}", content)

    # ---- processors

    def processors(
        self, node_cpus: dict[int, str], sibling: Callable[[int], int], model: str, *, flags: str = "fpu sse2"
    ) -> None:
        """CPUs by node; `sibling(cpu)` is the other thread of its core, itself without SMT. Nodes may lack CPUs."""
        self.node_cpus = node_cpus
        online = sorted(cpu for text in node_cpus.values() for cpu in numbers(text))
        where = "/sys/devices/system"
        self.put(f"{where}/cpu/online", f"0-{online[-1]}")
        self.put(f"{where}/cpu/isolated", "")
        for node, text in node_cpus.items():
            for cpu in numbers(text):
                both = sorted({cpu, sibling(cpu)})
                siblings = f"{both[0]}-{both[-1]}" if both[-1] == both[0] + 1 else ",".join(map(str, both))
                contents = {"thread_siblings_list": siblings, "physical_package_id": str(node)}
                self.files(f"{where}/cpu/cpu{cpu}/topology", contents)
        self.put(f"{where}/node/online", f"0-{max(node_cpus)}" if len(node_cpus) > 1 else "0")
        for node, text in node_cpus.items():
            near = " ".join("10" if node == other else "21" for other in node_cpus)
            self.files(f"{where}/node/node{node}", {"cpulist": text, "distance": near})
        self.put("/proc/cpuinfo", f"model name\t: {model}\nflags\t\t: {flags}")

    def process(self, allowed: str, **facts: Any) -> None:
        """What the process was told about itself."""
        memory = "0-1" if {0, 1} <= set(self.node_cpus) else "0"
        defaults = {"memory_nodes": memory, "memlock_bytes": "unlimited", "max_files": 1 << 20, "can_bind_memory": True}
        content = {"allowed": allowed, **defaults, "shm_bytes": 1 << 40, "architecture": "x86_64", **facts}
        self.put("/weft/process.json", {"@json": content})

    def system(self, *, modules: Iterable[str], is_open: bool = True, kernel: str = "6.8.0-60-generic") -> None:
        """Kernel, modules, driver."""
        self.put("/proc/sys/kernel/osrelease", kernel)
        self.put("/proc/modules", "\n".join(modules))
        kind = "NVIDIA UNIX Open Kernel Module for x86_64" if is_open else "NVIDIA UNIX x86_64 Kernel Module"
        self.put("/proc/driver/nvidia/version", f"NVRM version: {kind}  580.95.05  Release Build")
        self.put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        self.files("/sys/kernel/mm/hugepages/hugepages-2048kB", {"nr_hugepages": "0", "free_hugepages": "0"})

    # ---- PCI

    def pci(self, function: Pci) -> str:
        """Add a function; returns its real folder."""
        real = "/".join([self._above, *function.above, function.address])
        contents: dict[str, Any] = {
            "class": f"0x{function.class_code:06x}",
            "vendor": f"0x{function.vendor:04x}",
            "device": f"0x{function.device:04x}",
            "numa_node": str(function.node),
        }
        is_bridge = function.class_code >> 8 == 0x0604
        if not is_bridge:
            contents["local_cpulist"] = self.node_cpus.get(function.node, "") if function.node >= 0 else ""
        for which in () if is_bridge else ("current", "max"):
            link = function.link
            contents[f"{which}_link_speed"] = "Unknown" if link.speed is None else f"{link.speed:.1f} GT/s PCIe"
            contents[f"{which}_link_width"] = "0" if link.speed is None else str(link.width)
        if function.config is not None:
            contents["config"] = function.config
        if function.driver:
            contents["driver"] = {"@link": f"/sys/bus/pci/drivers/{function.driver}"}
        if function.max_vfs is not None:
            contents.update({"sriov_totalvfs": str(function.max_vfs), "sriov_numvfs": "0"})
        self.files(real, contents)
        self.put(f"/sys/bus/pci/devices/{function.address}", {"@link": real})
        return real

    def bridges(self, above: Sequence[str], node: int, acs: int = 0) -> None:
        """Root port, then switch ports in turn upstream and downstream; those that are there already stay."""
        for idx, address in enumerate(above[1:], 1):
            kind = "root port" if idx == 1 else "upstream" if idx % 2 == 0 else "downstream"
            bits = COMPLETES_ALL | ROUTES if idx == 1 else ROUTES
            space = config_space(kind, bits, acs=None if kind == "upstream" else acs)
            if address not in self.nodes.get("sys", {}).get("bus", {}).get("pci", {}).get("devices", {}):
                vendor = 0x8086 if idx == 1 else 0x1000
                self.pci(Pci(address, above[:idx], vendor, 0x1, 0x060400, node, "pcieport", Link(), space))

    # ---- NICs

    def guid(self) -> str:
        """A new GUID."""
        self._num_guids += 1
        return f"0200:0000:0000:{self._num_guids:04x}"

    def nic(self, name: str, function: Pci, port: Port, *, card: str = "", netdev: str = "") -> None:
        """An RDMA device on a function. `card`: its system image GUID, else its own."""
        real = self.pci(function)
        guid = self.guid()
        where = f"{real}/infiniband/{name}"
        self.put(f"/sys/class/infiniband/{name}", {"@link": where})
        layer_is_efa = port.layer == "Unspecified"
        self.files(
            where,
            {
                "device": {"@link": real},
                "node_type": "7: unspecified" if layer_is_efa else "1: CA",
                "node_guid": guid,
                "sys_image_guid": card or guid,
            },
        )
        if not layer_is_efa:
            self.put(f"{where}/fw_ver", "28.43.1014")
        at = f"{where}/ports/1"
        state = {"state": port.state, "phys_state": port.phys_state, "rate": port.rate}
        self.files(at, {**state, "link_layer": port.layer, "lid": port.lid})
        gids = port.gids or [(f"fe80:0000:0000:0000:{guid}", "IB/RoCE v1" if not layer_is_efa else "", netdev)]
        for idx, (value, kind, interface) in enumerate(gids):
            self.put(f"{at}/gids/{idx}", value)
            self.put(f"{at}/gid_attrs/types/{idx}", kind or {"@error": "EINVAL"})
            self.put(f"{at}/gid_attrs/ndevs/{idx}", interface or {"@error": "EINVAL"})
        self.put(f"{at}/gids/{len(gids)}", ":".join(["0000"] * 8))
        self.put(f"{at}/gid_attrs/types/{len(gids)}", {"@error": "EINVAL"})
        self._verbs(name)
        if netdev:
            self.interface(netdev, real)

    def _verbs(self, name: str) -> None:
        classes = self.nodes["sys"]["class"].get("infiniband_verbs", {})
        node = f"uverbs{len(classes)}"
        self.put(f"/sys/class/infiniband_verbs/{node}", {"ibdev": name})
        self.put(f"/dev/infiniband/{node}", {})

    def interface(self, name: str, real: str, *, speed: int = 400000, mtu: int = 4200, master: str = "") -> None:
        """A network interface on a PCI function."""
        where = f"{real}/net/{name}"
        self.files(where, {"device": {"@link": real}, "speed": str(speed), "mtu": str(mtu), "operstate": "up"})
        if master:
            self.put(f"{where}/master", {"@link": f"/sys/devices/virtual/net/{master}"})
        self.put(f"/sys/class/net/{name}", {"@link": where})

    # ---- GPUs

    def gpu(self, function: Pci, **nvml: Any) -> None:
        """A GPU in sysfs and NVML, with 18 NVLinks to a switch; `nvml`: values that differ."""
        self.pci(function)
        idx = len(self._gpus)
        # NVLink 4 and 5, by NVML's numbers.
        is_blackwell = nvml.get("compute_capability", [9, 0])[0] >= 10
        version, speed = (7, 53125) if is_blackwell else (6, 26562)
        links = {"count": 18, "active": True, "version": version, "speed_mbps": speed, "remote_type": "switch"}
        cpus = self.node_cpus.get(function.node, "")
        domain, rest = function.address.split(":", 1)
        entry: dict[str, Any] = {
            "name": "NVIDIA H100 80GB HBM3",
            "uuid": f"GPU-00000000-0000-4000-8000-{idx + 1:012x}",
            "pci": f"{int(domain, 16):08X}:{rest.upper()}",
            "memory_bytes": 85520809984,
            "compute_capability": [9, 0],
            "cpus": cpus or ",".join(text for text in self.node_cpus.values() if text),
            "memory_nodes": str(max(function.node, 0)),
            "is_mig": False,
            "nvlinks": links,
            "fabric": {"state": "completed", "status": "success", "cluster_uuid": None, "clique_id": 0},
        }
        entry.update(nvml)
        self._gpus.append({key: value for key, value in entry.items() if value is not None})

    def nvml(self, **facts: Any) -> None:
        """Write nvml.json with the GPUs added so far; every pair has peer access."""
        count = len(self._gpus)
        says_yes = {"read": "ok", "write": "ok", "nvlink": "ok", "atomics": "ok"}
        pairs = [{"a": a, "b": b, "p2p": says_yes} for a in range(count) for b in range(a + 1, count)]
        content = {
            "error": None,
            "driver": "580.95.05",
            "cuda_driver": "13.0",
            **facts,
            "gpus": self._gpus,
            "pairs": pairs,
        }
        self.put("/weft/nvml.json", {"@json": content})
