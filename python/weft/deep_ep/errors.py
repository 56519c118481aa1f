"""`NotSupported`: what the originals can do and Weft refuses."""

from __future__ import annotations

from weft.errors import Unsupported

__all__ = ["NotSupported", "refused"]


# check: allow unfinished: the class of Python that callers may catch
class NotSupported(Unsupported, NotImplementedError):
    """A symbol, argument or value of DeepEP that Weft does not have; the text says what to use in its place."""


def refused(feature: str, why: str, instead: str) -> NotSupported:
    """`feature` is the name as DeepEP has it."""
    return NotSupported(feature, why, instead, f"deep_ep: {feature} is not supported by Weft: {why}; {instead}")
