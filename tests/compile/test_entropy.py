"""Cross-entropy and its gradient as one operation, in the memory of the logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import Micro, loss, run_rewritten
from tests.support import distance
from wholebatch.compile import token_statistics as token_statistics_module
from wholebatch.compile.cross_entropy import can_fuse_entropy
from wholebatch.compile.graph_rewrite import Fusions
from wholebatch.compile.token_statistics import token_statistics
from wholebatch.losses import sliced_cross_entropy
from wholebatch.window.precision import choose


class Reader(nn.Module):
    """Logits straight from a linear layer."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 8)
        self.read = nn.Linear(8, 11, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.read(torch.tanh(self.embed(tokens)))
        return logits


def mean_times_count(model: nn.Module, micro: Micro) -> wb.Loss:
    """A mean as models of Hugging Face make it, times what it is over."""
    logits = model(micro["x"]).float()
    labels = micro["y"].flatten()
    count = (labels != -100).sum()
    mean = functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels)
    return wb.Loss(mean * count, count)


def halved(model: nn.Module, micro: Micro) -> wb.Loss:
    """The seed reaches the loss through another operation."""
    whole = loss(model, micro)
    return wb.Loss(whole.total * 0.5, whole.units)


def squared(model: nn.Module, micro: Micro) -> wb.Loss:
    """The gradient depends on the loss itself."""
    whole = loss(model, micro)
    return wb.Loss(whole.total * whole.total, whole.units)


def with_z(model: nn.Module, micro: Micro) -> wb.Loss:
    """The logits are used twice."""
    logits = model(micro["x"])
    whole = wb.cross_entropy(logits, micro["y"])
    return wb.Loss(whole.total + logits.float().logsumexp(-1).square().sum(), whole.units)


def with_metrics(model: nn.Module, micro: Micro) -> wb.Loss:
    """The logits are read before the loss."""
    logits = model(micro["x"])
    entropies, likeliest, means = token_statistics(logits.flatten(0, 1))
    whole = wb.cross_entropy(logits, micro["y"])
    extras = {"entropy": entropies.sum(), "class": likeliest.sum().double(), "mean": means.sum()}
    return wb.Loss(whole.total, whole.units, extras=extras)


def with_late_metrics(model: nn.Module, micro: Micro) -> wb.Loss:
    """A view of the logits is read after the loss."""
    logits = model(micro["x"])
    rows = logits.flatten(0, 1)
    whole = wb.cross_entropy(logits, micro["y"])
    return wb.Loss(whole.total, whole.units, extras={"class": rows.argmax(-1).sum()})


def smoothed(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"], label_smoothing=0.1)


def weighted(model: nn.Module, micro: Micro) -> wb.Loss:
    weight = torch.linspace(0.5, 1.5, 11)
    return wb.cross_entropy(model(micro["x"]), micro["y"], weight=weight)


def _run(
    model: nn.Module, loss: Callable[[Any, Any], wb.Loss], precision: Any, *, fuses: bool
) -> tuple[int, list[Tensor], list[Tensor], set[str]]:
    """Fused losses, outputs and gradients of the rewritten graph, and what it calls."""
    rewritten, outputs, added = run_rewritten(model, loss, precision, Fusions(entropy=fuses))
    called = {str(node.target) for node in rewritten.graph.graph.nodes}
    return rewritten.fused["losses"], outputs, added, called


@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", [loss, mean_times_count, halved, with_metrics])
def test_the_same_numbers_without_a_second_tensor_of_that_size(
    loss: Callable[[Any, Any], wb.Loss], bias: bool, precision: str
) -> None:
    chosen = choose(precision, "cpu")
    plain = _run(Reader(bias=bias), loss, chosen, fuses=False)
    fused = _run(Reader(bias=bias), loss, chosen, fuses=True)
    assert (plain[0], fused[0]) == (0, 1)
    assert not any("softmax" in name or "nll_loss" in name for name in fused[3])
    for one, other in zip(plain[1], fused[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert distance(fused[2], plain[2]) <= (1e-6 if precision == "full" else 2e-3)
    assert all(buffer.abs().sum() > 0 for buffer in fused[2])


@pytest.mark.parametrize("loss", [squared, with_z, with_late_metrics, smoothed, weighted])
def test_what_it_cannot_be_stays_as_it_is(loss: Callable[[Any, Any], wb.Loss]) -> None:
    chosen = choose("bf16", "cpu")
    plain = _run(Reader(), loss, chosen, fuses=False)
    fused = _run(Reader(), loss, chosen, fuses=True)
    assert fused[0] == 0
    for one, other in zip([*plain[1], *plain[2]], [*fused[1], *fused[2]], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_each_slice_of_a_loss_is_done_before_the_next(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_cross_entropy, "joins_graph", lambda _: True)
    monkeypatch.setattr(sliced_cross_entropy, "rows_at_once", lambda _: 9)

    def in_slices(model: Any, micro: Micro) -> wb.Loss:
        labels, hidden = micro["y"].flatten(), torch.tanh(model.embed(micro["x"])).flatten(0, 1)
        total = sliced_cross_entropy.sliced_cross_entropy(hidden, model.read, labels)
        return wb.Loss(total, (labels != -100).sum())

    chosen = choose(precision, "cpu")
    plain = _run(Reader(), loss, chosen, fuses=False)
    fusions = Fusions(entropy=True, products_in_full=True)
    rewritten, outputs, added = run_rewritten(Reader(), in_slices, chosen, fusions)
    assert distance([outputs[0]], [plain[1][0]]) <= 1e-6
    assert distance(added, plain[2]) <= (1e-6 if precision == "full" else 4e-3)
    places = {node: place for place, node in enumerate(rewritten.graph.graph.nodes)}
    losses = [node for node in places if "cross_entropy_" in str(node.target)]
    assert len(losses) == rewritten.fused["losses"] > 2
    for one, following in itertools.pairwise(losses):
        made = {one.args[0]}
        for node in places:  # the gradient, and what is made of it
            if places[node] > places[one] and not made.isdisjoint(node.all_input_nodes):
                if "cat" in str(node.target):
                    continue
                assert places[node] < places[following.args[0]], node
                made.add(node)
        assert len(made) > 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_statistics_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_statistics_module, "_AT_ONCE", 40)
    logits = torch.randn(7, 13, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    logits[3, 2:9] = 9.0  # the first of equal ones is the most likely
    entropies, likeliest, means = token_statistics(logits.requires_grad_())
    shares = logits.detach().double().softmax(-1)
    limit = 1e-12 if dtype is torch.float64 else 1e-6
    assert distance([entropies], [-(shares * shares.log()).sum(-1)]) <= limit
    assert distance([means], [logits.detach().double().mean(-1)]) <= limit
    assert torch.equal(likeliest, logits.argmax(-1))
    assert not entropies.requires_grad


def test_no_cpu_has_the_kernel() -> None:
    assert not can_fuse_entropy(torch.device("cpu"))
