"""Public training scripts and their ports to wholebatch: how far off, what the commands say.

    python benchmarks/public_scripts.py FOLDER            # writes docs/benchmarks/public-scripts.md
    python benchmarks/public_scripts.py FOLDER --only mae # measure this script again

None of their code is in this repository. FOLDER has `scripts.json`, a list of entries such as

    {"name": "nanoGPT train.py", "repository": "karpathy/nanoGPT", "commit": "3adf61e1",
     "folder": "nanoGPT", "original": "train.py", "port": "train_port.py",
     "arguments": ["--batch_size=4", "--gradient_accumulation_steps=4"],
     "undivided": "train.py", "undivided_arguments": ["--batch_size=16"],
     "with": "`acc.run`", "minutes": 2}

A file that does not train by itself has a script of ours, `run`, that is given its name.
`undivided` makes the same updates from whole batches. Each runs in float64, from the same seed.
What counts is the gradient at every `optimizer.step()`; the weights are put back after it, so that
each update is compared from the same start. A graph is run as traced, without Inductor.
Rows are kept in `FOLDER/rows.json`; an entry with `cells` has been measured before.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
PAGE = ROOT / "docs" / "benchmarks" / "public-scripts.md"
MOST_SECONDS = 900
HEAD = (
    "| script | its update is off by | `verify`, `lint` | port | minutes | the port's is off by "
    "| `verify`, `lint` | graph |\n|---|---:|---|---|---:|---:|---|---|\n"
)
BEGIN = """# Public scripts, before and after

Written by `python benchmarks/public_scripts.py FOLDER`, {today}. The scripts run with tiny models
and random data, on a CPU, in float64; the lines of their loops are as published. None of their code
is in this repository.

- **Off by**: the largest relative distance (L2) of a gradient at `optimizer.step()` from that of
  the undivided batch. The port runs in graphs.
- **Minutes**: an AI model wrote the port with the pages open; runs not counted.
- **Graph**: kept, if micro-steps became a traced graph; or the printed reason.

"""


# --------------------------------------------------------------------- run a script in float64


class Recorder:
    """Keeps the gradients at each `optimizer.step()`, and puts the weights back after it."""

    def __init__(self) -> None:
        from torch.optim import optimizer

        self.gradients: list[tuple[int, Any]] = []
        self._optimizers: list[int] = []
        self._weights: list[Any] = []
        optimizer.register_optimizer_step_pre_hook(self._before)
        optimizer.register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: Any, *_: Any) -> None:
        import torch

        optimizer = getattr(optimizer, "optimizer", optimizer)
        parameters = _parameters(optimizer)
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        self._weights = [parameter.detach().clone() for parameter in parameters]
        pieces = [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten()
            for p in parameters
        ]
        self.gradients.append((self._optimizers.index(id(optimizer)), torch.cat(pieces)))

    def _after(self, optimizer: Any, *_: Any) -> None:
        import torch

        with torch.no_grad():
            for parameter, weight in zip(_parameters(optimizer), self._weights, strict=True):
                parameter.copy_(weight)


def _parameters(optimizer: Any) -> list[Any]:
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Executors:
    """Lets each micro-step be a graph, as traced."""

    def __init__(self) -> None:
        from wholebatch.compile.micro_step import Executor

        self._all: list[Any] = []
        begin = Executor.__init__

        def init(executor: Any, _: str, **options: Any) -> None:
            begin(executor, "compile", **options)
            executor._plan.compiles = False
            self._all.append(executor)

        Executor.__init__ = init  # type: ignore[assignment, method-assign]

    def said(self) -> str:
        """Return if a graph was made and kept, and the reasons where none was."""
        reasons = dict.fromkeys(reason for each in self._all for reason in each.notes.reasons)
        is_kept = any(slot.ready is not None for each in self._all for slot in each._every_slot())
        if reasons:
            return f"{'kept in part' if is_kept else 'eager'}: {'; '.join(reasons)}"
        return "kept" if is_kept else "eager: no micro-step that can be a graph"


def recorded(command: list[str], folder: Path, *, graphs: bool = False) -> dict[str, Any]:
    """Run a script in a fork of this process, which has imported torch; return the record."""
    import torch

    with tempfile.TemporaryDirectory() as place:
        file, log = Path(place) / "recorded.pt", Path(place) / "log"
        child = os.fork()
        if child == 0:
            code = 1
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                try:
                    _record(command, folder, file, graphs=graphs)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        if os.waitpid(child, 0)[1]:
            raise RuntimeError(f"{command}: {log.read_text(errors='replace')[-3000:]}")
        record: dict[str, Any] = torch.load(file)
        return record


def _record(command: list[str], folder: Path, file: Path, *, graphs: bool) -> None:
    import numpy as np
    import torch

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = list(command)
    torch.set_default_dtype(torch.float64)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    recorder = Recorder()
    executors = Executors() if graphs else None
    runpy.run_path(command[0], run_name="__main__")
    record: dict[str, Any] = {"gradients": recorder.gradients}
    if executors is not None:
        record["graph"] = executors.said()
    torch.save(record, file)


def off_by(gradients: list[tuple[int, Any]], right: list[tuple[int, Any]]) -> str:
    """Return the largest distance of an update, and how many updates are missing."""
    pairs = zip(gradients, right, strict=False)
    largest = max(float((one - whole).norm() / whole.norm()) for (_, one), (_, whole) in pairs)
    shown = f"{largest:.0%}" if largest > 0.005 else f"{largest:.0e}"
    missing = len(right) - len(gradients)
    return shown if not missing else f"{shown}; {len(gradients)} of {len(right)} updates"


# --------------------------------------------------------------------- what the commands say


def asked(command: list[str], folder: Path) -> str:
    """Return what a command of wholebatch prints on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "wholebatch.cli", *command],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *_more_paths()]),
            "HF_HUB_OFFLINE": "1",
        },
        timeout=MOST_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def _more_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def linted(path: Path) -> str:
    """Return the codes of what lint finds in a file."""
    findings = json.loads(asked(["lint", "--format", "json", path.name], path.parent) or "[]")
    codes = [finding["code"] for finding in findings]
    return ", ".join(dict.fromkeys(codes)) or "nothing"


def verified(command: list[str], folder: Path) -> str:
    """Return what verify says of a script: the answer, and the mistakes by name."""
    from wholebatch.verification import MISTAKES

    script, *arguments = command
    given = ["--", *arguments] if arguments else []
    verdict = json.loads(asked(["verify", "script", "--json", script, *given], folder))
    if not verdict["judged"]:
        return "not judged"
    if verdict["same"]:
        return "by construction" if "by construction" in verdict["line"] else "same update"
    return f"wrong: {', '.join(MISTAKES[key].name for key in verdict['mistakes'])}"


# --------------------------------------------------------------------- the table


def row(entry: dict[str, Any], top: Path) -> str:
    """Return the row of a script and its port."""
    title = f"{entry['name']} ({entry['repository']}@{entry['commit']})"
    if "cells" in entry:
        return f"| {' | '.join([title, *entry['cells']])} |"
    for name in entry.get("preload", []):
        importlib.import_module(name)
    folder = top / entry["folder"]

    def command(file: str, arguments: list[str]) -> list[str]:
        return [*([entry["run"]] if "run" in entry else []), file, *arguments]

    whole = command(entry.get("undivided", entry["original"]), entry["undivided_arguments"])
    original, port = (command(entry[which], entry["arguments"]) for which in ("original", "port"))
    right = recorded(whole, folder)["gradients"]
    before = off_by(recorded(original, folder)["gradients"], right)
    ours = recorded(port, folder, graphs=True)
    after = off_by(ours["gradients"], right)
    said = [
        f"{verified(lines, folder)}; {linted(folder / entry[which])}"
        for which, lines in (("original", original), ("port", port))
    ]
    minutes = str(entry["minutes"])
    cells = [title, before, said[0], entry["with"], minutes, after, said[1], ours["graph"]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="measure these folders again (a, b)")
    options = parser.parse_args()
    top = options.folder.resolve()
    warnings.filterwarnings("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    importlib.import_module("wholebatch.compile.micro_step")
    entries = json.loads((top / "scripts.json").read_text(encoding="utf-8"))
    kept = top / "rows.json"
    for entry in entries:
        rows = json.loads(kept.read_text()) if kept.exists() else {}
        again = entry.get("folder") in options.only.split(",")
        if again or (entry["name"] not in rows and not options.only):
            shown = row(entry, top)
            print(shown, flush=True)
            rows = json.loads(kept.read_text()) if kept.exists() else {}
            kept.write_text(json.dumps({**rows, entry["name"]: shown}, indent=1))
    rows = json.loads(kept.read_text())
    table = (
        HEAD + "\n".join(rows[entry["name"]] for entry in entries if entry["name"] in rows) + "\n"
    )
    PAGE.write_text(BEGIN.format(today=date.today()) + table, encoding="utf-8")


if __name__ == "__main__":
    main()
