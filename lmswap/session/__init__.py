"""What is one enabled model? Its budget, engine, graphs and plans.

`session` is where the stages meet; `opening` says what it stands on, `allowance` what its steps may occupy, `steps`
which plan each follows, `pinned` how that is kept in a file, `graphs` how a graph comes to follow it.
"""

from lmswap.session.graphs import SavedSequence
from lmswap.session.session import UNPLANNED, WHAT_VERIFY_DOES, Session
from lmswap.session.steps import PlannedStep

__all__ = ["UNPLANNED", "WHAT_VERIFY_DOES", "PlannedStep", "SavedSequence", "Session"]
