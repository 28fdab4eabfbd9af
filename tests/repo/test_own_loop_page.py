"""The code of docs/integrations/own-loop.md that keeps state: resume, a teacher and its centre."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.repo.test_docs import ROOT, python_blocks

BLOCKS = python_blocks(ROOT / "docs/integrations/own-loop.md")
Batch = dict[str, Tensor]


def micro_batches() -> list[Batch]:
    sizes = (4, 2, 4, 1, 3, 4, 4, 3)
    return [{"x": torch.randn(n, 3).double(), "y": torch.randint(0, 2, (n,))} for n in sizes]


class Loader:
    """Micro-batches that end with an error after `last` of them, over all epochs."""

    def __init__(self, batches: list[Batch], last: int) -> None:
        self.batches, self.left = batches, last

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.filterwarnings("ignore:.*was deleted with an open window")
@pytest.mark.parametrize("stopped", [1, 9, 16, 17, 23])
def test_a_resumed_loop_makes_every_update_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    (code,) = (block for block in BLOCKS if "acc.load_state_dict" in block)
    batches = micro_batches()

    def run(last: int) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizer = torch.optim.Adam(model.parameters())
        acc = wb.Accumulator(model, optimizer, steps=2)
        names = {"model": model, "optimizer": optimizer, "acc": acc, "torch": torch, "F": F}
        try:
            exec(code.replace("% 100", "% 3"), {**names, "loader": Loader(batches, last)})
        except KeyboardInterrupt:
            acc.discard()
        return model.weight.detach(), acc.updates

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole, updates = run(1000)
    assert updates == 12
    monkeypatch.chdir(tmp_path / "parts")
    run(stopped)
    resumed, updates = run(1000)
    assert updates == 12
    assert torch.equal(resumed, whole)


def test_teacher_and_centre_move_once_per_update() -> None:
    (code,) = (block for block in BLOCKS if "centre.lerp_" in block)
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 2).double(), micro_batches()
    whole = copy.deepcopy(model)
    names: dict[str, Any] = {"model": model, "loader": batches, "wb": wb, "torch": torch, "F": F}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    names["centre"] = torch.zeros(2).double()
    exec(code, names)

    x = torch.cat([batch["x"] for batch in batches])
    of_teacher = whole(x).detach()  # The teacher begins as the model.
    F.cross_entropy(whole(x), of_teacher.softmax(-1)).backward()
    with torch.no_grad():
        for weight in whole.parameters():
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
    torch.testing.assert_close(model.weight, whole.weight, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(names["centre"], 0.1 * of_teacher.mean(0), rtol=1e-12, atol=1e-14)
    assert int(names["teacher"].n_averaged) == 1
