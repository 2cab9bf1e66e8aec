"""``python -m lmswap``: the command ``lmswap`` where it is not on the PATH."""

import sys

from lmswap.cli.entry import main

sys.exit(main())
