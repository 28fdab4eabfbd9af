"""Run under torchrun: `end_at_once.py SCRIPT ARGUMENTS…` runs the script and ends the process.

At the end of an interpreter one of gloo's threads may still release a tensor, and the process is
aborted ("terminate called without an active exception"), with plain torch too. The script is done
by then: what it wrote is what a test looks at.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
