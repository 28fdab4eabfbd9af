"""A layer norm's backward with all around it as one operation, and GELUs by one exponential."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import Blocks, loss, run_rewritten
from tests.support import distance
from wholebatch.compile import biased_attention, compile_workers, fusion, gelu
from wholebatch.compile import cross_entropy as entropy
from wholebatch.compile import layer_norm as norms
from wholebatch.compile.gelu import can_fuse_gelu, simplify_gelu
from wholebatch.compile.graph_rewrite import Fusions, Rewritten
from wholebatch.compile.layer_norm import can_fuse_norms
from wholebatch.compile.repeated_blocks import PieceProgram, _Input, _Result
from wholebatch.window.precision import choose


def _run(
    model: nn.Module, precision: str, options: Fusions, function: Callable[[Any, Any], wb.Loss]
) -> tuple[Rewritten, list[Tensor], set[str]]:
    """The rewritten graph, what it adds to the buffers, and what it calls."""
    chosen = choose(precision, "cpu")
    rewritten, _, added = run_rewritten(model, function, chosen, options, held=1.0)
    return rewritten, added, {str(node.target) for node in rewritten.graph.graph.nodes}


def _frozen() -> Blocks:
    model = Blocks()
    model.norms[0].weight.requires_grad_(False)
    model.downs[0].bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], Blocks]] = {
    "before": Blocks,
    "after": lambda: Blocks(after=True),
    "without weights": lambda: Blocks(affine=False),
    "without biases": lambda: Blocks(bias=False),
    "one norm used twice": lambda: Blocks(shared=True),
    "partly frozen": _frozen,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_the_same_gradients_by_one_operation_for_each_norm(name: str, precision: str) -> None:
    _, plain, _ = _run(MODELS[name](), precision, Fusions(), loss)
    rewritten, found, called = _run(MODELS[name](), precision, Fusions(norms=True), loss)
    assert rewritten.fused["norms"] == 3
    assert not any("native_layer_norm_backward" in target for target in called)
    assert distance(found, plain) <= (1e-6 if precision == "full" else 2e-3)
    assert all(gradient.abs().sum() > 0 for gradient in found)


def test_under_autocast_everything_around_the_norm_is_in_it() -> None:
    """The residual's addition, its cast to 16 bit, and the sum for the bias of the layer before."""
    rewritten, _, _ = _run(Blocks(), "bf16", Fusions(norms=True), loss)
    nodes = rewritten.graph.graph.nodes
    calls = [n for n in nodes if "wholebatch.layer_norm_backward" in str(n.target)]
    last, middle, first = [call.args[5:] for call in calls]  # weight, residual, 16 bit, sums
    assert last[1:] == (None, torch.bfloat16, [True] * 3, None)  # nothing by-passes the last norm
    assert middle[1] is not None
    assert middle[2:] == (torch.bfloat16, [True] * 3, None)
    assert first[2:] == (None, [True, True, False], None)  # an embedding comes before, in 32 bit
    # The second norm's input is the first one's plus what a layer has added to it.
    assert [call.args[2] is not None for call in calls] == [False, True, False]
    assert calls[1].args[1] is calls[2].args[1]
    assert all(call.args[0].meta["val"].dtype is torch.bfloat16 for call in calls)


class Wide(Blocks):
    """Its norm is over two dimensions."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits: Tensor = self.read(functional.layer_norm(x, x.shape[1:]))
        return logits


class Short(Blocks):
    """What is normalised has 16 bit under autocast."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.downs[0](self.ups[0](self.embed(tokens)))
        logits: Tensor = self.read(self.norms[0](x))
        return logits


class Read(Blocks):
    """The gradient of a norm's weight is not that of a parameter."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        norm = self.norms[0]
        x = functional.layer_norm(x, (8,), norm.weight * 2.0, norm.bias)
        logits: Tensor = self.read(x)
        return logits


@pytest.mark.parametrize("model", [Wide, Short, Read])
def test_what_it_cannot_be_stays_as_it_is(model: type[Blocks]) -> None:
    rewritten, found, _ = _run(model(), "bf16", Fusions(norms=True), loss)
    _, plain, _ = _run(model(), "bf16", Fusions(), loss)
    assert rewritten.fused["norms"] == 0
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_a_gelu_by_one_exponential_is_no_further_from_float64(approximate: str) -> None:
    model = Blocks(approximate=approximate)
    _, exact, _ = _run(Blocks(approximate=approximate).double(), "full", Fusions(), loss)
    _, plain, _ = _run(model, "bf16", Fusions(), loss)
    _, found, called = _run(model, "bf16", Fusions(gelu=True), loss)
    assert any("gelu" in target for target in called) == (approximate == "none")
    assert distance(found, exact) <= 1.1 * distance(plain, exact)
    assert distance(found, plain) <= 2e-3


def test_gelus_in_full_precision_are_left_to_the_compiler() -> None:
    _, plain, _ = _run(Blocks(), "full", Fusions(), loss)
    _, found, called = _run(Blocks(), "full", Fusions(gelu=True), loss)
    assert any("gelu" in target for target in called)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_the_bias_before_a_gelu_is_summed_with_its_gradient(approximate: str) -> None:
    _, plain, _ = _run(Blocks(approximate=approximate), "bf16", Fusions(), loss)
    rewritten, found, called = _run(
        Blocks(approximate=approximate), "bf16", Fusions(gelu_sums=True), loss
    )
    assert rewritten.fused["gelus"] == 2
    assert not any("gelu_backward.default" in target for target in called)
    assert distance(found, plain) <= 2e-3
    frozen = Blocks(approximate=approximate)
    frozen.ups[0].bias.requires_grad_(False)
    assert _run(frozen, "bf16", Fusions(gelu_sums=True), loss)[0].fused["gelus"] == 1


@pytest.mark.parametrize("gradient", [False, True])
def test_gelus_of_all_numbers_of_16_bit(gradient: bool) -> None:
    """Each is within one rounding of torch's own result in float64."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.abs() <= 1e18]  # beyond, torch's own gradient is not a number
    graph = fx.Graph()
    x = graph.placeholder("x")
    if gradient:
        node = graph.call_function(
            torch.ops.aten.gelu_backward.default,
            (graph.call_function(torch.ops.aten.ones_like.default, (x,)), x),
            {"approximate": "tanh"},
        )
    else:
        node = graph.call_function(torch.ops.aten.gelu.default, (x,), {"approximate": "tanh"})
    node.meta["val"] = numbers
    graph.output(node)
    assert simplify_gelu(graph) == 1
    found = fx.GraphModule({}, graph)(numbers)
    exact = numbers.double().requires_grad_()
    made = functional.gelu(exact, approximate="tanh")
    if gradient:
        [made] = torch.autograd.grad(made.sum(), exact)
    made = made.detach()
    rounding = made.abs() * 2.0**-8 + 1e-6
    assert bool(((found.double() - made).abs() <= rounding).all())


CHECKS = {"attention": biased_attention, "entropy": entropy, "gelu": gelu, "norms": norms}


@pytest.mark.parametrize("name", CHECKS)
def test_a_kernel_that_computes_something_else_is_not_used(name: str) -> None:
    """Each check runs on a CPU too, where an operation is its own stand-in."""
    operation, agrees = CHECKS[name]._operation(), CHECKS[name]._agrees

    def off(*given: Any) -> Any:
        results = operation(*given)
        first = results[0] if isinstance(results, tuple) else results
        first.mul_(1.02)
        return results

    cpu = torch.device("cpu")
    assert agrees(operation, cpu)
    assert not agrees(off, cpu)


def test_a_kernel_that_is_not_there_or_cannot_run_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    def agrees(run: Callable[..., Any], _: torch.device) -> bool:
        return bool(run(1) == 1)

    cuda = torch.device("cuda")
    home = "wholebatch.compile.triton_kernels"
    assert find_spec(home) is not None  # else no kernel would ever be used
    monkeypatch.setitem(sys.modules, home, ModuleType("here"))
    assert fusion.computes_rightly(cuda, lambda: lambda one: one, agrees)
    assert not fusion.computes_rightly(cuda, lambda: broken, agrees)
    assert not fusion.computes_rightly(torch.device("cpu"), lambda: broken, agrees)
    with pytest.raises(ZeroDivisionError):  # the comparison's own mistakes are not hidden
        fusion.computes_rightly(cuda, lambda: lambda one: one, lambda *_: bool(1 / 0))
    monkeypatch.setitem(sys.modules, home, None)
    assert not fusion.computes_rightly(cuda, lambda: lambda one: one, agrees)


def test_no_cpu_has_the_kernel() -> None:
    assert not can_fuse_norms(torch.device("cpu"))
    assert not can_fuse_gelu(torch.device("cpu"))


def test_a_good_verdict_is_kept_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fusion, "versions_of", lambda device: f"of {device}")
    asked: list[str] = []

    def check(device: torch.device) -> bool:
        asked.append(str(device))
        return device.index != 1

    def both(device: torch.device) -> bool:
        return fusion.once_per_machine(check)(device)  # A check that asks another one.

    for _ in range(2):  # Two processes.
        verdict = fusion.once_per_machine(both)
        assert verdict(torch.device("cuda", 0))
        assert verdict(torch.device("cuda", 0))
        assert not verdict(torch.device("cuda", 1))
    assert asked == ["cuda:0", "cuda:1", "cuda:1"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))  # cannot be written
    assert fusion.once_per_machine(check)(torch.device("cuda", 0))
    assert asked[3:] == ["cuda:0"]


def test_a_worker_compiles_the_kernels_that_a_piece_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[Any, ...]] = []
    kernels: Any = ModuleType("wholebatch.compile.triton_kernels")
    kernels.only_compiled = nullcontext
    kernels.gelu_backward = lambda gradient, x, *_, **__: launched.append((x.shape, x.device.type))
    monkeypatch.setitem(sys.modules, "wholebatch.compile.triton_kernels", kernels)
    matrix = ((4, 8), (8, 1), torch.float32, torch.device("cuda", 0))
    sums = ((8,), (1,), torch.float32, torch.device("cuda", 0))
    operations = [
        (torch.ops.aten.sin.default, (_Input(0),), {}),
        (gelu._operation(), (_Result(0), _Input(0), _Input(1), "tanh"), {}),
    ]
    piece = PieceProgram(operations, [matrix, sums], [1])
    compile_workers._compile_kernels(lambda: piece.module()(*piece.examples()))
    assert launched == [((4, 8), "cuda")]
