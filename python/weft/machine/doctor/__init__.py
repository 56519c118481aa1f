"""`weft doctor`: looks for what keeps a machine from its full rate, and says what mends it.

A check is a small function of facts (`Facts`) that answers ok, warn, fail or n/a; the modules of this package hold
one group each. Nothing here imports torch; what may crash or hang runs in a child process (weft.machine.child).
"""

from __future__ import annotations

from weft.machine.doctor.model import Answer, Check, Facts, Finding, Status
from weft.machine.doctor.run import CHECKS, diagnose, facts_of

__all__ = ["CHECKS", "Answer", "Check", "Facts", "Finding", "Status", "diagnose", "facts_of"]
