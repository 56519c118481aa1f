"""Placement: which cores, which memory and which NICs each rank of a machine gets, and how a process is bound."""

from __future__ import annotations

from weft.placement.model import LeftOut, NicChoice, Placement
from weft.placement.plan import place

__all__ = ["LeftOut", "NicChoice", "Placement", "place"]
