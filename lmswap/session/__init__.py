"""One enabled model: its budget, engine, graphs and plans.

`session` joins the stages, and `opening` opens tier and engine. `allowance` splits the budget, with the memory of
`trained` parameters outside of the step. `order` observes which graphs ran, `steps` holds the plans of steps, `planner`
makes them within the allowance, and `lessons` replans after a step. `graphs` compiles a graph for its plan, `pinned`
writes plans to a file, and `traces` measures and evicts traces.
"""

from lmswap.session.graphs import SavedSequence
from lmswap.session.opening import WHAT_VERIFY_DOES
from lmswap.session.planned import PlannedStep
from lmswap.session.session import UNPLANNED, Session

__all__ = ["UNPLANNED", "WHAT_VERIFY_DOES", "PlannedStep", "SavedSequence", "Session"]
