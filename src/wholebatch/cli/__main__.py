"""`python -m wholebatch.cli`: the command line without an installed script."""

import sys

from wholebatch.cli import main

sys.exit(main())
