"""The trace of one micro-step: forward, loss and backward of `loss(model, micro)` as one graph.

The model's Python runs once on fake tensors, which compute nothing, and every operation of the
forward and of autograd's backward is recorded. The model need not be rewritten or analysed:
autocast, checkpointing, custom autograd functions and tied weights all appear as operations.
`CannotTrace` gives the reason for what cannot be recorded (a branch on a tensor's value) and what
must not be (a side effect in Python).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.compile.execute_mode import CannotTrace, reason_of
from wholebatch.compile.fusion import collection_paused
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.compile.host_constants import lift_host_constants
from wholebatch.compile.patched_calls import traceable_calls
from wholebatch.compile.refused_code import only_our_draws
from wholebatch.compile.repeated_draws import RepeatedDraws
from wholebatch.compile.symbolic_sizes import Sizes
from wholebatch.compile.value_reads import ValueReads, draws
from wholebatch.losses.loss import Loss, Term, Terms, as_loss, terms_of
from wholebatch.window.autocast import Precision
from wholebatch.window.precision import SIXTEEN_BIT

_READS = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
)
"""Errors of torch for a decision by a value, or for a shape that depends on one."""
_TORCH, _HERE = (str(Path(file).parent) for file in (torch.__file__, __file__))


@dataclass(frozen=True)
class Form:
    """The form of a loss without its tensors: one entry for each term."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    dtypes: tuple[torch.dtype, ...]
    units: tuple[int | float | None, ...]
    """Units that are numbers; None for a tensor, which is an output of the graph."""
    extras: tuple[str, ...] = ()
    """The names of the tensors to hand back beside the loss, which are outputs too."""

    @staticmethod
    def of(loss: Loss | Terms) -> Form:
        """Return the form of this loss."""
        terms = terms_of(loss)
        return Form(
            names=tuple(terms),
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
        units = [next(outputs) if number is None else number for number in self.units]
        terms = map(Term, totals, units, self.weights)
        return Added(
            terms=dict(zip(self.names, terms, strict=True)),
            extras=dict(zip(self.extras, outputs, strict=True)),
        )


@dataclass(frozen=True)
class Added:
    """The outcome of a micro-step whose gradients are added: numbers by term, and extras."""

    terms: Mapping[str, Term]
    extras: Mapping[str, Tensor]

    @property
    def comparable(self) -> list[Tensor]:
        """The totals, and the extras that are no whole numbers, such as predicted classes."""
        extras = (extra for extra in self.extras.values() if extra.is_floating_point())
        return [*(term.total for term in self.terms.values()), *extras]

    @staticmethod
    def of(loss: Loss | Terms) -> Added:
        """Return the outcome of a micro-step that eager code has made."""
        return Added(
            terms={
                name: term._replace(total=term.total.detach())
                for name, term in terms_of(loss).items()
            },
            extras={name: extra.detach() for name, extra in extras_of(loss).items()},
        )


@dataclass(frozen=True)
class State:
    """The present tensors of a model by name; tied tensors appear once."""

    trained: dict[str, nn.Parameter]
    others: dict[str, Tensor]
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The Python attributes of frozen parameters of a class of their own (4-bit weights)."""

    @staticmethod
    def of(model: nn.Module, inputs: Sequence[nn.Parameter]) -> State:
        """Split the model's tensors into those to differentiate by (`inputs`) and the rest."""
        wanted = {id(parameter) for parameter in inputs}
        trained, others, attributes = {}, {}, {}
        for name, parameter in model.named_parameters():
            is_wanted, is_plain = id(parameter) in wanted, type(parameter) is nn.Parameter
            if not is_plain and (is_wanted or not _holds_its_numbers(parameter)):
                raise CannotTrace(f"{name} is a {type(parameter).__name__}")
            if is_wanted:
                trained[name] = parameter
            else:
                others[name] = parameter.detach().as_subclass(Tensor)
            if not is_plain:
                attributes[name] = vars(parameter)
        for name, buffer in model.named_buffers():
            others[name] = buffer
        if len(trained) != len(wanted):
            raise CannotTrace("the optimizer has parameters that are not in the model")
        if len({p.device for p in trained.values()} | {t.device for t in others.values()}) > 1:
            raise CannotTrace("the model is on more than one device")
        return State(trained, others, attributes)


def _holds_its_numbers(tensor: Tensor) -> bool:
    """True for a tensor whose numbers are its own: it is no wrapper around other tensors."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


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
    sources: tuple[Tensor, ...] = ()
    """Tensors from outside whose values the graph contains."""
    any_source: bool = False
    """True if it contains values of tensors from outside, and nobody knows of which."""

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


class _Within(nn.Module):
    """Calls a function while functional_call has swapped the model's tensors.

    The backward must run inside too: checkpointing recomputes the forward there.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], list[Tensor]]) -> list[Tensor]:
        return function()


@dataclass
class _MicroStep:
    """The function to trace: forward, loss and backward of one micro-batch on flat tensors."""

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    precision: Precision
    state: State
    inputs: Inputs
    form: Form
    sizes: Sizes | None
    used: tuple[int, ...] = ()
    """The parameters that got a gradient."""
    units: tuple[Any, ...] = ()
    """The units of the loss; they may be symbols."""
    extras: tuple[Tensor, ...] = ()
    """The tensors to hand back beside the loss."""
    draws_again: bool = False
    """True if the backward draws random numbers of its own."""
    reads: ValueReads = field(default_factory=ValueReads)
    repeated: RepeatedDraws = field(default_factory=RepeatedDraws)

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        lengths = len(self.state.trained), len(self.state.others), len(self.inputs.tensors)
        first, second, third = accumulate(lengths)
        leaves = [tensor.detach().requires_grad_() for tensor in flat[:first]]
        held = dict(zip(self.state.others, flat[first:second], strict=True))
        for name, attributes in self.state.attributes.items():
            vars(held[name]).update(attributes)
        micro, seeds = flat[second:third], flat[third:]

        def run() -> list[Tensor]:
            terms = self._forward(self.inputs.around(micro), held)
            return self._backward(terms, leaves, seeds)

        tensors = dict(zip(self.state.trained, leaves, strict=True)) | held
        named = {f"model.{place}": tensors[name] for place, name in _places(self.model)}
        with traceable_calls(self.reads.sources), self.repeated.as_generator():
            gradients: list[Tensor] = torch.func.functional_call(
                _Within(self.model), named, (run,), tie_weights=False
            )
        return gradients

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the trace records in place of this operation, or NotImplemented."""
        answer = self.repeated.answer(func, args, kwargs)
        return self.reads.answer(func, args) if answer is NotImplemented else answer

    def _forward(self, micro: Any, held: dict[str, Tensor]) -> list[Term]:
        with torch.enable_grad(), self.precision.forward():
            result = as_loss(self.loss(self.model, micro))
        form = Form.of(result)
        self.units = form.units
        self.extras = tuple(extras_of(result).values())
        if self.sizes is not None:
            form = replace(form, units=tuple(map(self.sizes.value, form.units)))
        if form != self.form:
            raise CannotTrace("its loss differs in form from one call to the next")
        for name, buffer in self.model.named_buffers():
            if buffer is not held[name]:
                raise CannotTrace(f"its forward assigns the buffer {name} anew")
        return list(terms_of(result).values())

    def _backward(
        self, terms: Sequence[Term], leaves: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> list[Tensor]:
        drawn = self.repeated.number
        totals = [term.total for term in terms]
        gradients = torch.autograd.grad(totals, leaves, seeds, allow_unused=True)
        self.draws_again = self.repeated.number != drawn
        self.used = tuple(i for i, g in enumerate(gradients) if g is not None)
        return [
            *(total.detach() for total in totals),
            *(term.units.detach() for term in terms if isinstance(term.units, Tensor)),
            # A copy: a fused kernel may overwrite the logits.
            *(extra.detach().clone() for extra in self.extras),
            *(gradient for gradient in gradients if gradient is not None),
        ]


class _EveryOperation(TorchDispatchMode):
    """Sees every operation that runs on fake tensors."""

    def __init__(self, step: _MicroStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing compiles within it, and to say so takes time at every operation.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # Two of three calls: autograd asks for the device of every tensor.
        kwargs = kwargs or {}
        answer = self._step.answer(func, args, kwargs)
        return func(*args, **kwargs) if answer is NotImplemented else answer


_DEVICE = torch.ops.prim.device.default


def _places(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield every place of a tensor in the model, and the first name of that tensor.

    A module that is registered twice counts once: `functional_call` with `tie_weights` would
    replace its tensors twice, and put the first replacement back.
    """
    names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                place = f"{prefix}.{name}".lstrip(".")
                yield place, names.setdefault(id(tensor), place)


def trace(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    precision: Precision,
    state: State,
    inputs: Inputs,
    form: Form,
    sizes: Sizes | None = None,
) -> Traced:
    """Return the graph of one micro-step on micro-batches like `inputs`, with a loss of this form.

    With `sizes` it is valid for all shapes for which the model's Python takes the same path.
    """
    step = _MicroStep(model, loss, precision, state, inputs, form, sizes)
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
        graph = _written_down(step, sizes.flat)
        if not sizes.any_open:
            raise CannotTrace("its code reads the sizes as numbers")
    if step.draws_again:
        raise CannotTrace(
            "its backward draws random numbers that are not those of the forward (activation "
            "checkpointing with preserve_rng_state=False)"
        )
    lifted = () if device.type == "cpu" else lift_host_constants(graph, device)
    sources = *step.reads.sources, *lifted
    random = any(draws(node.target, node.args, node.kwargs) for node in graph.graph.nodes)
    return Traced(graph, form, step.used, random, sizes, step.units, sources, step.reads.any_source)


@collection_paused()
def _written_down(step: _MicroStep, flat: list[Tensor]) -> fx.GraphModule:
    """Run the step on fake tensors, and return the graph of its operations."""
    # These modules are slow to import: paid only when tracing.
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    def watched(*flat: Tensor) -> list[Tensor]:
        with _EveryOperation(step):
            return step(*flat)

    try:
        with only_our_draws(step.model, step.loss), enable_python_dispatcher(), torch.no_grad():
            graph = make_fx(
                watched,
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
                _disable_torch_fn_metadata_mode=True,  # Nodes need not know their functions.
            )(*flat)
    except (CannotTrace, torch.OutOfMemoryError):
        raise
    # A model's own code may raise anything when it meets fake tensors.
    except Exception as problem:
        raise CannotTrace(_why_not(problem)) from problem
    finally:
        torch.clear_autocast_cache()  # The cache may hold fake casts.
    step.reads.drop_from(graph.graph)
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, str(node.target), None)
        if isinstance(constant, Tensor) and constant.requires_grad:
            raise CannotTrace("its loss uses a parameter that is not in the model")
    return graph


def _why_not(problem: Exception) -> str:
    """Return why the trace failed, with the line of the model's code if it reads a value."""
    if type(problem).__name__ not in _READS:
        return reason_of(problem)
    frames = [
        frame
        for frame in traceback.extract_tb(problem.__traceback__)
        if not frame.filename.startswith((_TORCH, _HERE))
    ]
    if not frames:
        return reason_of(problem)
    line = frames[-1]
    return (
        f"its code branches on the value of a tensor ({Path(line.filename).name}, line "
        f"{line.lineno}: {line.line})"
    )


def extras_of(loss: Loss | Terms) -> Mapping[str, Tensor]:
    """Return the tensors that a loss hands back beside its total."""
    return loss.extras if isinstance(loss, Loss) else {}
