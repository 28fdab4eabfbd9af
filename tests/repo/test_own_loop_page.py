"""The code of docs/integrations/own-loop.md that keeps state, and the loops of a GAN."""

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


def test_a_judge_that_is_updated_more_often() -> None:
    """The loops of docs/which-mean.md, beside two updates of the judge and one of the maker."""
    blocks = python_blocks(ROOT / "docs/which-mean.md")
    (code,) = (block for block in blocks if "n_critic" in block)
    torch.manual_seed(0)
    judge, maker = nn.Linear(3, 1).double(), nn.Linear(2, 3).double()
    models = {"judge": judge, "maker": maker}
    loader = [batch["x"] for batch in micro_batches()]
    noise = {id(real): torch.randn(len(real), 2).double() for real in loader}
    names: dict[str, Any] = {**models, "loader": loader, "steps": 2, "n_critic": 2}
    names["noise_like"] = lambda real: noise[id(real)]
    whole = copy.deepcopy(models)
    for name, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names[f"{name}_windows"] = wb.Accumulator(model, optimizer, steps=2)
    exec(code, names)
    assert (names["judge_windows"].updates, names["maker_windows"].updates) == (4, 2)

    def update(name: str, loss: Tensor) -> None:
        weights = list(whole[name].parameters())
        for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.1 * slope

    critic, generator = whole["judge"], whole["maker"]
    for first in (0, 4):
        for place in (first, first + 2):
            real = torch.cat(loader[place : place + 2])
            fake = generator(torch.cat([noise[id(one)] for one in loader[place : place + 2]]))
            update("judge", (critic(fake.detach()) - critic(real)).mean())
        fake = generator(torch.cat([noise[id(one)] for one in loader[first : first + 2]]))
        update("maker", -critic(fake).mean())
    for name, model in models.items():
        for ours, theirs in zip(model.parameters(), whole[name].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_plateau_scheduler_that_the_loop_steps_after_the_epoch() -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    acc = wb.Accumulator(model, optimizer, steps=2)
    for _ in range(3):
        for batch in acc.over(micro_batches()):
            acc.backward(
                F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])
            )
        scheduler.step(1.0)  # a validation loss that does not fall
    assert (acc.updates, optimizer.param_groups[0]["lr"]) == (12, 0.025)
