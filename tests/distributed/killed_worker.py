"""Runs `wholebatch train` on ranks, in FOLDER; rank 1 kills itself in its loss number CALL."""

from __future__ import annotations

import os
import sys

from wholebatch.cli import main

folder, call, *arguments = sys.argv[1:]
os.chdir(folder)
if os.environ["RANK"] == "1":
    os.environ |= {"STOP_AT": call, "STOP_BY": "SIGKILL"}
sys.exit(main(["train", *arguments]))
