"""The trace of one micro-step: forward, loss and backward of `loss(model, micro)` as one graph.

The model's Python runs once on fake tensors, which compute nothing, and every operation of the
forward and of autograd's backward is recorded. The model need not be rewritten or analysed:
autocast, checkpointing without randomness, custom autograd functions and tied weights all appear as
operations. `CannotTrace` gives the reason for what cannot be recorded (a branch on a tensor's
value) and what must not be (a side effect in Python, random numbers drawn again in the backward).
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from wholebatch.compile.captured_state import only_reads, refuse_hooks
from wholebatch.compile.execute_mode import CannotTrace, reason_of
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.core.loss import Loss, Term, Terms, Units, as_loss
from wholebatch.core.precision import SIXTEEN_BIT, Precision

if TYPE_CHECKING:
    from wholebatch.compile.symbolic_sizes import Sizes

__all__ = ["Added", "Form", "State", "Traced", "extras_of", "totals_of", "trace"]

_LEN = builtins.len
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Form:
    """The form of a loss without its tensors: one entry for each term."""

    names: tuple[str, ...]
    plain: bool
    weights: tuple[float, ...]
    dtypes: tuple[torch.dtype, ...]
    units: tuple[int | float | None, ...]
    """Units that are numbers; None for a tensor, which is an output of the graph."""
    extras: tuple[str, ...] = ()
    """The names of the tensors to hand back beside the loss, which are outputs too."""

    @staticmethod
    def of(loss: Loss | Terms, single: str) -> Form:
        """Return the form of this loss; a plain loss is one term with the name `single`."""
        terms = _terms(loss, single)
        return Form(
            names=tuple(terms),
            plain=isinstance(loss, Loss),
            weights=tuple(term.weight for term in terms.values()),
            dtypes=tuple(term.total.dtype for term in terms.values()),
            units=tuple(
                None if isinstance(term.units, Tensor) else term.units for term in terms.values()
            ),
            extras=tuple(extras_of(loss)),
        )

    def read(self, totals: Sequence[Tensor], rest: Sequence[Tensor]) -> Added:
        """Return the outputs of a graph by name: its totals, and its units and extras."""
        outputs = iter(rest)
        units = {
            name: next(outputs) if number is None else number
            for name, number in zip(self.names, self.units, strict=True)
        }
        return Added(
            totals=dict(zip(self.names, totals, strict=True)),
            units=units,
            weights=dict(zip(self.names, self.weights, strict=True)),
            extras=dict(zip(self.extras, outputs, strict=True)),
        )


@dataclass(frozen=True)
class Added:
    """The outcome of a micro-step whose gradients are added: numbers by term, and extras."""

    totals: Mapping[str, Tensor]
    units: Mapping[str, Units]
    weights: Mapping[str, float]
    extras: Mapping[str, Tensor]

    @staticmethod
    def of(loss: Loss | Terms, single: str) -> Added:
        """Return the outcome of a micro-step that eager code has made."""
        terms = _terms(loss, single)
        return Added(
            totals={name: term.total.detach() for name, term in terms.items()},
            units={name: term.units for name, term in terms.items()},
            weights={name: term.weight for name, term in terms.items()},
            extras={name: extra.detach() for name, extra in extras_of(loss).items()},
        )


@dataclass(frozen=True)
class State:
    """The present tensors of a model by name; tied tensors appear once."""

    trained: dict[str, nn.Parameter]
    others: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module, inputs: Sequence[nn.Parameter]) -> State:
        """Split the model's tensors into those to differentiate by (`inputs`) and the rest."""
        wanted = {id(parameter) for parameter in inputs}
        trained, others = {}, {}
        for name, parameter in model.named_parameters():
            if type(parameter) is not nn.Parameter:
                raise CannotTrace(f"{name} is a {type(parameter).__name__}")
            if id(parameter) in wanted:
                trained[name] = parameter
            else:
                others[name] = parameter.detach()
        for name, buffer in model.named_buffers():
            others[name] = buffer
        if len(trained) != len(wanted):
            raise CannotTrace("the optimizer has parameters that are not in the model")
        if len({p.device for p in trained.values()} | {t.device for t in others.values()}) > 1:
            raise CannotTrace("the model is on more than one device")
        return State(trained, others)


@dataclass(frozen=True)
class Traced:
    """The graph: (trained, others, the micro-batch's tensors, seeds) -> (totals, units, gradients).

    Units are outputs only if they are tensors. The gradients are those of the parameters in `used`.
    """

    graph: fx.GraphModule
    form: Form
    used: tuple[int, ...]
    random: bool
    sizes: Sizes | None = None
    """The symbols of the graph, if it is valid for more than one shape."""
    units: tuple[Any, ...] = ()
    """The units of the form, before symbols were replaced with numbers."""

    @property
    def sixteen_bit(self) -> bool:
        """True if a part of the graph computes in 16 bit."""
        values = (node.meta.get("val") for node in self.graph.graph.nodes)
        return any(getattr(value, "dtype", None) in SIXTEEN_BIT for value in values)

    def form_for(self, tensors: Sequence[Tensor]) -> Form:
        """Return the form of the loss for a micro-batch with these tensors."""
        if self.sizes is None:
            return self.form
        units = tuple(self.sizes.value(number, tensors) for number in self.units)
        return replace(self.form, units=units)


@contextmanager
def _swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the model have these tensors, by name, instead of its own within this context.

    torch.func.functional_call does not put back the tensors of a module with two names.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    new = {id(old): tensors[name] for name, old in named}
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (held, name, old)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, old in held.items()
        if old is not None
    ]
    for held, name, old in places:
        held[name] = new[id(old)]
    try:
        yield
    finally:
        for held, name, old in places:
            held[name] = old


@dataclass
class _MicroStep:
    """The function to trace: forward, loss and backward of one micro-batch on flat tensors."""

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    precision: Precision
    state: State
    inputs: Inputs
    form: Form
    single: str
    sizes: Sizes | None
    used: tuple[int, ...] = ()
    """The parameters that got a gradient."""
    units: tuple[Any, ...] = ()
    """The units of the loss; they may be symbols."""
    extras: tuple[Tensor, ...] = ()
    """The tensors to hand back beside the loss."""
    drawn: int = 0
    """The number of operations of the forward that draw random numbers."""
    draws_again: bool = False
    """True if the backward draws too."""

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        lengths = len(self.state.trained), len(self.state.others), len(self.inputs.tensors)
        one, two, three = accumulate(lengths)
        leaves = [tensor.detach().requires_grad_() for tensor in flat[:one]]
        held = dict(zip(self.state.others, flat[one:two], strict=True))
        micro, seeds = flat[two:three], flat[three:]

        tensors = dict(zip(self.state.trained, leaves, strict=True)) | held
        # The backward must run inside too: checkpointing recomputes the forward there.
        with _swapped(self.model, tensors):
            terms = self._forward(self.inputs.around(micro), held)
            return self._backward(terms, leaves, seeds)

    def _forward(self, micro: Any, held: dict[str, Tensor]) -> list[Term]:
        with torch.enable_grad(), self.precision.forward():
            result = as_loss(self.loss(self.model, micro))
        found = Form.of(result, self.single)
        self.units = found.units
        self.extras = tuple(extras_of(result).values())
        if self.sizes is not None:
            found = replace(found, units=tuple(map(self.sizes.value, found.units)))
        if found != self.form:
            raise CannotTrace("its loss differs in form from one call to the next")
        for name, buffer in self.model.named_buffers():
            if buffer is not held[name]:
                raise CannotTrace(f"its forward assigns the buffer {name} anew")
        return list(_terms(result, self.single).values())

    def _backward(
        self, terms: Sequence[Term], leaves: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> list[Tensor]:
        self.drawn = _draws_so_far()
        totals = [term.total for term in terms]
        gradients = torch.autograd.grad(totals, leaves, seeds, allow_unused=True)
        self.draws_again = _draws_so_far() != self.drawn
        self.used = tuple(i for i, g in enumerate(gradients) if g is not None)
        return [
            *(total.detach() for total in totals),
            *(term.units.detach() for term in terms if isinstance(term.units, Tensor)),
            # A copy: a fused kernel may overwrite the logits.
            *(extra.detach().clone() for extra in self.extras),
            *(gradient for gradient in gradients if gradient is not None),
        ]


def trace(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    precision: Precision,
    state: State,
    inputs: Inputs,
    form: Form,
    single: str,
    sizes: Sizes | None = None,
) -> Traced:
    """Return the graph of one micro-step on micro-batches like `inputs`, with a loss of this form.

    With `sizes` it is valid for all shapes for which the model's Python takes the same path.
    """
    refuse_hooks(model)
    step = _MicroStep(model, loss, precision, state, inputs, form, single, sizes)
    device = next(iter(state.trained.values())).device
    tensors = [
        *(parameter.detach() for parameter in state.trained.values()),
        *state.others.values(),
    ]
    seeds = [torch.ones((), dtype=dtype, device=device) for dtype in form.dtypes]
    if sizes is None:
        graph = _written_down(step, [*tensors, *inputs.tensors, *seeds])
    else:
        sizes.flat = [*map(sizes.fake, tensors), *sizes.tensors, *map(sizes.fake, seeds)]
        with _symbolic_lengths():
            graph = _written_down(step, sizes.flat)
        if not sizes.any_open:
            raise CannotTrace("its code asks for the sizes themselves")
    if step.draws_again:
        raise CannotTrace(
            "its backward draws random numbers (activation checkpointing with dropout), which "
            "would not be those of the forward"
        )
    return Traced(graph, form, step.used, step.drawn > 0, sizes, step.units)


def _written_down(step: _MicroStep, flat: list[Tensor]) -> fx.GraphModule:
    """Run the step on fake tensors, and return the graph of its operations."""
    # These modules are slow to import: paid only when tracing.
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with only_reads(step.model, step.loss), enable_python_dispatcher(), torch.no_grad():
            graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
    except (CannotTrace, torch.OutOfMemoryError):
        raise
    # A model's own code may raise anything when it meets fake tensors.
    except Exception as problem:
        raise CannotTrace(reason_of(problem)) from problem
    finally:
        torch.clear_autocast_cache()  # The cache may hold fake casts.
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, str(node.target), None)
        if isinstance(constant, Tensor) and constant.requires_grad:
            raise CannotTrace("its loss uses a parameter that is not in the model")
    return graph


@contextmanager
def _symbolic_lengths() -> Iterator[None]:
    """Let `len(tensor)` return a symbol within this context; Python's own would specialise it."""

    def length(of: Any, /) -> Any:
        if isinstance(of, Tensor) and of.dim() and isinstance(of.shape[0], torch.SymInt):
            return of.shape[0]
        return _LEN(of)

    with _ONE_AT_A_TIME:
        builtins.len = length
        try:
            yield
        finally:
            builtins.len = _LEN


def totals_of(loss: Loss | Terms) -> list[Tensor]:
    """Return the total of each term of a loss."""
    return [term.total for term in _terms(loss, "").values()]


def extras_of(loss: Loss | Terms) -> Mapping[str, Tensor]:
    """Return the tensors that a loss hands back beside its total."""
    return loss.extras if isinstance(loss, Loss) else {}


def _terms(loss: Loss | Terms, single: str) -> dict[str, Term]:
    if isinstance(loss, Loss):
        return {single: Term(loss.total, loss.units)}
    return dict(loss.by_name)


def _draws_so_far() -> int:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return sum(_draws(node) for node in mode.tracer.graph.nodes)


def _draws(node: fx.Node) -> bool:
    """True if this operation draws from a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":  # Attention draws only with dropout.
            given = node.args[position] if position < len(node.args) else None
            return bool(node.kwargs.get("dropout_p", given if given is not None else 0.0))
    return True
