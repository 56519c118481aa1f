"""`value_or`, `weak_lru`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["value_or", "weak_lru"]

T = TypeVar("T")


def value_or(value: T | None, default: T) -> T:
    """`default` where `value` is None."""
    return default if value is None else value


def weak_lru(maxsize: int | None = 128, typed: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`functools.lru_cache` of a method, which does not keep its object."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.lru_cache(maxsize, typed)
        def kept(owner: Any, *args: Any, **named: Any) -> Any:
            return function(owner(), *args, **named)

        @functools.wraps(function)
        def run(self: Any, *args: Any, **named: Any) -> Any:
            return kept(weakref.ref(self), *args, **named)

        return run

    return wrap
