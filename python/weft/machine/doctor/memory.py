"""Limits on memory: locked, shared, huge."""

from __future__ import annotations

from collections.abc import Iterable

from weft.machine.doctor.model import Answer, Check, Facts, fail, ok, skip, warn

__all__ = ["CHECKS"]

_MIB = 1 << 20
_MIN_LOCKED = 1024 * _MIB
_MIN_SHM = 1024 * _MIB


def _locked(facts: Facts) -> Iterable[Answer]:
    limits = facts.machine.limits
    if not facts.rdma:
        return [skip("no RDMA device registers memory here")]
    if limits.memlock_unlimited:
        return [ok("unlimited")]
    if limits.memlock_bytes is None:
        return [skip("the limit is not known")]
    text = f"{limits.memlock_bytes >> 10:,} KiB of locked memory at most"
    fix = "docker run --ulimit memlock=-1 ...  # without a container: memlock unlimited in /etc/security/limits.conf"
    if limits.memlock_bytes < _MIN_LOCKED:
        return [fail(text, cost="registering memory with a NIC fails: no scale-out", fix=fix)]
    return [warn(text, cost="registering more than that with a NIC fails", fix=fix)]


def _shm(facts: Facts) -> Iterable[Answer]:
    size = facts.machine.limits.shm_bytes
    if size is None:
        return [skip("the size of /dev/shm is not known")]
    if size < _MIN_SHM:
        cost = "NCCL and torch's data loaders fail with bus errors when it is full"
        return [
            warn(
                f"/dev/shm holds {size / _MIB:.0f} MiB", cost=cost, fix="docker run --shm-size=16g ... (or --ipc=host)"
            )
        ]
    return [ok(f"/dev/shm holds {size / 2**30:.1f} GiB; Weft does not use it")]


def _huge_pages(facts: Facts) -> Iterable[Answer]:
    limits = facts.machine.limits
    reserved = [f"{pages.total} of {_size(pages.size_kib)}" for pages in limits.huge_pages if pages.total]
    mode = limits.transparent_huge_pages
    if mode is None and not limits.huge_pages:
        return [skip("not known")]
    text = f"reserved: {', '.join(reserved) or 'none'}; transparent: {mode or 'unknown'}"
    return [ok(f"{text}; Weft needs none")]


def _size(kib: int) -> str:
    """Kernels for Arm have pages of 64 KiB, too."""
    return f"{kib >> 10} MiB" if kib >= 1024 else f"{kib} KiB"


CHECKS = (
    Check("memory", "locked-memory", "RDMA registers memory, which locks it.", _locked),
    Check("memory", "dev-shm", "Not Weft's, but NCCL and data loaders share memory there; docker gives 64 MiB.", _shm),
    Check("memory", "huge-pages", "They make large mappings cheaper; none are required.", _huge_pages),
)
