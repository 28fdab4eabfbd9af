"""`wholebatch tune` as torchrun starts it on every rank."""

import sys

from wholebatch.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
