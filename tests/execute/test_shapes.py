"""One graph serves micro-batches of many sizes: the update is that of the undivided batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.execute.nets import Micro, Tagger, loss, mean_of_tokens, mode_of, tagged, traced
from tests.support import Seen, Whole, distance, mlp, samples, sgd
from wholebatch.execute import executor as executor_module
from wholebatch.execute.inputs import take_apart
from wholebatch.execute.rewrite import Options, rewrite
from wholebatch.execute.sizes import Sizes, differing, pattern
from wholebatch.execute.trace import Form, State, Traced, trace
from wholebatch.precision import choose


class Encoder(nn.Module):
    """Texts with a padding mask in their attention, and an output that is tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.token = nn.Embedding(13, 8, padding_idx=0)
        self.place = nn.Embedding(32, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.read = nn.Linear(8, 13, bias=False)
        self.read.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        keep = (tokens != 0)[:, None, None, :]
        x = self.token(tokens) + self.place(torch.arange(length, device=tokens.device))
        q, k, v = (
            part.view(rows, length, 2, 4).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(8, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = x + mixed.transpose(1, 2).reshape(rows, length, 8)
        logits: Tensor = self.read(x + self.down(functional.gelu(self.up(x))))
        return logits


def texts(seed: int, number: int = 14, longest: int = 16) -> Micro:
    """Padded to the longest; each has a length of its own."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (number, 1), generator=generator)
    lengths[0] = longest
    beyond = torch.arange(longest) >= lengths
    tokens = torch.randint(1, 13, (number, longest), generator=generator)
    labels = torch.randint(0, 13, (number, longest), generator=generator)
    return {"x": tokens.masked_fill(beyond, 0), "y": labels.masked_fill(beyond, -100)}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every graph that is traced: whether its sizes are open."""
    made: list[bool] = []
    plain = executor_module.trace

    def counted(*arguments: Any) -> Any:
        made.append(arguments[-1] is not None)
        return plain(*arguments)

    monkeypatch.setattr(executor_module, "trace", counted)
    return made


def shared_by(train: wb.WholeBatch) -> int:
    """How many kinds run in a graph of open sizes."""
    steps = train._feeding.executor._steps.values()
    return sum(step.joint.sizes is not None for step in steps)


def test_token_budgets_need_two_graphs(traces: list[bool]) -> None:
    model = Encoder().double()
    whole = Whole(model, loss=mean_of_tokens, clip_norm=0.2)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    split = wb.tokens(48, pad={"x": 0, "y": -100}, multiple=2)
    train = traced(model, optimizer, micro_batch=split, clip_norm=0.2)
    for step in range(6):
        whole.step(texts(step % 3))
        train.step(texts(step % 3))
    # One for the first kind, one for all others but those of one row, and one for those.
    assert traces == [False, True, True]
    assert shared_by(train) == len(train._feeding.executor._steps) - 1 == 5
    assert mode_of(train) == "operations"
    whole.assert_same(model, seen)


def test_lengths_and_a_short_last_micro_batch(traces: list[bool]) -> None:
    model = Tagger().double()
    whole = Whole(model, loss=mean_of_tokens)
    train = traced(model)
    for length in (6, 6, 7, 7, 9, 5, 8, 6):
        whole.step(tagged(10, length))
        train.step(tagged(10, length))
    # The first that differs has fewer rows; then there are other lengths.
    assert traces == [False, True, True]
    assert shared_by(train) == len(train._feeding.executor._steps) - 1 == 9
    whole.assert_same(model)


def test_dropout_in_a_graph_of_open_sizes(traces: list[bool]) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))

    def total(model: nn.Module, micro: Tensor) -> wb.Loss:
        return wb.Loss(model(micro).sum(), len(micro))

    optimizer = sgd(model)
    train = traced(model, optimizer, loss=total, micro_batch=8)
    seen = Seen(model, optimizer)
    for number in (2, 2, 3, 3, 5, 5, 5):
        train.step(torch.ones(number, 64))
    assert traces == [False, True]
    assert shared_by(train) == 2
    shares = [{round(float(v) * 2.5) for v in g[0].flatten()} for g in seen.gradients[-2:]]
    assert shares[0] <= set(range(6))  # of 5 samples, each kept (twice as large) or dropped
    assert len(shares[0]) > 2
    assert not torch.equal(seen.gradients[-1][0], seen.gradients[-2][0])  # drawn anew


def by_length(model: nn.Module, micro: Micro) -> wb.Loss:
    total = functional.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
    return wb.Loss(total, len(micro["y"]))


def by_shape(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.mean_loss(functional.cross_entropy(model(micro["x"]), micro["y"]), micro["y"].numel())


def by_row(model: nn.Module, micro: Micro) -> Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")


@pytest.mark.parametrize("counted", [by_length, by_shape, by_row])
def test_units_that_are_a_size(counted: Callable[..., Any], traces: list[bool]) -> None:
    model = mlp()
    whole = Whole(model)
    train = traced(model, loss=counted)
    for number in (8, 8, 7, 7, 10, 6):
        loss_of_whole = whole.step(samples(number))
        assert train.step(samples(number)).loss == pytest.approx(loss_of_whole, rel=1e-12)
    assert traces == [False, True]
    assert shared_by(train) == 2  # of 3 and of 2 rows
    whole.assert_same(model)


def test_convolutions_with_another_number_of_images(traces: list[bool]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    whole = Whole(model)
    train = traced(model, micro_batch=6)
    for number in (6, 6, 11, 11, 10, 9, 8):
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(number, 1, 4, 4, generator=generator).double()
        batch = {"x": images, "y": torch.randint(0, 3, (number,), generator=generator)}
        whole.step(batch)
        train.step(batch)
    assert traces == [False, True]
    assert shared_by(train) == 4
    whole.assert_same(model)


class Pooled(nn.Module):
    """Does something else with long texts, and something of its own for each number of rows."""

    def __init__(self, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = mlp()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.more(x))
        return out


def long_ones_differ(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[0] > 5 else x


def each_differs(x: Tensor) -> Tensor:
    return x * float(len(range(x.shape[0])))


def each_product_differs(x: Tensor) -> Tensor:
    return x * float(len(range(x.numel() + 2 * x.shape[0])))


def shares_differ(x: Tensor) -> Tensor:
    return x * (1.0 / x.shape[0]) + x.new_ones(x.shape[0] - 1).sum() / (x.shape[0] // 2)


def test_sizes_for_which_the_code_does_something_else_are_not_admitted(traces: list[bool]) -> None:
    model = Pooled(long_ones_differ)
    eager = Pooled(long_ones_differ)
    reference = wb.WholeBatch(eager, sgd(eager), loss=loss, micro_batch=8, execute="eager")
    train = traced(model, micro_batch=8)
    for number in (8, 8, 3, 3, 4, 5, 2, 6, 6, 7, 7):
        train.step(samples(number))
        reference.step(samples(number))
    assert traces == [False, True, True]  # for 2 to 5, and for what is more
    assert shared_by(train) == 6
    assert distance(model.parameters(), eager.parameters()) <= 1e-12


def test_code_that_computes_with_sizes(traces: list[bool]) -> None:
    model, eager = Pooled(shares_differ), Pooled(shares_differ)
    reference = wb.WholeBatch(eager, sgd(eager), loss=loss, micro_batch=8, execute="eager")
    train = traced(model, micro_batch=8)
    for number in (8, 8, 3, 3, 4, 5, 6, 7):
        train.step(samples(number))
        reference.step(samples(number))
    assert traces == [False, True]
    assert shared_by(train) == 5
    assert distance(model.parameters(), eager.parameters()) <= 1e-12


@pytest.mark.parametrize("more", [each_differs, each_product_differs])
def test_sizes_that_are_asked_for_have_graphs_of_their_own(
    more: Callable[[Tensor], Tensor], traces: list[bool]
) -> None:
    model, eager = Pooled(more), Pooled(more)
    reference = wb.WholeBatch(eager, sgd(eager), loss=loss, micro_batch=8, execute="eager")
    train = traced(model, micro_batch=8)
    for number in (8, 8, 3, 3, 4, 4, 5, 5):
        train.step(samples(number))
        reference.step(samples(number))
    assert traces == [False, True, False, False]
    assert shared_by(train) == 0
    history = train._feeding.executor.notes.history
    assert any("its code asks for the sizes themselves" in text for text in history)
    assert distance(model.parameters(), eager.parameters()) <= 1e-12


def test_a_graph_that_gives_something_else_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, traces: list[bool]
) -> None:
    """The first use is in the middle of a window: its gradients are compared all the same."""
    from wholebatch.execute import joint

    right = joint.JointStep.__call__

    def wrong(self: Any, tensors: Any, seeds: Any) -> Any:
        return right(self, tensors, [seed * 1.5 for seed in seeds] if self.sizes else seeds)

    monkeypatch.setattr(joint.JointStep, "__call__", wrong)
    model = mlp()
    whole = Whole(model)
    train = traced(model)
    for number in (8, 8, 11, 11, 10, 10):
        whole.step(samples(number))
        train.step(samples(number))
    assert traces == [False, True, False, False]
    assert shared_by(train) == 0
    assert "its gradient differs from that of eager code" in " ".join(
        train._feeding.executor.notes.history
    )
    whole.assert_same(model)


def test_sixteen_bit_casts_are_those_of_the_window() -> None:
    models = [mlp(dtype=torch.float32) for _ in range(2)]
    options: dict[str, Any] = {"loss": loss, "micro_batch": 4, "precision": "bf16"}
    eager = wb.WholeBatch(models[0], sgd(models[0]), execute="eager", **options)
    graph = traced(models[1], **options)
    for number in (8, 8, 7, 7, 10, 6):
        batch = samples(number, dtype=torch.float32)
        eager.step(batch)
        graph.step(batch)
    assert shared_by(graph) == 2
    assert len(graph._feeding.executor._casts._copies) == 6
    assert distance(models[1].parameters(), models[0].parameters()) <= 1e-3


def test_what_is_open_and_what_goes_together() -> None:
    def kind(rows: int, length: int, extra: int = 3) -> Any:
        return take_apart(
            {
                "x": torch.zeros(rows, length),
                "mask": torch.zeros(rows, 1, length, length),
                "z": torch.zeros(extra),
            }
        )

    first, second, third = kind(4, 4), kind(4, 6), kind(2, 6)
    assert pattern(first.key) == pattern(second.key) != pattern(take_apart(torch.ones(1)).key)
    rows, lengths = ((0, 0), (1, 0)), ((0, 1), (1, 2), (1, 3))  # (tensor, dimension)
    assert set(differing(second, [first.key])) == {rows, lengths}
    assert set(differing(third, [second.key])) == {rows}
    assert set(differing(kind(1, 6), [first.key])) == {lengths}
    assert differing(second, [second.key]) == ()
    groups = differing(second, [first.key, third.key])
    assert set(groups) == {rows, lengths}
    sizes = Sizes.of(second, groups)
    assert sizes.admit(kind(7, 11).tensors)
    assert not sizes.admit(kind(7, 11, extra=4).tensors)  # was the same in all
    assert not sizes.admit(kind(1, 11).tensors)
    assert not sizes.admit(kind(7, 0).tensors)
    turned = {"x": torch.zeros(11, 7).t(), "mask": torch.zeros(7, 1, 11, 11), "z": torch.zeros(3)}
    assert not sizes.admit(take_apart(turned).tensors)  # lies otherwise in memory


def traced_of(model: nn.Module, number: int, length: int, *others: int) -> Traced:
    """The graph for texts of this size, or, if others are given, for any number."""
    precision = choose("bf16", "cpu")
    state = State.of(model, list(model.parameters()))
    inputs = take_apart(texts(1, number, length))
    with precision.forward():
        form = Form.of(loss(model, texts(1, number, length)), "loss")
    sizes = None
    if others:
        keys = [take_apart(texts(1, other, other)).key for other in others]
        sizes = Sizes.of(inputs, differing(inputs, keys))
    return trace(model, loss, precision, state, inputs, form, "loss", sizes)


def results_of(model: nn.Module, graph: Traced, *sizes: int) -> list[Tensor]:
    """Outputs and gradients of the rewritten graph for texts of this size."""
    micro = take_apart(texts(1, *sizes))
    trained = [parameter.detach() for parameter in model.parameters()]
    buffers = [torch.zeros_like(parameter) for parameter in trained]
    options = Options(entropy=True)
    rewritten = rewrite(graph, len(trained), [torch.float32] * len(trained), options)
    assert rewritten.fused_losses == 1
    casts = [trained[index].to(dtype) for index, dtype in rewritten.casts]
    leading = () if graph.sizes is None else sizes
    arguments = [*leading, *trained, *micro.tensors, torch.tensor(0.5), *casts, *buffers]
    with torch.no_grad():
        return [*rewritten.graph(*arguments), *buffers]


def test_graphs_of_open_sizes_are_rewritten_as_others_are() -> None:
    model = Encoder()
    number = len(list(model.parameters()))
    dtypes = [torch.float32] * number
    own, of_all = traced_of(model, 6, 16), traced_of(model, 6, 16, 4)
    for options in (Options(products=True, entropy=True), Options(recompute=True)):
        one, other = (rewrite(graph, number, dtypes, options) for graph in (own, of_all))
        for what in ("casts", "fused_products", "fused_embeddings", "recomputed", "fused_losses"):
            assert getattr(other, what) == getattr(one, what)
        made = (other.fused_products, other.fused_losses, other.recomputed)
        assert made == ((4, 1, 0) if options.products else (0, 0, 1))
        nodes = other.graph.graph.nodes
        reads = [node for node in nodes if node.target is torch.ops.aten.sym_size.int]
        assert len(reads) <= 2  # beside the logits; nothing is held only to be measured
    wanted = results_of(model, traced_of(model, 3, 7), 3, 7)
    assert distance(results_of(model, of_all, 3, 7), wanted) <= 1e-6
