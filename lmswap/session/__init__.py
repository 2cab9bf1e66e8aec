"""One enabled model: its budget, engine, graphs and plans.

`session` joins the stages, and `engine_setup` opens tier and engine. `budget` splits the budget, with the memory of
trained parameters (`optimizer_memory`) outside of the step. `step_sequence` observes which graphs ran, `plan_store`
holds the plans of steps, `planner` makes them within the allowance, and `replan` replaces them after a step.
`compiled_graph` compiles a graph for its plan, `plan_file` writes plans to a file, and `traces` measures and evicts
traces.
"""

from lmswap.session.compiled_graph import SavedSequence
from lmswap.session.engine_setup import WHAT_VERIFY_DOES
from lmswap.session.planned_step import PlannedStep
from lmswap.session.session import UNPLANNED, Session

__all__ = ["UNPLANNED", "WHAT_VERIFY_DOES", "PlannedStep", "SavedSequence", "Session"]
