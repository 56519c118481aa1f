"""Placement: which cores, which memory and which NICs each rank of a machine gets, and how a process is bound."""

from __future__ import annotations

from weft.machine.placement.model import LeftOut, NicChoice, Placement
from weft.machine.placement.plan import place

__all__ = ["LeftOut", "NicChoice", "Placement", "place"]
