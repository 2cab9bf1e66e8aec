"""What is one enabled model? Its budget, engine, graphs and plans.

`session` is where the stages meet, and `opening` says what it stands on; `allowance`: what may a step occupy, beside
what `trained` parameters bring along? `order`: what ran? `steps`: what is planned? `planner`: how, within the
allowance? `lessons`: what has to change after a step? `pinned` keeps plans in a file, and `graphs` is how a graph comes
to follow one. `traces` measures what they all keep.
"""

from lmswap.session.graphs import SavedSequence
from lmswap.session.opening import WHAT_VERIFY_DOES
from lmswap.session.planned import PlannedStep
from lmswap.session.session import UNPLANNED, Session

__all__ = ["UNPLANNED", "WHAT_VERIFY_DOES", "PlannedStep", "SavedSequence", "Session"]
