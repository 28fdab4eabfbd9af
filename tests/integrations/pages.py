"""What the pages of docs/integrations say: their diffs, applied to the scripts and run."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import processes
from tests.support import distance

ROOT = Path(__file__).parents[2]
MOST_LINES = 5


def changed_script(page: str, script: str, folder: Path, *, number: int = 0) -> Path:
    """The script with the page's diff applied, written into `folder`."""
    text = (ROOT / "docs" / "integrations" / page).read_text(encoding="utf-8")
    diff = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)[number]
    lines = diff.splitlines()
    assert sum(line[0] in "+-" for line in lines) <= MOST_LINES
    source = (ROOT / "examples" / "integrations" / script).read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        hunk_lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in hunk_lines if line[0] in " -")
        after = "".join(f"{line[1:]}\n" for line in hunk_lines if line[0] in " +")
        places = [match.start() for match in re.finditer(f"^{re.escape(before)}", source, re.M)]
        assert len(places) == 1, f"{page}: not in {script} once:\n{before}"
        source = source[: places[0]] + after + source[places[0] + len(before) :]
    changed = folder / f"changed_{script}"
    changed.write_text(source, encoding="utf-8")
    return changed


def plain_script(script: str) -> Path:
    return ROOT / "examples" / "integrations" / script


def weights_here(
    script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> Tensor:
    """What the script trained in this process, where its library is imported already."""
    saved = folder / f"{script.stem}-{len(list(folder.iterdir()))}.pt"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments, "--save", str(saved)])
    monkeypatch.chdir(folder)
    runpy.run_path(str(script), run_name="__main__")
    return _flat(saved)


def weights(script: Path, folder: Path, *arguments: str) -> Tensor:
    """Return the weights that two ranks of the script trained, as one vector."""
    saved = folder / f"{script.stem}-{len(list(folder.iterdir()))}.pt"
    environment = {
        **os.environ,
        **processes.ENVIRONMENT,
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    done = processes.run(
        script,
        *arguments,
        "--save",
        str(saved),
        cwd=folder,
        environment=environment,
        timeout=240,
        ranks=2,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return _flat(saved)


def _flat(saved: Path) -> Tensor:
    state = torch.load(saved)
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


def error(trained: Tensor, reference: Tensor) -> float:
    return distance([trained], [reference])
