"""`read`: a `Machine` from the files below a root."""

from __future__ import annotations

import os

from weft.topology.model import Machine

__all__ = ["read"]


def read(root: str | os.PathLike[str] = "/") -> Machine:
    """What is known about the machine whose files lie below `root`: "/" this one, else a recording (its directory or
    its tree.json).

    Never raises for what it finds: missing, unreadable or senseless files are unknown facts with a reason. Takes some
    milliseconds, more where NVML has to wake GPUs up; starts neither CUDA nor torch.
    """
    return Machine(root=os.fspath(root))
