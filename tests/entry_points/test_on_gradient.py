"""Work on the whole gradient before the step: `on_gradient=`."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import grouped, loss, mean, mlp, pieces, samples
from wholebatch.errors import NonFiniteError, OptionError

Named = list[tuple[str, nn.Parameter]]
SPLITS = [[20], [1, 19], [3, 11, 6], [7, 1, 1, 5, 6]]


def noise(named: Named) -> None:
    generator = torch.Generator().manual_seed(5)
    for _, parameter in named:
        assert parameter.grad is not None
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad.add_(drawn.to(parameter.grad.dtype), alpha=0.1)


def make(fused: bool) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)


def undivided(
    model: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batch: Any,
    function: Callable[[Named], None],
    clip_norm: float | None,
) -> tuple[nn.Module, list[Tensor], float]:
    """The plain loop: backward, the function, clipping, step; its model, gradients and norm."""
    model = copy.deepcopy(model)
    mean(model, batch).backward()
    with torch.no_grad():
        function(list(model.named_parameters()))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients))
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    gradients = [gradient.clone() for gradient in gradients]
    optimizer(model).step()
    return model, gradients, norm


def whole_batch(
    model: nn.Module, optimizer: Any, sizes: list[int], **options: Any
) -> wb.WholeBatch:
    train = wb.WholeBatch(model, optimizer, loss=loss, **grouped({"micro_batch": 8, **options}))
    train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]
    return train


def update(model: nn.Module, start: nn.Module) -> list[Tensor]:
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return [after.detach() - before.detach() for after, before in pairs]


def changed(model: nn.Module, start: nn.Module) -> float:
    return float(nn.utils.get_total_norm(update(model, start)))


def test_it_is_not_called_for_a_gradient_that_is_not_finite() -> None:
    model, batch = mlp(), samples(20)
    batch["x"][7] = math.nan
    called: list[int] = []

    def hides(named: Named) -> None:
        called.append(1)
        for _, parameter in named:
            assert parameter.grad is not None
            parameter.grad.nan_to_num_()

    before = copy.deepcopy(model)
    train = whole_batch(model, make(False)(model), [3, 17], on_gradient=hides)
    with pytest.raises(NonFiniteError):
        train.step(batch)
    skips = whole_batch(model, make(False)(model), [3, 17], on_gradient=hides, nonfinite="skip")
    assert skips.step(batch).skipped is not None
    assert not called
    assert changed(model, before) == 0.0


def test_a_function_that_makes_it_infinite_is_named() -> None:
    model = mlp()
    train = whole_batch(
        model,
        make(False)(model),
        [3, 17],
        on_gradient=lambda named: [p.grad.fill_(math.inf) for _, p in named],  # type: ignore[union-attr, func-returns-value, arg-type]
    )
    before = copy.deepcopy(model)
    with pytest.raises(NonFiniteError, match="or on_gradient= has made them so"):
        train.step(samples(20))
    assert changed(model, before) == 0.0
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_called_is_refused() -> None:
    model = mlp()
    with pytest.raises(OptionError, match="on_gradient=3: must be a function"):
        wb.Accumulator(model, make(False)(model), steps=2, close=wb.Close(on_gradient=3))  # type: ignore[arg-type]


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/integrations/own-loop.md").read_text(encoding="utf-8")
    page = page.partition("\n## Work on the whole gradient\n")[2]
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(block, "own-loop.md", "exec"), names)
    norm, of_one = map(float, capsys.readouterr().out.split())
    assert norm > 0
    assert of_one == pytest.approx(names["norms"]["0.weight"])
    assert names["train"].gradient(names["batch"]).loss < 1.0  # seven steps on one batch
