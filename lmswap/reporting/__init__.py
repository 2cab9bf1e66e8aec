"""Plans and timelines, predicted and measured, as tables, JSON, pictures and traces. It makes no decisions."""

from lmswap.reporting.decisions import BufferDecision as BufferDecision
from lmswap.reporting.explain import Explanation as Explanation
from lmswap.reporting.explain import make_explanation as make_explanation
from lmswap.reporting.report import Report as Report
from lmswap.reporting.report import make_report as make_report
