"""`python -m blockopt` is the command `blockopt`."""

import sys

from blockopt.cli import main

sys.exit(main())
