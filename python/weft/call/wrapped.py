"""A look at each DistributedDataParallel before it overwrites what it wraps.

Its constructor copies the parameters of its first rank over those of the others. Experts differ from rank to rank, so
that those of all but the first rank would be lost without a word. A module learns of its children before: we warn then.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_known: weakref.WeakSet[Any] = weakref.WeakSet()
_MOST_NAMES = 4


def watch(ep: Any) -> None:
    """From now on warn where a module that holds `ep`, an ExpertParallel, is wrapped with its experts."""
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_look))
    if ep.num_ranks > 1:
        _known.add(ep)


_hooks: list[Any] = []


def _look(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if not _known or name != "module" or child is None or not isinstance(module, DistributedDataParallel):
        return
    ignored = set(getattr(child, "_ddp_params_and_buffers_to_ignore", ()))
    names = list(dict.fromkeys(found for found in _experts(child) if found not in ignored))
    if not names:
        return
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")
    warnings.warn(
        f"DistributedDataParallel copies the experts of its first rank over those of all others and averages their "
        f"gradients: {shown}. Before it is made call "
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names of these parameters), or "
        "wrap the gate and the dense part alone (docs/training.md). Where all ranks of its group hold the same experts "
        "this is right",
        UserWarning,
        stacklevel=4,
    )


def _experts(module: nn.Module) -> Iterator[str]:
    """Names of parameters below modules that hold an ExpertParallel which look like its local experts: named so, or a
    stack of as many matrices or rows as there are local experts."""
    for prefix, holder in module.named_modules():
        for ep in [each for each in vars(holder).values() if _is_known(each)]:
            for name, parameter in holder.named_parameters(prefix):
                words = name.lower()
                is_stack = parameter.dim() >= 2 and parameter.shape[0] == ep.num_local_experts
                if "shared" not in words and (is_stack or "expert" in words):
                    yield name


def _is_known(value: Any) -> bool:
    return any(value is ep for ep in _known)
