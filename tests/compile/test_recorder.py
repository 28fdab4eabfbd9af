"""A recording of a real run is the graph that fake tensors give, or it is refused."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.compile.nets import Tagger, loss, mean_of_tokens, mode_of, tagged, traced
from tests.support import Seen, Whole, sgd
from wholebatch.compile import recorder
from wholebatch.compile import trace as tracing
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.recorder import NotRecorded, recorded
from wholebatch.compile.trace import Form, State, trace
from wholebatch.window.precision import choose

LIBRARY = ctypes.CDLL(None)


def fill(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    LIBRARY.memset(ctypes.c_void_p(x.untyped_storage().data_ptr()), 0, 8)
    return made


@pytest.mark.parametrize(
    "hides",
    [
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x * x.tolist()[0],
        lambda x: x * float(x.numpy()[0]),
        lambda x: x + x.data_ptr(),
        lambda x: x[x > 0],
        lambda x: x + torch.empty_like(x),
        lambda x: x + torch.ones(3, dtype=torch.float64).numpy().sum(),
        lambda x: x.unsqueeze_(0) * 2,
        lambda x: x * OUTSIDE,
        lambda x: torch.equal(x, x) * x,
        lambda x: x.mul_(2),
        lambda x: torch.stack([x, x], out=torch.empty(2, 3).double())[0].copy_(x) + x.neg_(),
        fill,
    ],
)
def test_what_a_real_run_hides_is_not_recorded(hides: Callable[[Tensor], Tensor]) -> None:
    given = torch.arange(1.0, 4.0, dtype=torch.float64)
    with pytest.raises(NotRecorded):
        recorded(lambda x: [hides(x)], [given])
    assert given.tolist() == [1.0, 2.0, 3.0]


def test_other_threads_read_tensors_meanwhile() -> None:
    def step(x: Tensor) -> list[Tensor]:
        with ThreadPoolExecutor() as pool:
            assert pool.submit(OUTSIDE.tolist).result() == [1.0] * 3
        return [x + 1]

    assert recorded(step, [torch.ones(1)])(torch.zeros(1))[0] == 1


OUTSIDE = torch.ones(3, dtype=torch.float64)


def test_a_compiled_library_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_LIBRARIES", recorder._LIBRARIES - {"math"})
    with pytest.raises(NotRecorded, match="it calls math"):
        recorded(lambda x: [x * math.sqrt(2.0)], [torch.ones(3)])


def works(x: Tensor, y: Tensor) -> list[Tensor]:
    first, second = (x * 2).chunk(2)
    first.add_(torch.tensor(0.5)).mul_(y[:2])
    most, at = x.view(2, 2).max(1)
    made = torch.empty_like(x).copy_(x)
    return [first + second.exp(), most, at, torch.stack([made, y]).t().contiguous()]


def test_a_recording_holds_for_other_numbers() -> None:
    given = torch.arange(4.0, dtype=torch.float64)
    graph = recorded(works, [given, given])  # Two inputs, also if they are one tensor now.
    others = torch.randn(2, 4, dtype=torch.float64).unbind()
    for found, wanted in zip(graph(*others), works(*others), strict=True):
        assert torch.equal(found, wanted)
    assert given.tolist() == [0.0, 1.0, 2.0, 3.0]


class Alternating(nn.Module):
    """Layers that look alike; every second one does something else, by its number."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.again = again
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for number, layer in enumerate(self.layers):
            layer.number = number  # type: ignore[assignment]
        self.read = nn.Linear(8, 11)

    def layer(self, layer: Any, x: Tensor) -> Tensor:
        made = layer(x).tanh() * (1.0 + layer.number / 7)
        return x + (made if layer.number % 2 else made.flip(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = (
                checkpoint(self.layer, layer, x, use_reentrant=False)
                if self.again
                else self.layer(layer, x)
            )
        logits: Tensor = self.read(x)
        return logits


def operations(model: nn.Module, precision: str) -> Counter[str]:
    micro, how = tagged(5), choose(precision, "cpu")
    with how.forward():
        form = Form.of(loss(model, micro), "loss")
    state = State.of(model, list(model.parameters()))
    made = trace(model, loss, how, state, take_apart(micro), form, "loss")
    return Counter(
        str(node.target) for node in made.graph.graph.nodes if node.op == "call_function"
    )


@pytest.mark.parametrize("make", [Tagger, Alternating, lambda: Alternating(again=True)])
@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_the_operations_are_those_of_fake_tensors(
    make: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    model.drop = nn.Identity()  # A dropout of nothing is a copy for fake tensors.
    fake = tracing._written_down
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_written_down", lambda *_: pytest.fail("it was not recorded"))
        found = operations(model, precision)
    monkeypatch.setattr(tracing, "recorded", lambda *_: fake(*_))
    assert found == operations(model, precision)


def test_layers_that_only_look_alike_make_the_update_of_the_undivided_batch() -> None:
    model = Alternating().double().eval()
    whole = Whole(model, loss=mean_of_tokens)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    train = traced(model, optimizer, micro_batch=3)
    for number in (9, 7, 9):
        whole.step(tagged(number))
        train.step(tagged(number))
    assert mode_of(train) == "operations"
    whole.assert_same(model, seen)


def test_a_run_leaves_no_trace_behind() -> None:
    """Buffers, random numbers and gradients are as before; nothing of a user's tensor is marked."""
    model, micro = Tagger(0.5).train(), tagged(5)
    state = State.of(model, list(model.parameters()))
    form = Form.of(loss(model, micro), "loss")
    seen, drawn = model.seen.clone(), torch.get_rng_state()
    made = trace(model, loss, choose("full", "cpu"), state, take_apart(micro), form, "loss")
    assert made.random
    assert torch.equal(model.seen, seen)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())
    tensors = (*model.parameters(), *model.buffers(), *micro.values())
    assert not any(vars(tensor) for tensor in tensors)


def test_a_model_with_a_counter_is_refused_as_before() -> None:
    class Counts(Tagger):
        calls = 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(tokens)

    model = Counts().double()
    train = traced(model, micro_batch=3)
    with pytest.warns(wb.compile.ExecuteWarning, match=r"changes Counts\.calls"):
        train.step(tagged(6))
    train.step(tagged(6))
    assert model.calls == 4  # The eager ones
