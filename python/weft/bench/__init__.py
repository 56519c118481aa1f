"""`weft bench`: times whole public calls, beside the same job over all_to_all_single and the memory-copy bound.

Importing this needs no torch; running does. How things are counted: docs/benchmarking.md.
"""

from __future__ import annotations

from weft.bench.options import Options
from weft.bench.report import Report, run

__all__ = ["Options", "Report", "run"]
