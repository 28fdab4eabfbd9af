"""`python -m wholebatch.cli`, for where the script is not installed."""

import sys

from wholebatch.cli import main

sys.exit(main())
