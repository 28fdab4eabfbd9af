"""Training scripts as users write them, at module level: a graph does what eager code does.

Each file of `scripts/` is run twice, eagerly and with graphs. Its first line says what must become
of its graph: it stays until the end, or the reason for eager code, which names the value or line.
"""

from __future__ import annotations

import os
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from wholebatch.compile import ExecuteWarning
from wholebatch.compile.execute_mode import ExecutePlan
from wholebatch.runner import MicroStep

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def run(script: Path) -> tuple[torch.Tensor, list[float]]:
    """Run it as a program of its own; return the model's parameters and the losses."""
    # Dynamo remembers modules by name: two programs of one process have two names.
    names = runpy.run_path(str(script), run_name=f"{script.stem}_{os.environ['EXECUTE']}")
    flat = torch.cat([p.detach().flatten() for p in names["model"].parameters()])
    return flat, names["losses"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_does_the_same_with_graphs(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTE", "eager")
    wanted, losses = run(script)
    modes: list[str] = []
    run_step = MicroStep.run

    def counted(step: MicroStep, micro: Any, place: Any) -> Any:
        added = run_step(step, micro, place)
        modes.append(step.executor.mode)
        return added

    monkeypatch.setenv("EXECUTE", "compile")
    # As traced: a compiler takes too long here.
    as_traced = ExecutePlan(eager=False, compiles=False, captures=False, auto=False)
    monkeypatch.setattr(ExecutePlan, "of", lambda *_: as_traced)
    monkeypatch.setattr(MicroStep, "run", counted)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ExecuteWarning)
        found, now = run(script)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert now == pytest.approx(losses, rel=1e-5)
    _, _, reason = script.read_text().splitlines()[0].partition("eager: ")
    texts = [str(one.message) for one in said if one.category is ExecuteWarning]
    if reason:
        assert len(texts) == 1
        assert re.search(reason, texts[0]), texts[0]
    else:
        assert modes[-1] == "operations"
        assert modes.count("eager") <= len(modes) / 3
        assert all("Dynamo" not in text for text in texts)
