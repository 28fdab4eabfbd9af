"""Ask `verify` and `lint` about public training scripts and their ports to wholebatch.

    python benchmarks/public_scripts.py FOLDER           # writes docs/benchmarks/public-scripts.md

None of their code is in this repository. FOLDER has `scripts.json`, a list of entries such as

    {"name": "nanoGPT train.py", "repository": "karpathy/nanoGPT", "commit": "3adf61e1",
     "original": "nanoGPT/train.py", "port": "nanoGPT/train_port.py",
     "arguments": ["--device=cpu"], "why_not_run": ""}

with paths inside FOLDER. A file that does not train by itself has a script of ours that runs it
(`original_run`, `port_run`). A script that cannot run here has `why_not_run`, and is linted only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "public-scripts.md"
MOST_SECONDS = 600


def asked(command: list[str], folder: Path) -> str:
    """Return what a command of wholebatch prints on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "wholebatch.cli", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        timeout=MOST_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def linted(path: Path) -> str:
    """Return the codes of what lint finds in a file."""
    found = json.loads(asked(["lint", "--format", "json", path.name], path.parent) or "[]")
    codes = [one["code"] for one in found]
    return ", ".join(dict.fromkeys(codes)) or "nothing"


def verified(path: Path, arguments: list[str]) -> str:
    """Return what verify says of a script: the answer, and the mistakes by name."""
    from wholebatch.verification import MISTAKES

    given = ["--", *arguments] if arguments else []
    text = asked(["verify", "script", "--json", path.name, *given], path.parent)
    verdict = json.loads(text)
    if not verdict["judged"]:
        return "not judged"
    if verdict["same"]:
        by_construction = "by construction" in verdict["line"]
        return f"same update{' by construction' if by_construction else ''}"
    return f"wrong: {', '.join(MISTAKES[key].name for key in verdict['mistakes'])}"


def row(entry: dict[str, Any], folder: Path) -> str:
    """Return the row of one script and its port."""
    cells = [f"{entry['name']} ({entry['repository']}@{entry['commit']})"]
    for which in ("original", "port"):
        path = entry.get(which)
        cells.append(linted(folder / path) if path else "no port")
        if not path or entry.get("why_not_run"):
            cells.append(f"not run: {entry['why_not_run']}" if path else "")
        else:
            run = entry.get(f"{which}_run", path)
            cells.append(verified(folder / run, entry.get("arguments", [])))
        print(entry["name"], which, *cells[-2:], sep=" | ", flush=True)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    entries = json.loads((folder / "scripts.json").read_text(encoding="utf-8"))
    rows = [row(entry, folder) for entry in entries]
    PAGE.write_text(
        "# What `lint` and `verify` say of public scripts\n\n"
        f"Written by `python benchmarks/public_scripts.py FOLDER`, {date.today()}. The scripts run "
        "with tiny models and random data, on a CPU;\nthe lines of their loops are as published. A "
        "port replaces the accumulation by `wb.Accumulator`. None of their code is in this "
        "repository.\n\n"
        "| script | lint | verify | lint of the port | verify of the port |\n"
        "|---|---|---|---|---|\n" + "\n".join(rows) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
