"""Plans and timelines, predicted and measured, as tables, JSON, pictures and traces for people. It decides nothing."""

from lmswap.report.decisions import BufferDecision as BufferDecision
from lmswap.report.explain import Explanation as Explanation
from lmswap.report.explain import make_explanation as make_explanation
from lmswap.report.report import Report as Report
from lmswap.report.report import make_report as make_report
