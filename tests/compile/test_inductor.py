"""What is changed of Inductor's own choices, and only while it compiles for us."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholebatch.compile import inductor
from wholebatch.compile.cross_entropy import _operation

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("first", "second", "padded"),
    [
        ((4096, 768), (768, 50257), True),  # The result's rows begin anywhere.
        ((4096, 50257), (50257, 768), True),
        ((4097, 768), (768, 3072), False),  # Another number of rows changes nothing.
        ((8, 768), (768, 50257), False),  # Bound by memory.
        ((4, 512, 333), (4, 333, 512), True),
        ((0, 768), (768, 50257), False),
    ],
)
def test_products_are_padded_by_their_shapes(
    first: tuple[int, ...], second: tuple[int, ...], padded: bool
) -> None:
    from torch._inductor.fx_passes import pad_mm

    matrices = [torch.empty(one, dtype=torch.bfloat16, device="meta") for one in (first, second)]
    by_torch = pad_mm._should_pad
    match: Any = SimpleNamespace(output_node=lambda: SimpleNamespace(graph=fx.Graph()))
    with inductor._products_padded_by_rule(), inductor._in_this_thread():
        assert pad_mm._should_pad(match, *matrices, aten.mm) is padded
    assert pad_mm._should_pad is by_torch


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_padded_product_that_is_written_into_gives_the_same_numbers(
    through_a_view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.fx_passes import pad_mm

    monkeypatch.setattr(pad_mm, "check_device", lambda *_: True)  # Inductor pads on GPUs alone.
    monkeypatch.setattr(pad_mm, "has_triton", lambda *_: True)
    monkeypatch.setattr(inductor, "_INTENSITY", 4)
    replaced = list[bool]()
    decided = inductor.reads_memory
    monkeypatch.setattr(
        inductor, "reads_memory", lambda graph: replaced.append(decided(graph)) or replaced[-1]
    )
    torch.manual_seed(0)
    labels, seed = torch.randint(0, 257, (128,)), torch.ones(())

    def step(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = rows @ weight.t()
        if through_a_view:
            logits = aten._unsafe_view(logits, [2, 64, 257]).view(-1, 257)
        losses = _operation()(logits, labels, seed, -100)
        return losses.sum(), logits @ weight, logits.t() @ rows

    given = [torch.randn(128, 64), torch.randn(257, 64)]
    graph = make_fx(step)(*given)
    run = inductor.compiled_by_inductor(graph, given)
    for found, wanted in zip(run(*given), step(*given), strict=True):
        torch.testing.assert_close(found, wanted)
    assert set(replaced) == {through_a_view}


def test_what_was_compiled_with_our_choices_has_a_cache_key_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._inductor as compiler
    from torch._inductor import config

    monkeypatch.setattr(compiler, "compile", lambda *_: config.save_config_portable())
    by_torch = config.save_config_portable()
    assert inductor.compiled_by_inductor(None, []) != by_torch == config.save_config_portable()


def test_two_compiles_at_once_leave_inductor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns, and another thread gets the parts of Inductor as they are."""
    import torch._inductor as compiler
    from torch._inductor import lowering
    from torch._inductor.fx_passes import pad_mm

    before = lowering.pointwise_cat, pad_mm._should_pad
    begun, at_once = threading.Event(), []

    def slow(_: Any, arguments: list[Any]) -> Any:
        begun.set()
        at_once.append(arguments[0])
        time.sleep(0.1)
        at_once.remove(arguments[0])
        assert not at_once
        return arguments

    monkeypatch.setattr(compiler, "compile", slow)
    calls: list[Any] = []
    monkeypatch.setattr(lowering, "pointwise_cat", lambda *parts: calls.append(parts))
    threads = [
        threading.Thread(target=inductor.compiled_by_inductor, args=(None, [name])) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    lowering.pointwise_cat([], 0)  # of another thread
    for thread in threads:
        thread.join()
    assert calls == [([], 0)]
    monkeypatch.undo()
    assert (lowering.pointwise_cat, pad_mm._should_pad) == before


def test_a_compiler_that_fails_leaves_inductor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor as compiler
    from torch._inductor import lowering

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    before = lowering.pointwise_cat
    monkeypatch.setattr(compiler, "compile", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        inductor.compiled_by_inductor(None, [])
    assert lowering.pointwise_cat is before


def test_another_version_of_inductor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import pad_mm

    monkeypatch.delattr(pad_mm, "_should_pad")
    with inductor._products_padded_by_rule():
        assert not hasattr(pad_mm, "_should_pad")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["product", "pointwise", "copies"])
def test_parts_of_a_concatenation_are_written_in_place(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU is asked for what Inductor does on CUDA by itself."""
    from torch._inductor import config, ir

    made, create = [], ir.ConcatKernel.create

    def spy(inputs: Any, dim: int) -> Any:
        made.append(dim)
        return create(inputs, dim)

    monkeypatch.setattr(ir.ConcatKernel, "create", spy)
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    parts = [a, b]
    if kind != "copies":
        parts = [graph.call_function(aten.sin.default, (one,)) for one in parts]
    both = graph.call_function(aten.cat.default, (parts, 1))
    last = graph.call_function(aten.exp.default if kind == "pointwise" else aten.t.default, (both,))
    if kind != "pointwise":
        last = graph.call_function(aten.mm.default, (last, a))
    graph.output((last,))
    module = fx.GraphModule({}, graph)
    given = [torch.randn(4, 3), torch.randn(4, 5)]
    options = {"force_pointwise_cat": True, "force_disable_caches": True}
    with config.patch(options):
        run = inductor.compiled_by_inductor(module, given)
    assert torch.allclose(run(*given)[0], module(*given)[0])
    assert made == ([1] if kind == "product" else [])
