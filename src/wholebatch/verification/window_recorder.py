"""Record the windows of a running training loop: its backwards, clips and optimizer steps.

Nothing of the loop is changed. The recorder uses torch's public hooks, and six functions that are
replaced while it is open (`_REPLACED`). Whatever fails in it is kept in `failure`, and the loop
goes on. Of a large model every n-th number of a gradient is kept.

Windows of wholebatch itself (Accumulator, WholeBatch, adapters) are read from their ledger.
"""

from __future__ import annotations

import logging
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from wholebatch.batch.samples import tensors_of
from wholebatch.coupled.normalisation_layers import batchnorms, uses_batch_statistics
from wholebatch.verification.loss_terms import (
    LossTerm,
    compares_samples,
    has_normalised_factor,
    nodes_until,
    picks_among,
    terms_of,
)
from wholebatch.window import window as ledger

_log = logging.getLogger("wholebatch")

_REPLACED = {
    "_backward": (torch.autograd, "backward"),
    "_clip": (torch.nn.utils, "clip_grads_with_norm_"),  # clip_grad_norm_ calls it too
    "_clip_by_value": (torch.nn.utils, "clip_grad_value_"),
    "_scale": (torch.amp.GradScaler, "scale"),
    "_scaled_step": (torch.amp.GradScaler, "step"),
    "_iterate": (DataLoader, "__iter__"),
}
"""The functions that are replaced while a recorder is open: owner and name, by the method."""

_NUMBERS = 1 << 13
"""Numbers kept of a gradient; at least one of each parameter."""
_MOST_FULL = 12
"""Windows recorded in full while an optimizer has not had its turn."""
_MOST_WINDOWS = 8
"""Windows kept of one optimizer, and one of each further size."""
_MOST_NODES, _MOST_GRAPH, _MOST_PENDING = 1 << 15, 1 << 8, 1 << 9
_TRAINERS = {
    "trl": "TRL",
    "transformers": "HF Trainer",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
}
"""Packages that drive a loop, the outermost first."""


@dataclass(eq=False)
class RecordedBackward:
    """One backward of the loop, with the gradients before and after it."""

    number: int
    before: Tensor
    after: Tensor
    contribution: Tensor
    """The gradient that this backward brought."""
    terms: list[LossTerm] = field(default_factory=list)
    loss_scale: float = 1.0
    rates: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Learning rates and weight decays of each optimizer that is known."""
    moved: frozenset[int] = frozenset()
    """Parameters that have changed since the backward before."""
    moved_state: str = ""
    """A buffer (but for a BatchNorm's) or untrained weight of a called module that has changed
    since the backward before."""
    calls: frozenset[tuple[int, int]] = frozenset()
    """The calls that its loss was made of: a number of each, and of its module."""
    has_sample_calls: bool = False
    """True if every call of the model is a sample, with a term of the loss of its own."""
    is_passed_on: bool = False
    """True if a model was given the output of another one: a GAN's generator loss."""
    is_repeated: bool = False
    """True if there was a backward of the same loss before."""
    is_called_without_gradients: bool = False
    """True if its model was also called without gradients, in training mode, since the last one."""
    compares: bool = False
    """True if the loss compares samples with each other."""
    picks: bool = False
    """True if the loss sorts its samples, or picks the largest of them."""
    has_normalised_factor: bool = False
    """True if factors of its samples may be normalised over the micro-batch: advantages."""
    batchnorms: tuple[str, ...] = ()
    graph: tuple[str, ...] = ()
    """The names of the nodes between the loss and the model."""
    waits_for: frozenset[int] = frozenset()
    """Parameters that it brought a gradient, and that no optimizer has stepped on since."""
    is_stepped: bool = False
    """True if an optimizer has stepped on a gradient of it."""

    @property
    def signature(self) -> tuple[tuple[str, str, int], ...]:
        """Return how its loss is made: backwards of another purpose differ in it."""
        return tuple((t.node, t.kind, len(t.over)) for t in self.terms)


@dataclass(frozen=True)
class RecordedClip:
    """One call that clips: after which backward, its limit, and the gradient before and after."""

    number: int
    limit: float
    before: Tensor
    after: Tensor

    @property
    def cuts(self) -> bool:
        """True if the gradient was changed."""
        return not torch.equal(self.before, self.after)


@dataclass(eq=False)
class RecordedWindow:
    """The backwards between two steps of one optimizer, and the gradient of the step."""

    number: int
    optimizer: int
    names: list[str]
    sizes: list[int]
    """How many numbers are kept of each parameter."""
    eps: float
    is_half: bool
    """True if the gradients are kept in 16 bits."""
    backwards: list[RecordedBackward] = field(default_factory=list)
    clips: list[RecordedClip] = field(default_factory=list)
    gradient: Tensor | None = None
    """The gradient of the step; None if it was not seen."""
    indices: tuple[int, ...] = ()
    """The parameters that the optimizer steps on."""
    is_full: bool = True
    is_hooked: bool = False
    """True if the loop has hooks of its own on parameters, which may change gradients."""
    is_resumed: bool = False
    """True if the optimizer had a state before the first step."""
    moved_state: str = ""
    """The name of a tensor, other than a trained weight, that changed between two backwards."""
    has_no_rate: bool = False
    """True if every learning rate is 0, and this is not the first step."""
    moved_after_step: bool = False
    """True if the weights went on, or back, along the step before, before the first backward."""
    ledger_units: tuple[float, ...] = ()
    """The units of each micro-batch, in a window of wholebatch."""
    schedule_moved: bool = False
    """True if the learning rate changed within a window of wholebatch."""


@dataclass(eq=False)
class _Call:
    """One outermost call of a model."""

    number: int
    module: nn.Module
    given: list[Tensor]


@dataclass(eq=False)
class _Loader:
    """A DataLoader that the loop iterates over, and how many batches it has given."""

    loader: Any
    iterator: Any
    yielded: int = 0
    trains: bool = False
    ended: bool = False

    @property
    def is_at_end(self) -> bool:
        try:
            return bool(self.iterator._num_yielded >= len(self.loader))
        except (AttributeError, TypeError):  # a loader of unknown length
            return False


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _never_fails(method: _Method) -> _Method:
    """Return a method that keeps its error: a recorder never ends somebody's training."""

    @wraps(method)
    def kept(self: WindowRecorder, *args: Any, **kwargs: Any) -> Any:
        if self.failure:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            _log.debug("the watch has failed", exc_info=True)
            self.failure = f"the watch failed: {type(error).__name__}: {error}"
            return None

    return cast(_Method, kept)


class WindowRecorder:
    """Records the windows of every optimizer; `over` is raised by the backwards to come, if set.

    Without a model, the modules that the loop calls are taken.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.optimizer, self._stepped = model, optimizer, stepped
        self.over: BaseException | None = None
        self.failure = ""
        self.trainer = "plain torch"
        self.windows: list[RecordedWindow] = []
        self.window_counts: Counter[int] = Counter()
        """How many windows each optimizer has made."""
        self.optimizer_names: dict[int, str] = {}
        self.parameters: list[nn.Parameter] = []
        self.pending: list[RecordedBackward] = []
        """Backwards that are in no step yet."""
        self.autocast: set[torch.dtype] = set()
        self.skipped_steps = self.lost_steps = 0
        """Steps that a loss scaler has skipped, and steps without a backward."""
        self.stepped_twice = self.stepped_inside = self.steps_on_copies = False
        self.is_sharded = self.is_light = self.loader_restarted = False
        self.after_step: Tensor | None = None
        """The weights after the last step."""
        self._known: dict[int, torch.optim.Optimizer] = {}
        self._had_state: list[bool] = []
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._index: dict[int, int] = {}
        self._hooks: dict[int, Any] = {}
        self._is_hooked = False
        self._last_step: dict[int, int] = {}
        self._last_stepper: Any = None
        self._stepped_on: set[int] = set()
        self._had_gradient: set[int] = set()
        self._clips: list[RecordedClip] = []
        self._parts: dict[int, Tensor] = {}
        self._calls: list[_Call] = []
        self._nodes: dict[Any, _Call] = {}
        self._losses: set[Any] = set()
        self._outputs: list[Tensor] = []
        self._inner_outputs: list[Tensor] = []
        self._loss_compares = False
        self._no_grad_calls: set[int] = set()
        self._called: dict[int, nn.Module] = {}  # outermost modules, with gradients or without
        self._state: dict[tuple[int, str], Tensor] = {}
        self._weights = torch.zeros(0)
        self._moved_after = False
        self._number = self._depth = self._outer_depth = self._step_depth = 0
        self._inside = False  # a backward, or a closure that is evaluated again
        self._loss_scale = 1.0
        self._own_window: Any = None
        self._own_rates: dict[int, tuple[float, ...]] = {}
        self._own_parameters: set[int] = set()
        self._loaders: list[_Loader] = []
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._own = None if model is None else set(map(id, model.modules()))
        self._eager = ExitStack()
        self._forward_hooks = ExitStack()
        self._undo = ExitStack()

    # ------------------------------------------------------------- open and close

    def __enter__(self) -> WindowRecorder:
        if hasattr(torch.compiler, "set_stance"):  # compiled code hides how a loss is made
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        for forward_hook in (
            register_module_forward_pre_hook(self._enter_call),
            register_module_forward_hook(self._leave_call, always_call=True),
        ):
            self._forward_hooks.callback(forward_hook.remove)
        for stack in (self._eager, self._forward_hooks):
            self._undo.callback(stack.close)
        self._undo.callback(self._leave_parameters)
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        for method, (owner, function) in _REPLACED.items():
            self._replace(owner, function, getattr(self, method))
        ledger.observers.append(self)
        self._undo.callback(ledger.observers.remove, self)
        if self.model is not None:
            self._adopt(self.model)
        if self.optimizer is not None:
            self._know(self.optimizer)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function, also in modules that imported it, by its name or a private one."""
        original = getattr(owner, name)

        @wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        places = [(owner, name)]
        if not isinstance(owner, type):
            modules = [m for m in sys.modules.values() if hasattr(m, "__dict__")]
            names = (name, f"_{name}")
            places = [(m, n) for m in modules for n in names if vars(m).get(n) is original]
        for place, known_as in places:
            setattr(place, known_as, replaced)
            self._undo.callback(partial(setattr, place, known_as, original))

    def _leave_parameters(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _go_lightly(self) -> None:
        """Watch no forwards of the windows to come."""
        self.is_light = True
        self._eager.close()
        self._forward_hooks.close()
        self._leave_parameters()
        for kept in (self._calls, self._nodes, self._losses, self._outputs, self.pending):
            kept.clear()

    # ------------------------------------------------------------- parameters and gradients

    def _adopt(self, model: nn.Module) -> None:
        """Watch the parameters of a model from now on."""
        named = [(n, p) for n, p in model.named_parameters() if id(p) not in self._index]
        if not named:
            return
        names = {type(module).__name__ for module in model.modules()}
        self.is_sharded |= any(hasattr(p, "to_local") or not p.numel() for _, p in named)
        self.is_sharded |= any(name.startswith("FSDP") for name in names)
        if not self.parameters:
            self._stride = max(1, -(-sum(p.numel() for _, p in named) // _NUMBERS))
        for name, parameter in named:
            self._index[id(parameter)] = len(self.parameters)
            self.parameters.append(parameter)
            self._names.append(name)
            self._sizes.append(-(-parameter.numel() // self._stride))
        self._device = self.parameters[0].device.type

    def _hook_parameters(self) -> None:
        """Hook the parameters that need a gradient now: parts may be frozen in turn."""
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad and index not in self._hooks:
                # Hooks of the loop change the gradient before it is seen here.
                self._is_hooked |= bool(parameter._backward_hooks)
                self._hooks[index] = parameter.register_hook(partial(self._brings, index))

    def _brings(self, index: int, gradient: Tensor | None) -> None:
        if self._inside and gradient is not None:  # else somebody calls the hooks by hand
            part = self._part(gradient).clone()  # it may become .grad, and be added to
            held = self._parts.get(index)
            self._parts[index] = part if held is None else held + part

    @torch.no_grad()
    def _part(self, tensor: Tensor) -> Tensor:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        return dense.reshape(-1)[:: self._stride]

    def sample(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return whole tensors of the parameters as they are kept: every n-th number, float64."""
        return self._row([None if one is None else self._part(one) for one in tensors])

    def _row(self, parts: Sequence[Tensor | None]) -> Tensor:
        rows = [
            p.new_zeros(size) if part is None else part
            for part, p, size in zip(parts, self.parameters, self._sizes, strict=True)
        ]
        devices = {(row.device, row.dtype) for row in rows}
        if len(devices) == 1:  # one copy to the host
            return torch.cat([row.detach() for row in rows]).to("cpu", torch.float64)
        return torch.cat([row.detach().to("cpu", torch.float64) for row in rows])

    def _gradients(self) -> Tensor:
        return self.sample([parameter.grad for parameter in self.parameters])

    def _filled(self, row: Tensor) -> frozenset[int]:
        """Return the parameters whose part of a row is not zero."""
        parts = self._padded(row).split(self._sizes) if row.numel() else ()
        return frozenset(i for i, part in enumerate(parts) if bool(part.any()))

    def _padded(self, row: Tensor) -> Tensor:
        """Return a row with zeros for parameters that were adopted after it was recorded."""
        return torch.cat([row, row.new_zeros(sum(self._sizes) - row.numel())])

    def _selected(self, row: Tensor, indices: Sequence[int]) -> Tensor:
        parts = self._padded(row).split(self._sizes)
        return torch.cat([parts[i] for i in indices]) if indices else row[:0]

    # ------------------------------------------------------------- forwards

    def _is_ours(self, module: nn.Module) -> bool:
        if self._inside or isinstance(module, nn.parallel.DistributedDataParallel):
            return False
        return self._own is None or id(module) in self._own

    @_never_fails
    def _enter_call(self, module: nn.Module, args: Any) -> None:
        self._outer_depth += 1
        if self._is_ours(module):
            if torch.is_autocast_enabled(self._device):
                self.autocast.add(torch.get_autocast_dtype(self._device))
            self._depth += 1

    @_never_fails
    def _leave_call(self, module: nn.Module, args: Any, result: Any = None) -> None:
        self._outer_depth = max(0, self._outer_depth - 1)
        if not self._outer_depth and not self._inside:
            self._called[id(module)] = module
        if isinstance(module, nn.parallel.DistributedDataParallel):
            # It returns its model's outputs through a node of its own.
            self._outputs += [one for one in tensors_of(result) if one.grad_fn is not None]
        if not self._is_ours(module):
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 1 and not self.pending:
            self._inner_outputs += tensors_of(result)[:4]
        if self._depth or self._own_window is not None:
            return
        if not torch.is_grad_enabled():
            self._no_grad_calls |= {id(module)} if module.training else set()
        elif any(parameter.requires_grad for parameter in module.parameters()):
            self._keep_call(module, args, result)
        self._inner_outputs = []

    def _keep_call(self, module: nn.Module, args: Any, result: Any) -> None:
        tensors = [tensor for tensor in tensors_of(result) if tensor.grad_fn is not None]
        call = _Call(len(self._calls) + self._number * 4096, module, tensors_of(args))
        self._calls.append(call)
        self._nodes.update({tensor.grad_fn: call for tensor in tensors})
        self._outputs += tensors
        losses = [tensor for tensor in tensors if not tensor.dim()]
        if losses and self._inner_outputs and not self.pending:  # its parts have the samples
            self._loss_compares = self._compares_any(losses[0], self._inner_outputs[:8])

    def _reached(self, nodes: Sequence[Any]) -> list[_Call]:
        """Return the calls whose outputs these losses were made of."""
        found: dict[_Call, None] = {}
        waiting = list(nodes)
        seen = {None, *waiting}
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            if node in self._nodes:  # on through what the call was given, not through the model
                call = self._nodes[node]
                found[call] = None
                below = [tensor.grad_fn for tensor in call.given if tensor.grad_fn not in seen]
            else:
                below = [child for child, _ in node.next_functions if child not in seen]
            seen.update(below)
            waiting += below
        return list(found)

    # ------------------------------------------------------------- backwards

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.over is not None and not self._inside:
            raise self.over
        is_own = self._own_window is not None and self._own_window.open is not None
        if self._inside or is_own or self.failure or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        micro = self._before_backward(
            args[0] if args else kwargs.get("tensors"),
            args[1] if len(args) > 1 else kwargs.get("grad_tensors"),
        )
        self._parts.clear()
        self._inside = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._inside = False
        self._after_backward(micro)
        return result

    @_never_fails
    def _before_backward(self, roots: Any, seeds: Any) -> RecordedBackward | None:
        """Return the backward as it is before it runs."""
        if not self._number:
            self.trainer = _trainer_at_hand()
        self._note_batches()
        listed = [roots] if isinstance(roots, Tensor) else list(roots)
        listed = [root for root in listed if isinstance(root, Tensor) and root.grad_fn is not None]
        given = [seeds] * len(listed) if isinstance(seeds, Tensor | None) else list(seeds)
        calls = [] if self.is_light else self._reached([root.grad_fn for root in listed])
        if not self.is_light:
            for call in self._calls if self.model is None else ():
                self._adopt(call.module)
            self._hook_parameters()
        if self.is_sharded or not self.parameters:
            return None
        before, weights = self._gradients(), self.sample(self.parameters)
        micro = RecordedBackward(self._number, before, before, before)
        micro.terms = [t for r, s in zip(listed, given, strict=False) for t in terms_of(r, s)]
        micro.loss_scale, self._loss_scale = self._loss_scale, 1.0
        if not self._step_depth:  # in a closure, the rate is that of the step that has begun
            micro.rates = {n: _rates(one) for n, one in enumerate(self._known.values())}
        if self.pending:
            micro.moved = self._filled(
                weights - torch.cat([self._weights, weights])[: len(weights)]
            )
        elif self.after_step is not None:
            moved = weights[: len(self.after_step)] - self.after_step
            made = self.after_step - self._weights[: len(self.after_step)]
            size = float(made.norm() * moved.norm())
            self._moved_after |= size > 0 and abs(float(made @ moved)) > 0.999 * size
            self.after_step = None
        self._weights = weights
        if not self.is_light:
            self._note_graph(micro, listed, calls)
        return micro

    def _note_graph(
        self, micro: RecordedBackward, roots: Sequence[Tensor], calls: Sequence[_Call]
    ) -> None:
        """Note how the loss of a backward is made of the model's outputs, and what has changed."""
        nodes = [root.grad_fn for root in roots]
        micro.is_repeated = any(node in self._losses for node in nodes)
        self._losses.update(nodes)
        micro.calls = frozenset((call.number, id(call.module)) for call in calls)
        micro.is_passed_on = any(t.grad_fn is not None for call in calls for t in call.given)
        until = set(self._nodes)
        graph = [n for n in nodes_until(nodes, until, _MOST_GRAPH) if n not in until]
        micro.graph = tuple(node.name() for node in graph)
        micro.has_normalised_factor = any(map(has_normalised_factor, graph))
        micro.picks = any(map(picks_among, graph))
        modules = {id(call.module): call.module for call in (calls or self._calls)}.values()
        norms = [pair for module in modules for pair in batchnorms(module)]
        micro.batchnorms = tuple(n for n, m in norms if m.training and uses_batch_statistics(m))
        state = self._held_state()
        moved = [k[1] for k, was in self._state.items() if not state.get(k, was).equal(was)]
        micro.moved_state, self._state = moved[0] if moved and self.pending else "", state
        modules_of_loss = {module for _, module in micro.calls}
        micro.is_called_without_gradients = bool(self._no_grad_calls & modules_of_loss)
        self._no_grad_calls.clear()
        each = max(Counter(module for _, module in micro.calls).values(), default=1)
        made = Counter((term.node, term.kind) for term in micro.terms).values()
        micro.has_sample_calls = each > 1 and bool(made) and not any(n % each for n in made)
        found, self._loss_compares = self._loss_compares, False
        if not (micro.has_sample_calls or self.pending) and len(roots) == 1:
            micro.compares = found or self._compares_any(roots[0], self._outputs)

    @torch.no_grad()
    def _held_state(self) -> dict[tuple[int, str], Tensor]:
        """Return a few numbers of what called modules hold, but for trained weights."""
        found = {}
        for number, module in enumerate(self._called.values()):
            for name, part in module.named_modules():
                held: list[tuple[str, Tensor]] = [*part.named_parameters(recurse=False)]
                if not hasattr(part, "running_mean"):
                    held += part.named_buffers(recurse=False)
                for own, tensor in held:
                    is_trained = self._index.get(id(tensor)) in self._had_gradient
                    if tensor.is_floating_point() and not is_trained:
                        few = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 16)]
                        found[number, f"{name}.{own}".lstrip(".")] = few.cpu().clone()
        return found

    def _compares_any(self, loss: Tensor, outputs: Sequence[Tensor]) -> bool:
        """Ask a loss if it compares samples, of which it must have as many as the outputs."""
        terms = [t for t in terms_of(loss, None) if t.kind in ("mean", "sum", "unknown")]
        most = max((t.weighed or t.count for t in terms if t.kind != "unknown"), default=math.inf)
        rows = [one for one in outputs if one.dim() and len(one) <= most]
        is_inside, self._inside = self._inside, True
        try:
            return compares_samples(loss, rows)
        finally:
            self._inside = is_inside

    @_never_fails
    def _after_backward(self, micro: RecordedBackward | None) -> None:
        """Keep the backward, if it brought a watched parameter a gradient."""
        self._outputs.clear()
        if micro is None:
            return
        micro.after = self._gradients()
        micro.contribution = micro.after - micro.before
        if self._parts:
            micro.contribution = self._row([self._parts.get(i) for i in range(len(self._sizes))])
        micro.waits_for = self._filled(micro.contribution)
        if micro.waits_for:
            self._had_gradient |= micro.waits_for
            self._number += 1
            self.pending.append(micro)

    # ------------------------------------------------------------- clipping and scaling

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and "parameters" in kwargs:
            args = (kwargs.pop("parameters"),)
        if not args or self.failure or not self.pending:
            return original(*args, **kwargs)
        given, *rest = args
        given = given if isinstance(given, Tensor) else list(given)  # it may be a generator
        listed = [given] if isinstance(given, Tensor) else given
        ours = any(id(parameter) in self._index for parameter in listed)
        before = self._gradients() if ours else None
        result = original(given, *rest, **kwargs)
        if before is not None:
            limit = [*rest, kwargs.get("max_norm"), kwargs.get("clip_value")]
            self._keep_clip(next((one for one in limit if one is not None), 0.0), before)
        return result

    _clip_by_value = _clip

    @_never_fails
    def _keep_clip(self, limit: Any, before: Tensor) -> None:
        self._clips.append(RecordedClip(self._number, float(limit), before, self._gradients()))

    def _scale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        self._loss_scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        return scaled

    def _scaled_step(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        made = sum(self.window_counts.values())
        result = original(scaler, *args, **kwargs)
        if made == sum(self.window_counts.values()):  # its gradients were not finite
            self.skipped_steps += 1
            self.pending.clear()
        return result

    # ------------------------------------------------------------- the end of the data

    def _iterate(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        iterator = original(loader, *args, **kwargs)
        self._note_loader(loader, iterator)
        return iterator

    @_never_fails
    def _note_loader(self, loader: Any, iterator: Any) -> None:
        known = next((one for one in self._loaders if one.loader is loader), None)
        if known is None:
            self._loaders.append(_Loader(loader, iterator))
        else:
            self.loader_restarted |= known.trains
            known.ended |= known.trains
            known.iterator, known.yielded = iterator, 0

    def _note_batches(self) -> None:
        """Note which loader the batches of a window come from: not from one that evaluates."""
        counts = [getattr(one.iterator, "_num_yielded", 0) for one in self._loaders]
        used = [n for n, one in zip(counts, self._loaders, strict=True) if n > one.yielded]
        for count, one in zip(counts, self._loaders, strict=True):
            one.trains |= len(used) == 1 and count > one.yielded
            one.yielded = count
            one.ended |= one.trains and one.is_at_end

    @property
    def knows_loader(self) -> bool:
        """True if the loop takes its data from a DataLoader."""
        return any(one.trains for one in self._loaders)

    @property
    def loader_ended(self) -> bool:
        """True if the end of the data has come."""
        return any(one.ended or (one.trains and one.is_at_end) for one in self._loaders)

    # ------------------------------------------------------------- windows of wholebatch

    @_never_fails
    def window_began(self, window: Any) -> None:
        """Read a window of wholebatch from its ledger, and not from its backwards."""
        self._own_window = window
        self._own_rates = {id(one): _rates(one) for one in window.target.optimizers}
        self._own_parameters |= {id(p) for p in window.current.inputs}
        self.pending.clear()

    @_never_fails
    def window_closes(self, window: Any) -> None:
        """Record a window of wholebatch that is complete."""
        self._own_window = None
        units = [[float(one) for one in column] for column in window.current.units.values()]
        for optimizer in window.target.optimizers:
            kept = self._new_window(optimizer, [])
            kept.ledger_units = tuple(max(units, key=sum, default=[]))
            before = self._own_rates.get(id(optimizer))
            kept.schedule_moved = before is not None and before != _rates(optimizer)
            self._keep(kept)

    @property
    def open_ledger(self) -> int:
        """Return the micro-batches of a window of wholebatch that was not closed."""
        window = getattr(self._own_window, "open", None)
        return 0 if window is None else len(window.owners)

    # ------------------------------------------------------------- the step

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Record the step now, or after its closure has made the gradients."""
        self._step_depth += 1
        if self._step_depth > 1 or self._own_window is not None:  # of a wrapper
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._see(optimizer)
            return None
        evaluations = 0

        def observed() -> Any:
            nonlocal evaluations
            evaluations += 1
            self._inside = evaluations > 1  # LBFGS evaluates again, at weights of its own
            try:
                loss = closure()
            finally:
                self._inside = False
            if evaluations == 1:
                self._see(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    @_never_fails
    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        indices = sorted({self._index[id(p)] for p in owned if id(p) in self._index})
        self.is_sharded |= any(hasattr(p, "to_local") for p in owned)
        if self._inside:
            self.stepped_inside |= bool(indices)
        elif any(id(parameter) in self._own_parameters for parameter in owned):
            self._see_ledger(optimizer, indices)
        elif not indices:
            called = {id(p) for call in self._calls for p in call.module.parameters()}
            is_other = any(id(parameter) in called for parameter in owned)
            self.steps_on_copies |= bool(self.pending) and not is_other
        elif not self.is_sharded:
            self._keep(self._window(optimizer, indices))

    def _gradients_of(self, optimizer: torch.optim.Optimizer, indices: Sequence[int]) -> Tensor:
        """Return the gradient of a step; a fused optimizer divides by its scale itself."""
        scale = getattr(optimizer, "grad_scale", None)
        return self._selected(self._gradients(), indices) / (1.0 if scale is None else float(scale))

    def _see_ledger(self, optimizer: torch.optim.Optimizer, indices: Sequence[int]) -> None:
        """Keep the gradient of a window of wholebatch, which was recorded when it closed."""
        for window in self.windows[-1:]:
            is_its = window.optimizer == self._know(optimizer) and window.gradient is None
            if is_its and indices and not self.is_sharded:
                window.gradient = self._gradients_of(optimizer, indices)
                window.indices = tuple(indices)
                window.names = [self._names[i] for i in indices]
                window.sizes = [self._sizes[i] for i in indices]

    def _know(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer."""
        if id(optimizer) not in self._known:
            self.optimizer_names[len(self._known)] = type(optimizer).__name__
            self._known[id(optimizer)] = optimizer
            self._had_state.append(bool(optimizer.state))
        return list(self._known).index(id(optimizer))

    def _new_window(
        self, optimizer: torch.optim.Optimizer, indices: Sequence[int]
    ) -> RecordedWindow:
        which = self._know(optimizer)
        self.window_counts[which] += 1
        dtypes = {self.parameters[i].dtype.to_real() for i in indices} or {torch.float32}
        return RecordedWindow(
            number=self.window_counts[which],
            optimizer=which,
            names=[self._names[i] for i in indices],
            sizes=[self._sizes[i] for i in indices],
            eps=max(torch.finfo(dtype).eps / 2 for dtype in dtypes),
            is_half=bool(dtypes & {torch.float16, torch.bfloat16}),
            indices=tuple(indices),
            is_full=not self.is_light,
            is_hooked=self._is_hooked,
            is_resumed=self.window_counts[which] == 1 and self._had_state[which],
        )

    def _window(self, optimizer: torch.optim.Optimizer, indices: list[int]) -> RecordedWindow:
        """Return the window that this step ends."""
        window, own = self._new_window(optimizer, indices), frozenset(indices)
        since = self._last_step.get(window.optimizer, 0)
        self._last_step[window.optimizer] = self._number
        window.gradient = self._gradients_of(optimizer, indices)
        mine = [b for b in self.pending if b.number >= since]
        mine = [b for b in mine if self._filled(b.contribution) & own]
        stepped = frozenset().union(*(self._filled(b.contribution) - b.waits_for for b in mine))
        self.stepped_twice |= bool(stepped & own)
        window.backwards = [
            replace(
                micro,
                before=self._selected(micro.before, indices),
                after=self._selected(micro.after, indices),
                contribution=self._selected(micro.contribution, indices),
                moved=micro.moved & own,
            )
            for micro in mine
        ]
        window.clips = [
            replace(
                clip,
                number=sum(micro.number < clip.number for micro in mine),
                before=self._selected(clip.before, indices),
                after=self._selected(clip.after, indices),
            )
            for clip in self._clips
            if clip.number > since
        ]
        window.moved_state = next((micro.moved_state for micro in mine if micro.moved_state), "")
        rates = [group["lr"] for group in optimizer.param_groups]
        window.has_no_rate = window.number > 1 and not any(float(rate) for rate in rates)
        window.moved_after_step, self._moved_after = self._moved_after, False
        if not mine:
            self.lost_steps += 1
            is_again = bool(window.gradient.any()) and self._last_stepper not in (None, optimizer)
            self.stepped_twice |= is_again and bool(self._stepped_on & own)
        self._last_stepper = optimizer
        # A backward is kept until all optimizers whose parameters it reaches have stepped.
        self._stepped_on |= own
        for micro in self.pending:
            micro.is_stepped |= bool(micro.waits_for & own)
            micro.waits_for -= own
        kept = [micro for micro in self.pending if not micro.is_stepped or micro.waits_for]
        self.pending = kept[-_MOST_PENDING:]
        return window

    def _keep(self, window: RecordedWindow) -> None:
        """Keep a window: the first ones, those of another size, and the last one."""
        same = [one for one in self.windows if one.optimizer == window.optimizer]
        is_new = len(window.backwards) not in {len(one.backwards) for one in same}
        if len(same) >= _MOST_WINDOWS and not is_new:
            self.windows.remove(same[-1])
        self.windows.append(window)
        if not self.is_light and self._all_had_their_turn():
            self._go_lightly()
        for kept in (self._calls, self._nodes, self._losses):
            kept.clear()
        self._stepped()

    def _all_had_their_turn(self) -> bool:
        """True if all optimizers have stepped twice: a teacher may be a copy at first."""
        had = not self.unstepped and min(self.window_counts.values()) >= 2
        return had or sum(self.window_counts.values()) >= _MOST_FULL

    @_never_fails
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._step_depth = max(0, self._step_depth - 1)
        if not (self.is_sharded or self._step_depth) and self.parameters:
            self.after_step = self.sample(self.parameters)

    @property
    def unstepped(self) -> list[str]:
        """Return the parameters that had gradients and that no optimizer has stepped on."""
        return [self._names[i] for i in sorted(self._had_gradient - self._stepped_on)]


def _rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    groups, names = optimizer.param_groups, ("lr", "weight_decay")
    return tuple(float(group.get(name) or 0.0) for name in names for group in groups)


def _trainer_at_hand() -> str:
    """Return which library drives the loop, by the modules on the call stack."""
    frames = traceback.walk_stack(None)
    packages = {f.f_globals.get("__name__", "").partition(".")[0] for f, _ in frames}
    return next((name for key, name in _TRAINERS.items() if key in packages), "plain torch")
