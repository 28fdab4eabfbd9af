"""A recipe is read, checked before anything is built, and its errors name file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.helpers import EXACT, NOISY, Ran
from wholebatch.cli.recipe_files import EMBEDDED, find_recipe
from wholebatch.cli.recipes.recipe import load_recipe
from wholebatch.errors import MissingExtraError, RecipeError

Write = Callable[..., Path]


def test_reads_the_parts(recipe: Write) -> None:
    path = recipe('"""What it is.\n\nMore."""' + EXACT)
    found = load_recipe(str(path))
    assert (found.name, found.path, found.description) == ("mine", path, "What it is.")
    assert found.unit == "points"
    assert found.defaults == {"batch_size": 10, "micro_batch": 4, "updates": 4}
    assert isinstance(found.build_model(), nn.Module)
    assert len(found.build_data()) == 24
    assert found.units is not None
    assert found.collate is None
    assert found.digest != load_recipe(str(recipe(EXACT))).digest


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_ones_are_found_by_name_and_stand_alone(name: str, tmp_path: Path) -> None:
    embedded = load_recipe(name)
    assert embedded.name == name
    assert embedded.is_embedded
    copy = tmp_path / "mine.py"
    copy.write_bytes(find_recipe(name).read_bytes())
    assert load_recipe(str(copy)).defaults == embedded.defaults
    assert not load_recipe(str(copy)).is_embedded


BAD = {
    "no loss": (("def loss(", "def cost("), "mine.py has no function loss(model, micro)"),
    "no model": (("def model(", "def net("), "has no function model()"),
    "loss is no function": (
        ("def loss(model, micro):", "loss = 3\ndef other(model, micro):"),
        "loss",
    ),
    "loss takes one": (
        ("def loss(model, micro)", "def loss(micro)"),
        "loss(micro) must take 2 arg",
    ),
    "syntax": (("def model():", "def model(:"), "mine.py:10: not valid Python: invalid syntax"),
    "raises": (("unit = ", "1 / 0\nunit = "), "mine.py:8: ZeroDivisionError: division by zero"),
    "import": (("import torch\n", "import no_such\n"), "mine.py:2: ModuleNotFoundError: No module"),
    "unknown default": (
        ('"updates": 4', '"epochs": 4'),
        "defaults has 'epochs'; it may have batch_",
    ),
    "defaults": (
        ('{"batch_size": 10, "micro_batch": 4, "updates": 4}', "[]"),
        "is a list, not a dict",
    ),
    "unit": (('unit = "points"', "unit = 3"), "unit is a int, not a word"),
    "units": (("def units(micro):", "units = 3\ndef f(micro):"), "units is a int, not a function"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(recipe: Write, what: str) -> None:
    change, expected = BAD[what]
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(recipe(EXACT, change)))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_in_its_functions_name_the_line(recipe: Write) -> None:
    path = recipe(EXACT, ("    return nn.Sequential", "    raise KeyError('x')\n    return nn.Seq"))
    with pytest.raises(RecipeError, match=r"mine.py:11, in model: model\(\) failed: KeyError: 'x'"):
        load_recipe(str(path)).build_model()
    path = recipe(EXACT, ("    return nn.Sequential", "    return 7 or nn.Sequential"))
    with pytest.raises(RecipeError, match=r"model\(\) returned a int, not an nn.Module"):
        load_recipe(str(path)).build_model()


def test_lr_is_refused_where_groups_have_rates_of_their_own(recipe: Write) -> None:
    groups = """
def optimizer(model):
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": rest, "lr": 2.0}])
"""
    found = load_recipe(str(recipe(EXACT + groups)))
    with pytest.raises(RecipeError, match=r"--lr 0.5: .* rates of their own \(1, 2\)"):
        found.build_optimizer(found.build_model(), lr=0.5)


@pytest.mark.parametrize("arguments", ["optimizer", "optimizer, updates"])
def test_scheduler_is_told_the_steps_if_it_asks(recipe: Write, arguments: str) -> None:
    text = f"\ndef scheduler({arguments}):\n    return [{arguments}]\n"
    found = load_recipe(str(recipe(EXACT + text)))
    optimizer = found.build_optimizer(found.build_model(), lr=None)
    told = found.build_scheduler(optimizer, updates=12)
    assert told == ([optimizer, 12] if "updates" in arguments else [optimizer])


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'wholebatch\[recipes\]'"):
        load_recipe("digits-cnn").build_data()


def test_samples_that_cannot_be_put_together_are_told_in_one_line(
    command: Callable[..., Ran], recipe: Callable[..., Path]
) -> None:
    uneven = ("return Points()", "return [{'x': torch.randn(3 + i % 2)} for i in range(20)]")
    ran = command("train", recipe(NOISY, uneven))
    assert ran.status == 2
    assert ran.err.startswith("error: the samples of data() cannot be put together as they are (R")
    assert ran.err.endswith("or make them alike\n")
    broken = ('return {"x": x, "y"', 'raise OSError(\'gone\')\n        return {"x": x, "y"')
    ran = command("train", recipe(NOISY, broken), "--micro-batch", "auto")
    assert ran.status == 1
    assert ran.err.startswith("error: OSError: gone, at ")
    wrong = ("def loss(model, micro):", "def loss(model, micro):\n    raise KeyError('x')")
    for name, status in (("plan", 1), ("verify", 3)):
        ran = command(name, recipe(NOISY, wrong))
        assert (ran.status, ran.err.count("\n")) == (status, 1)
        assert ran.err.startswith("error: KeyError: 'x', at ")
    ran = command("train", recipe(NOISY, ("def data", "def validation(): return []\n\n\ndef data")))
    assert "error: the recipe's validation() is empty" in ran.err


def test_optimizer_is_adamw_unless_the_recipe_has_one(recipe: Write) -> None:
    plain = load_recipe(str(recipe(EXACT)))
    optimizer = plain.build_optimizer(plain.build_model(), lr=None)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert plain.build_optimizer(plain.build_model(), lr=0.5).param_groups[0]["lr"] == 0.5
    own = "\ndef optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=0.1)\n"
    mine = load_recipe(str(recipe(EXACT + own)))
    optimizer = mine.build_optimizer(mine.build_model(), lr=0.25)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.25
