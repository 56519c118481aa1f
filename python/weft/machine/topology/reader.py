"""`read`: a `Machine` from the files below a root."""

from __future__ import annotations

import os

from weft.machine.topology import cpus, gpus, nics, system
from weft.machine.topology.live import LiveTree
from weft.machine.topology.model import Machine
from weft.machine.topology.pci import read_bridges
from weft.machine.topology.tree import Tree, open_tree

__all__ = ["RECORDING_FILE", "read", "read_here", "read_tree"]

RECORDING_FILE = "/weft/recording.json"  # in a recording: {"description": text}


def read(root: str | os.PathLike[str] = "/") -> Machine:
    """What is known about the machine whose files lie below `root`: "/" this one, else a recording (its directory or
    its tree.json).

    Never raises for what it finds: missing, unreadable or senseless files are unknown facts with a reason. Takes some
    milliseconds, more where NVML has to wake GPUs up; starts neither CUDA nor torch.
    """
    where = os.fspath(root)
    return read_tree(LiveTree() if where == "/" else open_tree(where), where)


def read_here(*, with_nvml: bool = True) -> Machine:
    """This machine. Without NVML what it alone knows about GPUs is unknown."""
    return read_tree(LiveTree(with_nvml=with_nvml), "/")


def read_tree(tree: Tree, root: str) -> Machine:
    """The same from an open tree; `root` is what `Machine.root` says."""
    nvml = tree.json(gpus.NVML_FILE)
    error = nvml.get("error") if nvml else f"{gpus.NVML_FILE}: {tree.why(gpus.NVML_FILE)}"
    processors = cpus.read_cpus(tree)
    devices = gpus.read_gpus(tree, processors, nvml)
    network = nics.read_nics(tree, processors)
    bridges = read_bridges(tree, [gpu.pci for gpu in devices] + [nic.pci for nic in network if nic.pci])
    driver, cuda = (nvml[name] if isinstance(nvml.get(name), str) else None for name in ("driver", "cuda_driver"))
    facts = system.read_system(tree, driver, cuda)
    recording = tree.json(RECORDING_FILE)
    return Machine(
        root=root,
        cpus=processors,
        gpus=devices,
        pairs=gpus.read_pairs(devices, nvml),
        nics=tuple(nics.with_path(nic, bridges) for nic in network),
        netdevs=nics.read_netdevs(tree, processors),
        bridges=bridges,
        switches=gpus.find_switches(tree),
        limits=system.read_limits(tree),
        gpu_direct=system.read_gpu_direct(tree, facts, bool(devices)),
        system=facts,
        nvml=str(error) if error else None,
        problems=tuple(f"{path}: {text}" for path, text in tree.problems.items()),
        recorded=str(recording.get("description", "")) if recording else None,
    )
