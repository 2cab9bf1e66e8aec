import subprocess
import sys

import pytest

from lmswap.errors import OptionError
from lmswap.log_output import set_up_logging

SCRIPT = """
import logging
{first}
from lmswap.log_output import set_up_logging
set_up_logging()
logging.getLogger("lmswap.session").info("planned")
logging.getLogger("other").info("not ours")
"""


def said(first, **environment):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)], env=environment, capture_output=True, text=True, check=True
    ).stderr


@pytest.mark.parametrize(("level", "expected"), [("info", "INFO lmswap.session: planned\n"), ("WARNING", ""), ("", "")])
def test_the_variable_sets_the_level_of_our_records_alone(level, expected):
    assert said("", LMSWAP_LOG_LEVEL=level) == expected


def test_a_script_that_handles_records_gets_each_once():
    assert said("logging.basicConfig(format='%(message)s')", LMSWAP_LOG_LEVEL="INFO") == "planned\n"


def test_an_unknown_level_is_refused():
    with pytest.raises(OptionError, match="LMSWAP_LOG_LEVEL is 'LOUD'; it can be DEBUG, INFO"):
        set_up_logging({"LMSWAP_LOG_LEVEL": "loud"})
