"""GPUs and what joins them: NVLink, peer access, fabric, multicast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.machine.doctor.model import Answer, Check, Facts, fail, ok, skip, warn
from weft.machine.topology import Gpu

__all__ = ["CHECKS"]

_NVIDIA = 0x10DE
_HEALTH_FIELDS = ("degraded bandwidth", "route recovery in progress", "route unhealthy", "access timeout recovery")


def _gpus(facts: Facts) -> Iterable[Answer]:
    machine = facts.machine
    if not facts.gpus:
        if "nvidia" in (machine.system.modules or ()):
            fix = "nvidia-smi  # and see its message; in a container: docker run --gpus all ..."
            return [
                warn(f"the NVIDIA driver is loaded and no GPU is seen ({machine.nvml or 'NVML shows none'})", fix=fix)
            ]
        return [ok("no GPU: Weft uses its cpu engine")]
    if machine.nvml is not None:
        fix = "nvidia-smi  # and see its message; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return [fail(f"{len(facts.gpus)} GPUs on the PCI bus, but NVML does not answer: {machine.nvml}", fix=fix)]
    names = Counter(gpu.name or "unknown GPU" for gpu in facts.gpus)
    text = ", ".join(f"{count} x {name}" for name, count in names.items())
    if len(names) > 1:
        most = names.most_common(1)[0][0]
        alike = ",".join(str(gpu.idx) for gpu in facts.gpus if (gpu.name or "unknown GPU") == most)
        cost = "the slowest sets the pace of every call"
        return [warn(f"{text}: unlike GPUs", cost=cost, fix=f"export CUDA_VISIBLE_DEVICES={alike}  # alike ones only")]
    return [ok(text)]


def _mig(facts: Facts) -> Iterable[Answer]:
    mig = [gpu.idx for gpu in facts.gpus if gpu.is_mig]
    if not facts.gpus:
        return [skip("no GPU")]
    if mig:
        fix = f"sudo nvidia-smi -i {','.join(map(str, mig))} -mig 0"
        return [fail(f"MIG is on, on GPU {_list(mig)}", cost="no NVLink, no peer access", fix=fix)]
    return [ok("MIG is off")]


def _nvlink(facts: Facts) -> Iterable[Answer]:
    if len(facts.gpus) < 2:
        return [skip(_few(facts))]
    if all(gpu.nvlinks is None for gpu in facts.gpus):
        return [skip("the state of NVLink is not known (no NVML)")]
    answers = []
    best = max(gpu.num_active_links or 0 for gpu in facts.gpus)
    if not best:
        cost = "GPUs talk over PCIe: 64 GB/s at most at Gen5 x16; 18 NVLink4 links were measured at 396 (4 x H200)"
        return [warn("no active NVLink", cost=cost, fix="nvidia-smi nvlink --status")]
    for gpu in facts.gpus:
        active = gpu.num_active_links or 0
        if active < best:  # as many inactive on all of them is how some models are made
            down = [link.idx for link in gpu.nvlinks or () if link.active is False]
            text = f"GPU {gpu.idx}: {active} of {best} NVLinks active" + (f", down: {_list(down)}" if down else "")
            cost = f"{100 * (best - active) / best:.0f} % of its NVLink bandwidth, and every call waits for it"
            answers.append(fail(text, cost=cost, fix=f"sudo nvidia-smi -i {gpu.idx} -r  # then: nvidia-smi nvlink -s"))
    speeds = sum(link.speed_mbps or 0 for link in facts.gpus[0].nvlinks or () if link.active)
    rate = f", {speeds / 1000:.0f} GB/s nominal a direction" if speeds else ""
    return answers or [ok(f"{best} NVLinks active on each of {len(facts.gpus)} GPUs{rate}")]


def _pairs(facts: Facts) -> Iterable[Answer]:
    if len(facts.gpus) < 2:
        return [skip(_few(facts))]
    counts = Counter(pair.num_nvlinks for pair in facts.machine.pairs)
    if not counts or None in counts:
        return [skip("the links between pairs are not known")]
    if len(counts) == 1:
        (links,) = counts
        return [ok(f"every pair NV{links}" if links else "no pair is joined by NVLink")]
    text = ", ".join(f"NV{links}: {count} pairs" for links, count in sorted(counts.items(), reverse=True) if links)
    apart = [f"{pair.first}-{pair.second}" for pair in facts.machine.pairs if not pair.num_nvlinks]
    if apart:
        cost = "the pairs without NVLink go over PCIe, and every call waits for the slowest pair"
        return [
            warn(f"{text}; not joined: {', '.join(apart)}", cost=cost, fix="CUDA_VISIBLE_DEVICES=... of one island")
        ]
    return [ok(f"pairs differ: {text}")]


def _p2p(facts: Facts) -> Iterable[Answer]:
    if len(facts.gpus) < 2:
        return [skip(_few(facts))]
    bad, unknown = [], 0
    for pair in facts.machine.pairs:
        states = {"read": pair.p2p_read, "write": pair.p2p_write}
        wrong = [f"{what} {state}" for what, state in states.items() if state not in (None, "ok")]
        unknown += None in states.values()
        if wrong:
            bad.append(f"{pair.first}-{pair.second} ({', '.join(wrong)})")
    if bad:
        cost = "no engine between these GPUs by load and store; copies go through host memory"
        fix = "nvidia-smi topo -p2p rw  # then: IOMMU off or passthrough, ACS off, MIG off, one fabric partition"
        return [fail(f"no peer access: {', '.join(bad)}", cost=cost, fix=fix)]
    if unknown or not facts.machine.pairs:
        return [skip("peer access is not known (no NVML)")]
    atomics = {pair.p2p_atomics for pair in facts.machine.pairs}
    return [ok("all pairs read and write each other" + (", atomics too" if atomics == {"ok"} else ""))]


def _fabric(facts: Facts) -> Iterable[Answer]:
    if not facts.gpus:
        return [skip("no GPU")]
    if all(gpu.fabric.state in (None, "not supported") for gpu in facts.gpus):
        states = {gpu.fabric.state or "unknown" for gpu in facts.gpus}
        return [skip(f"NVML says: {', '.join(sorted(states))}: NVLink without fabric registration")]
    answers = []
    restart = "sudo systemctl restart nvidia-fabricmanager  # and nvidia-imex; then: nvidia-smi -q | grep -A4 Fabric"
    for gpu in facts.gpus:
        fabric = gpu.fabric
        if fabric.state not in ("completed", "not supported", None):
            answers.append(fail(f"GPU {gpu.idx}: fabric state {fabric.state}", cost="CUDA can't start", fix=restart))
        elif fabric.state == "completed" and fabric.status not in (None, "success"):
            answers.append(fail(f"GPU {gpu.idx}: fabric completed with status {fabric.status}", fix=restart))
        answers += _health(gpu)
    completed = [gpu for gpu in facts.gpus if gpu.fabric.state == "completed"]
    domains = {(gpu.fabric.cluster_uuid, gpu.fabric.clique_id) for gpu in completed}
    if len(domains) > 1:
        return [*answers, fail(f"the GPUs of this host are in {len(domains)} NVLink domains", fix=restart)]
    if answers or not completed:
        return answers
    return [_domain(facts, completed)]


def _health(gpu: Gpu) -> list[Answer]:
    """Two bits a field: 1 means true."""
    mask = gpu.fabric.health_mask
    if not mask:
        return []
    wrong = [name for idx, name in enumerate(_HEALTH_FIELDS) if mask >> (2 * idx) & 3 == 1]
    if not wrong:
        return []
    return [warn(f"GPU {gpu.idx}: fabric health: {', '.join(wrong)}", fix="nvidia-smi -q | grep -A8 Fabric")]


def _domain(facts: Facts, completed: list[Gpu]) -> Answer:
    """One domain: fine, unless it should span hosts and has no name."""
    fabric = completed[0].fabric
    nameless = not fabric.cluster_uuid or not fabric.cluster_uuid.strip("0-")
    if any(gpu.is_c2c for gpu in completed) and (nameless or not fabric.clique_id):
        cost = "NVLink stays inside this tray"
        fix = "sudo systemctl restart nvidia-imex nvidia-fabricmanager  # then: nvidia-smi -q | grep -A4 Fabric"
        return warn("the fabric has no cluster UUID or clique 0", cost=cost, fix=fix)
    if nameless:
        return ok(f"{len(completed)} GPUs registered with the fabric of this host")
    return ok(f"{len(completed)} GPUs of this host in clique {fabric.cluster_uuid}/{fabric.clique_id}")


def _imex(facts: Facts) -> Iterable[Answer]:
    if not any(gpu.is_c2c for gpu in facts.gpus):
        return [skip("no NVLink domain over several hosts")]
    there = facts.machine.system.imex_channel
    if there is None:
        return [skip("not known whether there is an IMEX channel")]
    if not there:
        fix = "docker run --device /dev/nvidia-caps-imex-channels/channel0 ...  # host: systemctl status nvidia-imex"
        return [warn("no IMEX channel", cost="memory can't be shared with other trays over NVLink", fix=fix)]
    return [ok("an IMEX channel is there")]


def _multicast(facts: Facts) -> Iterable[Answer]:
    if len(facts.gpus) < 2:
        return [skip(_few(facts))]
    if not any(gpu.num_active_links for gpu in facts.gpus):
        return [skip("no NVLink")]
    if facts.environment.get("NCCL_NVLS_ENABLE") == "0":
        return [ok("switched off by NCCL_NVLS_ENABLE=0; Weft does not use it")]
    if all(gpu.fabric.state == "completed" for gpu in facts.gpus):
        return [ok("up to the fabric manager, which answers; Weft does not use it")]
    return [ok("off (no fabric registration): export NCCL_NVLS_ENABLE=0 if NCCL does not start; Weft does not use it")]


def _few(facts: Facts) -> str:
    return "no GPU" if not facts.gpus else "one GPU"


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


CHECKS = (
    Check("gpu", "gpus", "One rank a GPU; unlike or unseen ones make every call wait.", _gpus),
    Check("gpu", "mig", "A slice of a GPU can't reach its peers.", _mig),
    Check("gpu", "nvlink", "A link that is down takes its share of the bandwidth with it.", _nvlink),
    Check("gpu", "pairs", "An all-to-all is as fast as its slowest pair.", _pairs),
    Check("gpu", "p2p", "Engines between GPUs load and store peer memory.", _p2p),
    Check(
        "gpu", "fabric", "NVSwitch machines register their GPUs with a fabric; until then CUDA does not start.", _fabric
    ),
    Check("gpu", "imex", "GPUs of several trays share memory through IMEX channels.", _imex),
    Check("gpu", "multicast", "NCCL fails at its start where it expects NVLink multicast and gets none.", _multicast),
)
