"""What to expect of a machine before renting it: `weft.plan`, and `weft plan` on the command line. docs/planner.md.

    traffic          where the picks of a token fall
    model            bytes and SMs to time
    machines         presets
    weft_rates       Weft's part of the model, measured its measurements
    planning         the plan; resources its memory and connections
    published        others' figures; groups, fit, evidence: constants, and what they are worth
    compare, plot    beside each other

Importing this package imports neither torch nor numpy.
"""

from weft.planner.machines import PRESETS, Machine
from weft.planner.planning import Plan, PlannedCall, plan

__all__ = ["PRESETS", "Machine", "Plan", "PlannedCall", "plan"]
