"""Models whose linear layers torchao converted to 8 bits, with its arithmetic emulated on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import Seen, distance
from wholebatch.errors import UnsupportedError

pytestmark = [
    pytest.mark.slow,
    # torchao registers an enum class with torch, whose newest version warns of that.
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]
BATCH = {
    "x": torch.randn(11, 16, generator=torch.Generator().manual_seed(1)),
    "y": torch.randn(11, 16, generator=torch.Generator().manual_seed(2)),
}


def network(recipe: str) -> nn.Module:
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    converted: nn.Module = float8.convert_to_float8_training(model, config=config)
    assert type(converted[0]).__name__ == "Float8Linear"  # type: ignore[index]
    return converted


def loss(model: Any, micro: dict[str, Tensor]) -> wb.Loss:
    errors = (model(micro["x"]) - micro["y"]).square().mean(-1)
    return wb.Loss(errors.sum(), len(errors))


@pytest.mark.parametrize(
    ("micro_batch", "execute"), [(1, "eager"), (2, "eager"), (10, "eager"), (4, "compile")]
)
@pytest.mark.filterwarnings("ignore::wholebatch.compile.ExecuteWarning")
def test_a_split_makes_the_update_of_the_undivided_batch(micro_batch: int, execute: Any) -> None:
    recipe = "rowwise_with_gw_hp"
    whole = network(recipe)
    # From a power of two, as a window begins: 8 bits of a gradient depend on other factors.
    loss(whole, BATCH).total.div(16).backward()
    reference = [parameter.grad * (16 / 11) for parameter in whole.parameters()]
    bare = network(recipe)
    for module in bare.modules():  # without the 8 bits
        if isinstance(module, nn.Linear):
            module.forward = lambda x, module=module: nn.functional.linear(
                x, module.weight, module.bias
            )  # type: ignore
    loss(bare, BATCH).total.div(11).backward()
    rounding = distance(reference, [parameter.grad for parameter in bare.parameters()])
    assert rounding > 1e-2  # the 8 bits are there
    model = network(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recorded = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch, execute=execute)
    for _ in range(3):
        train.step(BATCH)
    for gradient in recorded.gradients:
        # float32, whose rounding may move a number over the edge between two of 8 bits.
        assert distance(gradient, reference) < 1e-3 * rounding


def test_scales_over_a_micro_batch_are_refused() -> None:
    model = network("tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4)
    with pytest.raises(UnsupportedError, match="cannot give the update of the whole batch"):
        train.step(BATCH)
