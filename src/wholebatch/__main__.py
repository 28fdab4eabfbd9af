"""Run the command line: `python -m wholebatch`."""

import sys

from wholebatch.cli import main

sys.exit(main())
