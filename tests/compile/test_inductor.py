"""What is changed of Inductor's own choices, and only while it compiles for us."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholebatch.compile import inductor
from wholebatch.compile.cross_entropy import _operation

aten = torch.ops.aten


def _features(hint: Any, numel: int) -> Any:
    return SimpleNamespace(get_reduction_hint=lambda: hint, reduction_numel=numel)


def test_long_rows_are_held_while_we_compile_and_not_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    def by_itself(features: Any, _: bool) -> bool:
        return bool(features.reduction_numel <= 1024)

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(by_itself))
    sizes = SimpleNamespace(statically_known_leq=lambda numel, longest: numel <= longest)
    with V.set_graph_handler(SimpleNamespace(sizevars=sizes)):  # type: ignore[arg-type]
        with inductor._persistent_rows():
            decide = InductorChoices.should_use_persistent_reduction
            assert [
                decide(_features(ReductionHint.INNER, numel), False)
                for numel in (512, 2048, 4096, 4097)
            ] == [True, True, True, False]
            assert not decide(_features(ReductionHint.OUTER, 2048), False)
        decide = InductorChoices.should_use_persistent_reduction
        assert not decide(_features(ReductionHint.INNER, 2048), False)


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
    with inductor._products_padded_by_rule():
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


def test_a_compiler_that_fails_leaves_its_choices_as_they_were() -> None:
    from torch._inductor.choices import InductorChoices

    before = InductorChoices.should_use_persistent_reduction
    with pytest.raises(RuntimeError, match="no compiler"), inductor._persistent_rows():
        assert InductorChoices.should_use_persistent_reduction is not before
        raise RuntimeError("no compiler here")
    assert InductorChoices.should_use_persistent_reduction is before


def test_another_version_of_inductor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.choices import InductorChoices

    monkeypatch.delattr(InductorChoices, "should_use_persistent_reduction")
    with inductor._persistent_rows():
        assert not hasattr(InductorChoices, "should_use_persistent_reduction")


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
