"""How near a graph must be to eager code, and what counts where rounding in 16 bit is large."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import loss, mode_of, traced
from tests.support import Whole, mlp, samples, sgd
from wholebatch.compile import ExecuteWarning, graph_check, joint_graph
from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.graph_check import weights_moved


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (400, 50, 1000)]


EAGER, NOISE, OTHER = tensors(0), tensors(1), tensors(2)


def mixed(share: float) -> list[Tensor]:
    """The gradients of eager code with an error of this share of their norm."""
    return [a + share * b for a, b in zip(EAGER, NOISE, strict=True)]


def is_refused(found: list[Tensor], *, compiled: bool, sixteen_bit: bool = True) -> bool:
    allowed = graph_check._allowed(found[0].dtype, sixteen_bit, compiled=compiled)
    wanted = [one.to(found[0].dtype) for one in EAGER]
    try:
        graph_check._hold_against(found, wanted, "loss", allowed)
    except CannotTrace:
        return True
    return False


def test_a_loss_in_16_bit_is_held_to_2_percent_as_traced_and_to_a_tenth_compiled() -> None:
    for share, plain, compiled in ((0.01, False, False), (0.05, True, False), (0.2, True, True)):
        assert is_refused(mixed(share), compiled=False) is plain
        assert is_refused(mixed(share), compiled=True) is compiled
    assert is_refused([one * float("nan") for one in EAGER], compiled=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_in_full_precision_a_hundredth_is_too_far(compiled: bool) -> None:
    assert is_refused(mixed(0.05), compiled=compiled, sixteen_bit=False)
    assert not is_refused(mixed(0.005), compiled=compiled, sixteen_bit=False)
    near = [one.double() * (1 + 1e-5) for one in EAGER]
    assert is_refused(near, compiled=compiled, sixteen_bit=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_moved_by_a_rounding_step_of_bf16_and_put_back(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64, dtype=dtype)
    before, version = model.weight.detach().clone(), model.weight._version
    with weights_moved(list(model.parameters())):
        off = ((model.weight - before) / before).abs().float()
        assert 2**-8.1 / 2 <= off[off > 0].median() <= 2**-7
        assert 0.4 < (off > 0).float().mean() < 0.6
    assert torch.equal(model.weight, before)
    assert model.weight._version == version


@pytest.mark.parametrize(("factor", "mode"), [(1.0, "compile"), (1.5, "compile"), (4.0, "eager")])
def test_a_model_that_amplifies_rounding_is_held_to_its_own_rounding(
    factor: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the compiled graph scaled its gradient, and rounding moved that by a half."""
    right = joint_graph.JointStep.__call__

    def scaled(self: Any, inputs: Any, seeds: Any) -> Any:
        return right(self, inputs, [seed * (factor if self.compiled else 1.0) for seed in seeds])

    monkeypatch.setattr(joint_graph.JointStep, "__call__", scaled)
    monkeypatch.setattr(joint_graph.JointStep, "compile", lambda _: None)
    monkeypatch.setattr(graph_check.GraphCheck, "_own_distance", lambda *_: 0.5)
    model = mlp().float()
    options: Any = {"micro_batch": 4, "precision": "bf16", "execute": "compile", "audit": False}
    train = wb.WholeBatch(model, sgd(model), loss=loss, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExecuteWarning)
        train.step(samples(8, dtype=torch.float32))
        train.step(samples(8, dtype=torch.float32))
    assert mode_of(train) == mode


def test_a_gradient_of_zero_proves_nothing() -> None:
    """The next micro-batch is compared."""

    def masked(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        return wb.Loss((model(micro["x"])[:, 0] * micro["mask"]).sum(), micro["mask"].sum())

    def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        whole = masked(model, batch)
        return whole.total / whole.units

    model = mlp()
    whole, train = Whole(model, loss=mean), traced(model, loss=masked)
    batch = {"x": samples(12)["x"], "mask": torch.ones(12, dtype=torch.float64)}
    batch["mask"][:4] = 0.0
    modes = []
    for _ in range(2):
        train.step(batch)
        whole.step(batch)
        modes.append(mode_of(train))
    whole.assert_same(model)
    assert modes == ["operations", "operations"]
