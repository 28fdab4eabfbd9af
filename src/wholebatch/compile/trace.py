"""The trace of one micro-step: forward, loss and backward as one graph of operations.

The program that Dynamo has captured runs once on fake tensors, which compute nothing, and every
operation of the forward and of autograd's backward is recorded. Autocast, checkpointing, custom
autograd functions and tied weights all appear as operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from wholebatch.compile.capture import ONE_AT_A_TIME, Program
from wholebatch.compile.constant_values import draws
from wholebatch.compile.execute_mode import CannotTrace, reason_of
from wholebatch.compile.fusion import base_of, collection_paused, drop_unused, written_by
from wholebatch.compile.graph_inputs import Inputs, dense_strides, memory_order
from wholebatch.compile.host_constants import lift_host_constants
from wholebatch.compile.repeated_draws import RepeatedDraws
from wholebatch.compile.symbolic_sizes import Sizes
from wholebatch.compile.traced_attention import attention
from wholebatch.losses.loss import Loss, Term, Terms, terms_of
from wholebatch.window.precision import SIXTEEN_BIT


@dataclass(frozen=True)
class Form:
    """The form of a loss without its tensors: one entry for each term."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    dtypes: tuple[torch.dtype, ...]
    units: tuple[int | float | None, ...]
    """Units that are numbers; None for a tensor, which is an output of the graph."""
    extras: tuple[tuple[str, torch.dtype], ...] = ()
    """The tensors to hand back beside the loss, which are outputs too."""

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
            extras=tuple((name, extra.dtype) for name, extra in extras_of(loss).items()),
        )

    def read(self, totals: Sequence[Tensor], rest: Sequence[Tensor]) -> Added:
        """Return the outputs of a graph by name: its totals, and its units and extras."""
        outputs = iter(rest)
        units = [next(outputs) if number is None else number for number in self.units]
        terms = map(Term, totals, units, self.weights)
        return Added(
            terms=dict(zip(self.names, terms, strict=True)),
            extras=dict(zip(dict(self.extras), outputs, strict=True)),
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
class Traced:
    """The graph: (trained, others, the micro-batch's tensors, seeds) -> (totals, units, gradients).

    Units are outputs only if they are tensors. The gradients are those of the parameters in `used`.
    """

    graph: fx.GraphModule
    form: Form
    used: tuple[int, ...]
    trained: tuple[nn.Parameter, ...]
    others: tuple[Tensor, ...]
    """The other tensors that the graph reads; they are read when it runs."""
    random: bool
    draws_in_attention: bool = False
    sizes: Sizes | None = None
    """The symbols of the graph, if it is valid for more than one shape."""
    units: tuple[Any, ...] = ()
    """The units of the form, before symbols were replaced with numbers."""
    sources: tuple[Tensor, ...] = ()
    """Tensors from outside whose values the graph contains."""
    mode: Any = None
    """The fake tensor mode of its values."""

    @property
    def sixteen_bit(self) -> bool:
        """True if a part of the graph computes in 16 bit."""
        values = (node.meta.get("val") for node in self.graph.graph.nodes)
        return any(getattr(value, "dtype", None) in SIXTEEN_BIT for value in values)

    def form_for(self, inputs: Inputs) -> Form:
        """Return the form of the loss for a micro-batch."""
        if self.sizes is None:
            return self.form
        units = tuple(self.sizes.value(number, inputs) for number in self.units)
        return replace(self.form, units=units)


@dataclass
class _MicroStep:
    """The function to trace: forward, loss and backward of one micro-batch on flat tensors."""

    program: Program
    as_read: Callable[[], AbstractContextManager[object]]
    trained: Sequence[nn.Parameter]
    others: Sequence[Tensor]
    batch: int
    """The number of tensors of a micro-batch."""
    used: tuple[int, ...] = ()
    """The parameters that got a gradient."""
    form: Form | None = None
    repeated: RepeatedDraws = field(default_factory=RepeatedDraws)

    def __call__(self, *flat: Any) -> list[Tensor]:
        sizes = len(self.program.sizes)
        lengths = sizes, len(self.trained), len(self.others), self.batch
        ends = list(accumulate(lengths))
        symbols = dict(zip(self.program.sizes, flat[:sizes], strict=True))
        leaves = [tensor.detach().requires_grad_() for tensor in flat[ends[0] : ends[1]]]
        held = {id(t): leaf for t, leaf in zip(self.trained, leaves, strict=True)}
        held |= {id(t): o for t, o in zip(self.others, flat[ends[1] : ends[2]], strict=True)}
        micro, seeds = flat[ends[2] : ends[3]], flat[ends[3] :]
        inputs = []
        for kind, value in self.program.inputs:
            if kind == "tensor":
                inputs.append(held.get(id(value), value))
            elif kind == "batch":
                inputs.append(micro[value])
            else:
                inputs.append(symbols[value] if kind == "size" else value)
        with torch.enable_grad(), self.as_read():
            totals, units, extras = self.program.graph(*inputs)
        names = self.program.names, self.program.weights
        dtypes = tuple(total.dtype for total in totals)
        numbers = tuple(None if isinstance(u, Tensor) else u for u in units)
        kinds = (extra.dtype for extra in extras)
        handed_back = tuple(zip(self.program.extras, kinds, strict=True))
        self.form = Form(*names, dtypes, numbers, handed_back)
        gradients = torch.autograd.grad(totals, leaves, seeds, allow_unused=True)
        self.used = tuple(i for i, g in enumerate(gradients) if g is not None)
        return [
            *(total.detach() for total in totals),
            *(number.detach() for number in units if isinstance(number, Tensor)),
            # A copy: a fused kernel may overwrite the logits.
            *(extra.detach().clone() for extra in extras),
            *(gradient for gradient in gradients if gradient is not None),
        ]


class _EveryOperation(TorchDispatchMode):
    """Sees every operation that runs on fake tensors."""

    def __init__(self, repeated: RepeatedDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._repeated = repeated

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing compiles within it, and to say so takes time at every operation.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # Two of three calls: autograd asks for the device of every tensor.
        kwargs = kwargs or {}
        answer = self._repeated.answer(func, args, kwargs)
        return func(*args, **kwargs) if answer is NotImplemented else answer


_DEVICE = torch.ops.prim.device.default


def trace(
    program: Program,
    as_read: Callable[[], AbstractContextManager[object]],
    model: nn.Module,
    trained: Sequence[nn.Parameter],
    inputs: Inputs,
) -> Traced:
    """Return the graph of one micro-step on micro-batches like `inputs`.

    The forward runs within `as_read`, the state in which the program was captured. The graph is
    differentiated by the parameters `trained`, and may write into the model's buffers alone.
    """
    known = set(map(id, trained))
    own = set(map(id, model.parameters()))
    device = trained[0].device
    outside = [t for t in program.tensors() if id(t) not in known]
    # What lies on the host beside a model on a device becomes a constant of the graph.
    others = [tensor for tensor in outside if tensor.device == device]
    for tensor in others:
        if type(tensor) is not Tensor and not _holds_its_numbers(tensor):
            raise CannotTrace(f"it reads a {type(tensor).__name__}")
        if tensor.requires_grad and id(tensor) not in own:
            raise CannotTrace("its loss uses a parameter that is not in the model")
    step = _MicroStep(program, as_read, trained, others, len(inputs.tensors))
    sizes = Sizes.of(program) if program.sizes else None
    fake = partial(program.mode.from_tensor, static_shapes=True)
    tensors = [fake(tensor.detach().as_subclass(Tensor)) for tensor in (*trained, *others)]
    micro = [_fake_input(program, at, tensor) for at, tensor in enumerate(inputs.tensors)]
    _put_ours(program.graph, step)
    seeds = [fake(torch.ones((), dtype=dtype, device=device)) for dtype in _dtypes(program)]
    graph = _written_down(step, [*program.sizes.values(), *tensors, *micro, *seeds])
    if sizes is not None and not sizes.any_open:
        raise CannotTrace("its code reads the sizes as numbers")
    names: dict[int, str | None] = {**dict.fromkeys(map(id, trained), "a parameter")}
    names.update(program.outside)
    names.update(dict.fromkeys(map(id, model.buffers())))  # These it may change.
    named = [names.get(id(tensor), "an array") for tensor in (*trained, *others)]
    _refuse_writes(graph, [*[None] * len(program.sizes), *named, *["the micro-batch"] * len(micro)])
    if device.type != "cpu":
        lift_host_constants(graph, device)
    drawing = [node for node in graph.graph.nodes if draws(node.target, node.args, node.kwargs)]
    assert step.form is not None
    units, form = step.form.units, step.form
    if sizes is None and any(isinstance(u, (torch.SymInt, torch.SymFloat)) for u in units):
        raise CannotTrace("its units depend on the values of a tensor: give them as a tensor")
    if sizes is not None:
        form = replace(form, units=tuple(sizes.value(number, inputs) for number in units))
    return Traced(
        graph,
        form,
        step.used,
        tuple(trained),
        tuple(others),
        bool(drawing),
        any("attention" in str(node.target) for node in drawing),
        sizes,
        units,
        tuple(t for t in outside if t.device != device),
        program.mode,
    )


def _holds_its_numbers(tensor: Tensor) -> bool:
    """True for a tensor whose numbers are its own: it is no wrapper around other tensors."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _fake_input(program: Program, index: int, tensor: Tensor) -> Tensor:
    """Return a fake tensor of the micro-batch, with the capture's symbols, without gaps."""
    captured = program.batch.get(index)
    shape = tensor.shape if captured is None else captured.shape
    strides = dense_strides(shape, memory_order(tensor))
    with program.mode:
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


def _dtypes(program: Program) -> list[torch.dtype]:
    """Return the dtypes of the totals."""
    outputs: Any = program.graph.graph.output_node().args[0]
    return [total.meta["example_value"].dtype for total in outputs[0]]


def _put_ours(graph: fx.GraphModule, step: _MicroStep) -> None:
    """Put our own functions into Dynamo's graph where make_fx needs them.

    - Attention knows a mask that is always causal, and gets others in rows.
    - A checkpointed body is recomputed in the backward, with the same random numbers.
    """
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    ours: dict[Any, Callable[..., Any]] = {
        functional.scaled_dot_product_attention: attention,
        tag_activation_checkpoint: partial(_checkpointed, step.repeated),
    }
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function" and node.target in ours:
                    target = ours[node.target]
                    node.target = _Named(target)
            module.recompile()


class _Named:
    """A function with a name, as the code of a graph needs it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", "function")
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _checkpointed(
    repeated: RepeatedDraws,
    body: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    run = repeated.drawing_again(body)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def _refuse_writes(graph: fx.GraphModule, names: Sequence[str | None]) -> None:
    """Raise CannotTrace for a write into an input that has a name here.

    A graph runs more often than the code: to be compared, and to be recorded.
    """
    places = graph.graph.find_nodes(op="placeholder")
    known = dict(zip(places, names, strict=False))
    for node in graph.graph.nodes:
        for name in (known.get(base_of(target)) for target in written_by(node)):
            if name is not None:
                raise CannotTrace(f"it changes {name}, which a graph would do only once")


@collection_paused()
def _written_down(step: _MicroStep, flat: list[Any]) -> fx.GraphModule:
    """Run the step on fake tensors, and return the graph of its operations."""
    # These modules are slow to import: paid only when tracing.
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    def watched(*flat: Any) -> list[Tensor]:
        with _EveryOperation(step.repeated):
            return step(*flat)

    try:
        with ONE_AT_A_TIME, enable_python_dispatcher(), torch.no_grad():
            graph = make_fx(
                watched,
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*flat)
    except (CannotTrace, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # Operations of the user may raise anything on fake tensors.
        raise CannotTrace(reason_of(problem)) from problem
    finally:
        torch.clear_autocast_cache()  # The cache may hold fake casts.
    drop_unused(graph.graph)
    return graph


def extras_of(loss: Loss | Terms) -> Mapping[str, Tensor]:
    """Return the tensors that a loss hands back beside its total."""
    return loss.extras if isinstance(loss, Loss) else {}
