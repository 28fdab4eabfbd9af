"""What is changed of Inductor's own choices, and only while it compiles for us."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import fx

from wholebatch.compile import inductor

aten = torch.ops.aten


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

    before = lowering.pointwise_cat
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
    assert lowering.pointwise_cat is before


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
