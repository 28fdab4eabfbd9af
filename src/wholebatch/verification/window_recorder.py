"""Record the windows of a running training loop: its backwards, clips and optimizer steps.

Nothing of the loop is changed. The recorder uses torch's public hooks, and six functions that are
replaced while it is open (`_REPLACED`). Whatever fails in it is kept in `failure`, and the loop
goes on. Of a large model every n-th number of a gradient is kept.

Windows of wholebatch itself (Accumulator, WholeBatch, adapters) are read from their ledger.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from wholebatch.coupled.normalisation_layers import batchnorms, uses_batch_statistics
from wholebatch.verification.loss_terms import DDP_SINK, LossTerm, doubt_about, loss_graph, terms_of
from wholebatch.window import window as ledger

_log = logging.getLogger("wholebatch")

_REPLACED = {
    "_backward": (torch.autograd, "backward"),
    "_clip": (torch.nn.utils, "clip_grads_with_norm_"),  # clip_grad_norm_ calls it too
    "_clip_by_value": (torch.nn.utils, "clip_grad_value_"),
    "_scale": (torch.amp.GradScaler, "scale"),
    "_iterate": (DataLoader, "__iter__"),
    "_average": (AveragedModel, "update_parameters"),
}
"""The functions that are replaced while a recorder is open: owner and name, by the method."""

_NUMBERS = 1 << 13
"""Numbers kept of a gradient; at least one of each parameter."""
_MOST_WINDOWS = 8
"""Windows kept of one optimizer, and one of each further size."""
_MOST_BACKWARDS = 1 << 9
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
    touched: frozenset[int] = frozenset()
    """Parameters that it brought a gradient."""
    signature: frozenset[object] = frozenset()
    """The operations of its loss: backwards of another purpose differ in it."""
    is_repeated: bool = False
    """True if there was a backward of the same loss before."""
    batchnorms: tuple[str, ...] = ()
    doubt: str = ""
    """The reason why a gradient that is added rightly may still differ from the whole batch's."""


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
    is_averaged_inside: bool = False
    """True if an AveragedModel was updated between two backwards."""
    doubt: str = ""
    """The reason why the window cannot be called right."""
    ledger_units: tuple[float, ...] = ()
    """The units of each micro-batch, in a window of wholebatch."""
    are_units_given: bool = False
    """True if the loop gave these units, and nothing has tested them."""
    schedule_moved: bool = False
    """True if the learning rate changed within a window of wholebatch."""


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
        self.autocast: set[torch.dtype] = set()
        self.stepped_twice = self.stepped_inside = self.steps_on_copies = False
        self.lost_steps = self.is_sharded = self.loader_restarted = False
        self.after_step: Tensor | None = None
        """The weights after the last step."""
        self._known: dict[int, torch.optim.Optimizer] = {}
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._index: dict[int, int] = {}
        self._hooks: dict[int, Any] = {}
        self._is_hooked = False
        self._history: list[RecordedBackward] = []
        """Backwards that some optimizer has still to step on."""
        self._stepped_at: dict[int, tuple[int, int]] = {}
        """How many backwards came before the last step on a parameter, and whose step it was."""
        self._had_gradient: set[int] = set()
        self._clips: list[RecordedClip] = []
        self._averaged: list[int] = []
        self._parts: dict[int, Tensor] = {}
        self._called: dict[int, nn.Module] = {}  # outermost modules
        self._beside: dict[int, nn.Module] = {}
        self._inner: set[int] = set()
        self._with_gradients: set[int] = set()
        self._without_gradients: set[int] = set()
        self._nodes: set[Any] = set()
        self._state: dict[tuple[int, str], Tensor] = {}
        self._weights = torch.zeros(0)
        self._number = self._step_depth = 0
        self._inside = False  # a backward, or a closure that is evaluated again
        self._loss_scale = 1.0
        self._own_window: Any = None
        self._own_rates: dict[int, tuple[float, ...]] = {}
        self._own_parameters: set[int] = set()
        self._loaders: list[_Loader] = []
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._undo = ExitStack()

    # ------------------------------------------------------------- open and close

    def __enter__(self) -> WindowRecorder:
        if hasattr(torch.compiler, "set_stance"):  # compiled code hides how a loss is made
            self._undo.enter_context(torch.compiler.set_stance("force_eager"))
        for hook in (
            register_module_forward_pre_hook(self._enter_call),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.callback(hook.remove)
        self._undo.callback(lambda: [hook.remove() for hook in self._hooks.values()])
        known_as = _names_in_modules()
        for method, (owner, function) in _REPLACED.items():
            self._replace(owner, function, getattr(self, method), known_as)
        ledger.observers.append(self)
        self._undo.callback(ledger.observers.remove, self)
        if self.model is not None:
            self._adopt(self.model)
        if self.optimizer is not None:
            self._know(self.optimizer)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _replace(
        self,
        owner: Any,
        name: str,
        around: Callable[..., Any],
        known_as: Sequence[tuple[Any, str]],
    ) -> None:
        """Replace a function, also in modules that imported it, by its name or a private one."""
        original = getattr(owner, name)

        @wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        places = [(owner, name)]
        if not isinstance(owner, type):
            places = [(m, n) for m, n in known_as if vars(m)[n] is original]
        for place, known in places:
            setattr(place, known, replaced)
            self._undo.callback(partial(setattr, place, known, original))

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

    def sample_of_step(self, named: Mapping[str, Tensor | None]) -> Tensor:
        """Return whole tensors by parameter, as the gradient of the first step is kept.

        Without a step, those of all parameters.
        """
        row = self.sample([named.get(name) for name in self._names])
        indices = self.windows[0].indices if self.windows else ()
        return self._selected(row, indices) if indices else row

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
        """Return the numbers of a row that belong to these parameters."""
        parts = self._padded(row).split(self._sizes)
        return torch.cat([parts[i] for i in indices]) if indices else row[:0]

    # ------------------------------------------------------------- backwards

    @_never_fails
    def _enter_call(self, module: nn.Module, args: Any) -> None:
        """Note an outermost module that is called, and if it is called without gradients."""
        number = id(module)
        if torch.is_autocast_enabled(self._device):
            self.autocast.add(torch.get_autocast_dtype(self._device))
        if self._inside or number in self._inner:
            return
        if number not in self._called:
            self._called[number] = module
            self._inner |= {id(inner) for inner in module.modules()} - {number}
        if torch.is_grad_enabled():
            self._with_gradients.add(number)
        elif module.training:
            self._without_gradients.add(number)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.over is not None and not self._inside:
            raise self.over
        is_own = self._own_window is not None and self._own_window.open is not None
        if is_own and not self._own_rates:
            self._note_own_rates()
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
        for module in self._called.values() if self.model is None else ():
            self._adopt(module)
        self._hook_parameters()
        if self.is_sharded or not self.parameters:
            return None
        before, weights = self._gradients(), self.sample(self.parameters)
        if self.overflowed and not before.any():  # a loss scaler has skipped the step
            self._history.clear()
        micro = RecordedBackward(self._number, before, before, before)
        micro.terms = [t for r, s in zip(listed, given, strict=False) for t in terms_of(r, s)]
        micro.loss_scale, self._loss_scale = self._loss_scale, 1.0
        if not self._step_depth:  # in a closure, the rate is that of the step that has begun
            micro.rates = {n: _rates(one) for n, one in enumerate(self._known.values())}
        micro.moved = self._filled(weights - torch.cat([self._weights, weights])[: len(weights)])
        self._weights = weights
        self._note_graph(micro, listed)
        if self.after_step is not None and not weights[: len(self.after_step)].equal(
            self.after_step
        ):
            micro.doubt = "the loop changes the weights beside the step"
        self.after_step = None
        return micro

    def _note_graph(self, micro: RecordedBackward, roots: Sequence[Tensor]) -> None:
        """Note what the loss is made of, and the reasons to doubt that its samples are apart."""
        called = {n: m for n, m in self._called.items() if n in self._with_gradients}
        norms = [pair for module in called.values() for pair in batchnorms(module)]
        micro.batchnorms = tuple(n for n, m in norms if m.training and uses_batch_statistics(m))
        nodes = [root.grad_fn for root in roots]
        graph = list(loss_graph(nodes))
        targets = {term.target for term in micro.terms}
        names = {node.name() for node in graph} - {DDP_SINK}
        micro.signature = frozenset(names | targets)
        micro.is_repeated = any(node in self._nodes for node in nodes)
        state = self._held_state()
        moved = [k[1] for k, was in self._state.items() if not state.get(k, was).equal(was)]
        has_begun = bool(self.pending)
        doubts = [
            (
                not self._nodes.isdisjoint(graph),
                "two backwards of the window have a part of their graph in common",
            ),
            (
                self._is_hooked,
                "the loop has hooks on parameters, and they may change the gradient of each "
                "micro-batch",
            ),
            (
                has_begun and bool(self._without_gradients & self._with_gradients),
                "the model is also called without gradients before every backward, so the loss may "
                "use a statistic of one micro-batch",
            ),
            (
                has_begun and bool(moved),
                f"{next(iter(moved), '')} changes between two backwards of the window, so a "
                "micro-batch may depend on those before it",
            ),
        ]
        doubt = next((reason for holds, reason in doubts if holds), "")
        micro.doubt = doubt or next(filter(None, map(doubt_about, graph)), "")
        self._nodes.update(graph)
        self._state = state
        self._with_gradients.clear()
        self._without_gradients.clear()

    @torch.no_grad()
    def _held_state(self) -> dict[tuple[int, str], Tensor]:
        """Return a few numbers of what modules hold, but for trained weights.

        These are the modules that are called, and those in the loop's frames: a copy of the model
        may be an average of its weights.
        """
        found = {}
        if not self.pending:
            self._beside = _modules_in_frames()
        for number, module in (self._beside | self._called).items():
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

    @_never_fails
    def _after_backward(self, micro: RecordedBackward | None) -> None:
        """Keep the backward, if it brought a watched parameter a gradient."""
        if micro is None:
            return
        micro.after = self._gradients()
        micro.contribution = self._row([self._parts.get(i) for i in range(len(self._sizes))])
        micro.touched = self._filled(micro.contribution)
        if micro.touched:
            self._had_gradient |= micro.touched
            self._number += 1
            self._history.append(micro)

    @property
    def pending(self) -> list[RecordedBackward]:
        """Return the backwards that no optimizer has stepped on."""
        return [micro for micro in self._history if not self._steps_since(micro)]

    @property
    def overflowed(self) -> bool:
        """True if a backward without a step has brought numbers that are not finite."""
        return not all(bool(micro.contribution.isfinite().all()) for micro in self.pending)

    def _steps_since(self, micro: RecordedBackward) -> set[int]:
        """Return the parameters of a backward that have been stepped on after it."""
        return {i for i in micro.touched if self._stepped_at.get(i, (0, 0))[0] > micro.number}

    # ------------------------------------------------------------- clips, scales, averages

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and "parameters" in kwargs:
            args = (kwargs.pop("parameters"),)
        if not args or self.failure or not self._history:
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

    def _average(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._averaged.append(self._number)
        return original(*args, **kwargs)

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
        self._own_window, self._own_rates = window, {}
        if window.current.known is None:  # else it may be announced long before its first backward
            self._note_own_rates()
        self._note_batches()
        self._own_parameters |= {id(p) for p in window.current.inputs}
        self._history.clear()

    @_never_fails
    def _note_own_rates(self) -> None:
        """Note the rates with which the first backward of a window of wholebatch is made."""
        self._own_rates = {id(one): _rates(one) for one in self._own_window.target.optimizers}

    @_never_fails
    def window_closes(self, window: Any) -> None:
        """Record a window of wholebatch that is complete."""
        self._own_window = None
        self._note_batches()
        units = [[float(one) for one in column] for column in window.current.units.values()]
        for optimizer in window.target.optimizers:
            kept = self._new_window(optimizer, [])
            kept.ledger_units = tuple(max(units, key=sum, default=[]))
            kept.are_units_given = window.current.are_units_given
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
            self.steps_on_copies |= bool(self.pending)
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
        )

    def _window(self, optimizer: torch.optim.Optimizer, indices: list[int]) -> RecordedWindow:
        """Return the window that this step ends: the backwards since the last step on its own."""
        window, own = self._new_window(optimizer, indices), frozenset(indices)
        steps = [self._stepped_at[i] for i in indices if i in self._stepped_at]
        since, stepped_by = max(steps, default=(0, window.optimizer))
        window.gradient = self._gradients_of(optimizer, indices)
        mine = [b for b in self._history if b.number >= since and b.touched & own]
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
        window.doubt = next((micro.doubt for micro in mine if micro.doubt), "")
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if window.number > 1 and not any(rates):
            window.doubt = "the learning rate is 0; a schedule may be stepped too often"
        inside = range(mine[0].number + 1, mine[-1].number + 1) if mine else ()
        window.is_averaged_inside = any(number in inside for number in self._averaged)
        self.lost_steps |= not mine
        self.stepped_twice |= (
            not mine and stepped_by != window.optimizer and bool(window.gradient.any())
        )
        self._stepped_at |= dict.fromkeys(indices, (self._number, window.optimizer))
        waiting = [b for b in self._history if b.touched - self._steps_since(b)]
        self._history = waiting[-_MOST_BACKWARDS:]
        self._nodes.clear()
        return window

    def _keep(self, window: RecordedWindow) -> None:
        """Keep a window: the first ones, those of another size, and the last one."""
        same = [one for one in self.windows if one.optimizer == window.optimizer]
        is_new = len(window.backwards) not in {len(one.backwards) for one in same}
        if len(same) >= _MOST_WINDOWS and not is_new:
            self.windows.remove(same[-1])
        self.windows.append(window)
        self._stepped()

    @_never_fails
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._step_depth = max(0, self._step_depth - 1)
        if not (self.is_sharded or self._step_depth) and self.parameters:
            self.after_step = self.sample(self.parameters)

    @property
    def unstepped(self) -> list[str]:
        """Return the parameters that had gradients and that no optimizer has stepped on."""
        return [self._names[i] for i in sorted(self._had_gradient - set(self._stepped_at))]


def _names_in_modules() -> list[tuple[Any, str]]:
    """Return the modules that have a name of a replaced function, with that name."""
    functions = [name for owner, name in _REPLACED.values() if not isinstance(owner, type)]
    names = dict.fromkeys([*functions, *(f"_{name}" for name in functions)]).keys()
    modules = [m for m in sys.modules.values() if hasattr(m, "__dict__")]
    return [(module, name) for module in modules for name in names & vars(module).keys()]


def _rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    groups, names = optimizer.param_groups, ("lr", "weight_decay")
    return tuple(float(group.get(name) or 0.0) for name in names for group in groups)


def _modules_in_frames() -> dict[int, nn.Module]:
    """Return the modules that are variables of the calling frames, or attributes of these."""
    found = {}
    for frame, _ in traceback.walk_stack(None):
        for value in frame.f_locals.values():
            held = [] if isinstance(value, ModuleType) else getattr(value, "__dict__", {}).values()
            for one in (value, *held):
                if isinstance(one, nn.Module):
                    found[id(one)] = one
    return found


def _trainer_at_hand() -> str:
    """Return which library drives the loop, by the modules on the call stack."""
    frames = traceback.walk_stack(None)
    packages = {f.f_globals.get("__name__", "").partition(".")[0] for f, _ in frames}
    return next((name for key, name in _TRAINERS.items() if key in packages), "plain torch")
