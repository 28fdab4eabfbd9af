"""How near a graph must be to eager code, and what counts where rounding in 16 bit is large."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import loss, mode_of, traced
from tests.support import mlp, samples, sgd
from wholebatch.compile import ExecuteWarning, graph_check, joint_graph
from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.graph_check import differs, hold_against, weights_moved


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (400, 50, 1000)]


EAGER, NOISE, OTHER = tensors(0), tensors(1), tensors(2)


def mixed(share: float) -> list[Tensor]:
    """The gradients of eager code with an error of this share of their norm."""
    return [a + share * b for a, b in zip(EAGER, NOISE, strict=True)]


def is_refused(
    found: list[Tensor],
    what: str,
    *,
    compiled: bool,
    sixteen_bit: bool = True,
    noise: float | None = None,
) -> bool:
    """`noise`: the distance to eager code with moved weights, as a share of each gradient."""
    moved = None if noise is None else lambda: [noise * graph_check._norm([g]) for g in EAGER]
    try:
        hold_against(found, EAGER, what, sixteen_bit=sixteen_bit, compiled=compiled, moved=moved)
    except CannotTrace:
        return True
    return False


def test_a_loss_in_16_bit_is_held_to_2_percent_as_traced_and_to_a_tenth_compiled() -> None:
    for share, plain, compiled in ((0.01, False, False), (0.05, True, False), (0.2, True, True)):
        assert is_refused(mixed(share), "loss", compiled=False) is plain
        assert is_refused(mixed(share), "loss", compiled=True) is compiled


@pytest.mark.parametrize("compiled", [False, True])
def test_in_full_precision_the_size_of_gradients_excuses_nothing(compiled: bool) -> None:
    assert is_refused(mixed(0.05), "gradient", compiled=compiled, sixteen_bit=False)
    assert not is_refused(mixed(0.005), "gradient", compiled=compiled, sixteen_bit=False)
    wide = [one.double() for one in EAGER]
    near = [one * (1 + 1e-5) for one in wide]
    assert differs(near, wide, "gradient", sixteen_bit=False, compiled=compiled) is not None


def test_only_rounding_excuses_a_difference() -> None:
    for share, noise in ((0.2, 0.15), (0.9, 0.8)):
        assert not is_refused(mixed(share), "gradient", compiled=True, noise=noise)
        assert is_refused(mixed(share), "gradient", compiled=True, noise=share / 3)
        assert is_refused(mixed(share), "gradient", compiled=True)
    assert is_refused([1.5 * one for one in EAGER], "gradient", compiled=True, noise=0.1)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("factor", [0.0, 0.4, 3.0, -1.0, float("nan")])
def test_a_large_gradient_of_another_size_or_direction_is_refused(
    place: int, factor: float
) -> None:
    """Its size however much rounding there is, its direction where rounding leaves it."""
    for noise in (0.4, 10.0):
        found = mixed(0.2)
        found[place] = found[place] * factor
        assert is_refused(found, "gradient", compiled=True, noise=noise) is (
            factor != -1.0 or noise < 0.5
        )
        found[place] = mixed(0.2)[place].flip(0)
        assert is_refused(found, "gradient", compiled=True, noise=noise) is (noise < 0.5)


@pytest.mark.parametrize("factor", [1.0, 1.8, 0.5])
def test_an_untrained_resnet_turns_by_rounding_but_keeps_its_sizes(factor: float) -> None:
    """Its gradient in bf16 lies farther from float32 than it is long, as eager code's own does."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig()
    config.num_labels = 10
    model = ResNetForImageClassification(config)
    pixels, labels = torch.randn(8, 3, 64, 64), torch.arange(8)

    def gradients(precision: torch.dtype) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
            total = functional.cross_entropy(model(pixels).logits.float(), labels)
        return list(torch.autograd.grad(total, list(model.parameters())))

    eager, other = gradients(torch.bfloat16), gradients(torch.float32)
    with weights_moved(model):
        moved = gradients(torch.bfloat16)
    own = [graph_check._distance([a], [b]) for a, b in zip(moved, eager, strict=True)]
    assert graph_check._distance(other, eager) > graph_check._norm(eager)
    answer: Any = pytest.raises(CannotTrace) if factor != 1.0 else contextlib.nullcontext()
    with answer:
        scaled = [factor * gradient for gradient in other]
        hold_against(scaled, eager, "gradient", sixteen_bit=True, compiled=True, moved=lambda: own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_moved_by_a_rounding_step_of_bf16_and_put_back(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64, dtype=dtype)
    before, version = model.weight.detach().clone(), model.weight._version
    with weights_moved(model):
        off = ((model.weight - before) / before).abs().float()
        assert 2**-8.1 / 2 <= off[off > 0].median() <= 2**-7
        assert 0.4 < (off > 0).float().mean() < 0.6
    assert torch.equal(model.weight, before)
    assert model.weight._version == version


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_rounding_of_the_users_own_model_is_measured(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its gradients differed by more than 2%, by rounding or by a mistake."""
    right = joint_graph.JointStep.__call__

    def scaled(self: Any, tensors: Any, seeds: Any) -> Any:
        return right(self, tensors, [seed * factor for seed in seeds])

    monkeypatch.setattr(joint_graph.JointStep, "__call__", scaled)
    monkeypatch.setattr(
        graph_check, "differs", lambda *rest, **_: "too far" if rest[2] == "gradient" else None
    )
    model = mlp().float()
    train = traced(model, precision="bf16")
    batch = samples(8, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ExecuteWarning)
        train.step(batch)
        train.step(batch)
    assert mode_of(train) == ("operations" if factor == 1.0 else "eager")
    assert len(said) == (factor != 1.0)


def test_that_rounding_is_measured_once_for_all_graphs_of_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of eager code beside a recorded graph would take the memory of both."""
    runs = []

    def counted(*parts: Any) -> Any:
        runs.append(parts)
        return eager(*parts)

    eager = graph_check.gradients_of
    monkeypatch.setattr(graph_check, "gradients_of", counted)
    monkeypatch.setattr(joint_graph.JointStep, "compile", lambda _: None)
    monkeypatch.setattr(
        graph_check, "differs", lambda *rest, **_: "too far" if rest[2] == "gradient" else None
    )
    model = mlp().float()
    options: Any = {"micro_batch": 4, "precision": "bf16", "execute": "compile"}
    train = wb.WholeBatch(model, sgd(model), loss=loss, **options)
    train.step(samples(8, dtype=torch.float32))
    assert mode_of(train) == "compile"  # compared as traced, and as compiled
    assert len(runs) == 1
