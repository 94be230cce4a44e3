"""Owns `python -m mzd`."""

import sys

from mzd.cli.main import main

sys.exit(main())
