"""Record the windows of a running training loop: its backwards, clips and optimizer steps.

Nothing of the loop is changed. The recorder uses torch's public hooks, and functions that are
replaced while it is open (`_REPLACED`). It writes evidence and decides nothing. Whatever fails in
it is kept in `failure`, and the loop goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, wraps
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from wholebatch.verification.called_modules import CalledModules
from wholebatch.verification.evidence import Backward, Clip, WindowEvidence
from wholebatch.verification.ledger_windows import LedgerWindow
from wholebatch.verification.loader_passes import LoaderPasses
from wholebatch.verification.loop_calls import LoopCalls, user_line
from wholebatch.verification.loss_ends import DDP_SINK, passes_on
from wholebatch.verification.loss_terms import (
    MeasuredLoss,
    coupling_of,
    loss_graph,
)
from wholebatch.verification.parameter_rows import ParameterRows
from wholebatch.verification.running_program import replaced, trainer_at_hand
from wholebatch.window import ledger as own_windows

_log = logging.getLogger("wholebatch")

_REPLACED = {
    (torch.autograd, "backward"): "_backward",
    (torch.nn.utils, "clip_grads_with_norm_"): "_clip",  # clip_grad_norm_ calls it too
    (torch.nn.utils, "clip_grad_value_"): "_clip",
    (torch.amp.GradScaler, "scale"): "_scale",
    (DataLoader, "__iter__"): "passes.iterate",
}
"""The functions that are replaced while a recorder is open, and what is called in their place."""

_MOST_WINDOWS = 8
"""Windows recorded in full; later ones are counted, until one comes that is not like these."""
_MOST_BACKWARDS = 1 << 9


@dataclass(frozen=True, eq=False)
class _Brought(Backward):
    """A backward that some optimizer has still to step on, with the rows of all parameters."""

    measured: MeasuredLoss | None = None
    moved_parameters: frozenset[int] = frozenset()
    rates_by_optimizer: Mapping[int, tuple[float, ...]] | None = None


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

    Without a model, the modules that the loop calls are taken. `stepped()` is called after each
    window, and `pass_begins()` before each pass over a DataLoader.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        stepped: Callable[[], None] = lambda: None,
        pass_begins: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.optimizer, self._stepped = model, optimizer, stepped
        self.rows, self.passes = ParameterRows(), LoaderPasses(pass_begins)
        self.over: BaseException | None = None
        self.failure, self.trainer = "", "plain torch"
        self.windows: list[WindowEvidence] = []
        self.window_counts: Counter[int] = Counter()
        """How many windows each optimizer has made."""
        self.other_optimizers: dict[int, str] = {}
        """Optimizers that have stepped on parameters that are not watched."""
        self.stepped_twice = self.stepped_inside = self.steps_on_copies = self.lost_steps = False
        self.after_step: Tensor | None = None
        """The weights after the last step."""
        self.units: tuple[float, ...] = ()
        """The units of the next window's micro-batches, if they are given."""
        self._known: dict[int, torch.optim.Optimizer] = {}
        self._modules, self._calls = CalledModules(), LoopCalls()
        self._history: list[_Brought] = []
        self._stepped_at: dict[int, tuple[int, int]] = {}
        """How many backwards came before the last step on a parameter, and whose step it was."""
        self._had_gradient: set[int] = set()
        self._clips: list[Clip] = []
        self._nodes: set[Any] = set()
        self._weights = torch.zeros(0)
        self._number = self._step_depth = 0
        self._inside = False  # a backward, or a closure that is evaluated again
        self._loss_scale = 1.0
        self._own: LedgerWindow | None = None
        self._own_parameters: set[int] = set()
        self._own_since = 0
        """The number of the first backward of a window of wholebatch."""
        self._ends: set[str] = set()
        """The last operations of the losses that were recorded."""
        self._is_brief = False
        self._brief: list[Backward] = []
        """Backwards since the last step, of which no gradients are recorded."""
        self._module_hook: Any = None
        self._undo = ExitStack()

    # ------------------------------------------------------------- open and close

    def __enter__(self) -> WindowRecorder:
        if hasattr(torch.compiler, "set_stance"):  # compiled code hides how a loss is made
            self._undo.enter_context(torch.compiler.set_stance("force_eager"))
        for hook in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.callback(hook.remove)
        around = {place: attrgetter(method)(self) for place, method in _REPLACED.items()}
        self._undo.enter_context(replaced(around))
        self._record_in_full()
        self._undo.callback(self._record_briefly)
        own_windows.observers.append(self)
        self._undo.callback(own_windows.observers.remove, self)
        if self.model is not None:
            self.rows.adopt(self.model)
        if self.optimizer is not None:
            self._know(self.optimizer)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _record_in_full(self) -> None:
        self._calls.begin()
        self._calls.is_paused = self._step_depth > 0
        self._module_hook = register_module_forward_pre_hook(self._enter_call)
        if self.rows.parameters:
            self._weights, self.after_step = self.rows.weights(), None
        self._is_brief = False

    def _record_briefly(self) -> None:
        """Count backwards and read rates, and nothing else."""
        self._calls.is_paused = True
        self._calls.end()
        self._module_hook.remove()
        self.rows.remove_hooks()
        self._is_brief = True

    # ------------------------------------------------------------- backwards

    @_never_fails
    def _enter_call(self, module: nn.Module, args: Any) -> None:
        if not self._inside:
            self._modules.enter(module)

    def _backward(
        self, original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        run = partial(original, tensors, grad_tensors, *args, **kwargs)
        if self.over is not None and not self._inside:
            raise self.over
        if self._inside or self.failure or torch.compiler.is_dynamo_compiling():
            return run()
        if self._is_brief and self._own is None and self._count(tensors):
            return run()
        is_own = self._own is not None and self._own.is_open
        with self._calls.paused():
            if is_own:
                self._note_own_backward(tensors)
            began = None if is_own else self._before_backward(tensors, grad_tensors)
            self._inside = True
            try:
                if began is None:
                    return run()
                with self.rows.contributions() as brought:
                    result = run()
            finally:
                self._inside = False
            self._after_backward(began, brought)
        return result

    @_never_fails
    def _before_backward(self, roots: Any, seeds: Any) -> _Brought | None:
        """Return the backward as it is before it runs."""
        if not self._number:
            self.trainer = trainer_at_hand()
        self.passes.note_backward()
        listed, starts = _roots_of(roots, seeds)
        for module in self._modules.modules.values() if self.model is None else ():
            self.rows.adopt(module)
        if self.rows.is_sharded or not self.rows.parameters:
            return None
        before, weights = self.rows.gradients(), self.rows.weights()
        if self.overflowed and not before.any():  # a loss scaler has skipped the step
            self._history.clear()
        was = torch.cat([self._weights, weights[len(self._weights) :]])
        after_step, batchnorms = self.after_step, self._modules.batchnorms()
        is_changed = after_step is not None and bool(
            self.rows.differing(torch.cat([after_step, weights[len(after_step) :]]), weights)
        )
        optimizers = () if self._step_depth else self._known.values()  # a closure: it has begun
        self._weights, self.after_step = weights, None
        scale, self._loss_scale = self._loss_scale, 1.0
        nodes = [root.grad_fn for root in listed]
        self._ends |= _ends_of(listed)
        graph = list(loss_graph(nodes))
        is_first = not self.pending
        self._calls.trained = self._trained
        doubts = {
            "changed": self._modules.changed(
                is_first=is_first, trained=self._trained, written=self._calls.written
            ),
            "evaluated": self._modules.evaluated() and not is_first,
            "shares graph": not self._nodes.isdisjoint(graph),
            "hooks": self.rows.has_foreign_hooks,
            "changed beside": is_changed,
        }
        couplings = dict.fromkeys(filter(None, map(coupling_of, graph)))
        loader_pass, batch, counted = self.passes.take()
        began = _Brought(
            before=before,
            after=before,
            contribution=before,
            number=self._number,
            measured=MeasuredLoss(listed, starts),
            loss_scale=scale,
            operations=frozenset(n.name() for n in graph if not passes_on(n)) - {DDP_SINK},
            batchnorms=batchnorms,
            is_averaged=self._modules.is_averaged,
            loader_pass=loader_pass,
            batch=batch,
            counted=counted,
            carried=self._calls.carried_into(nodes),
            doubts=(*(name for name, is_so in doubts.items() if is_so), *couplings),
            lines={"loss": self._calls.loss_line, "backward": user_line()},
            moved_parameters=self.rows.differing(was, weights),
            rates_by_optimizer=dict(enumerate(map(rates_of, optimizers))),
        )
        self._nodes.update(graph)
        return began

    @property
    def _trained(self) -> set[int]:
        return {id(self.rows.parameters[i]) for i in self._had_gradient} | self._own_parameters

    @_never_fails
    def _after_backward(self, began: _Brought, brought: Sequence[Tensor]) -> None:
        """Keep the backward, if it brought a watched parameter a gradient."""
        terms = () if began.measured is None else began.measured.terms()
        touched = self.rows.filled(brought[0])
        self._next_number()
        if touched:
            self._had_gradient |= touched
            micro = replace(
                began,
                after=self.rows.gradients(),
                contribution=brought[0],
                touched=touched,
                terms=terms,
                measured=None,
            )
            self._history.append(micro)

    @property
    def pending(self) -> list[_Brought]:
        """Return the backwards that no optimizer has stepped on."""
        return [micro for micro in self._history if not self._steps_since(micro)]

    @property
    def overflowed(self) -> bool:
        """True if a backward without a step has brought numbers that are not finite."""
        return not all(bool(micro.contribution.isfinite().all()) for micro in self.pending)

    def _steps_since(self, micro: _Brought) -> set[int]:
        """Return the parameters of a backward that have been stepped on after it."""
        return {i for i in micro.touched if self._stepped_at.get(i, (0, 0))[0] > micro.number}

    # ------------------------------------------------------------- windows like those before

    @_never_fails
    def _count(self, roots: Any) -> bool:
        """Count a backward; False if its window, or its loss, is to be recorded in full.

        Near the end of the data a window may be shorter than those that are known.
        """
        self.passes.note_backward()
        sizes = [len(window.backwards) for window in self.windows]
        is_short = not self._brief and self.passes.left + 1 < max(sizes, default=0)
        if is_short or not _ends_of(roots) <= self._ends:
            self._record_in_full()
            return False
        loader_pass, batch, _ = self.passes.take()
        optimizer, nothing = next(iter(self._known.values())), torch.zeros(0)
        micro = Backward(
            before=nothing,
            after=nothing,
            contribution=nothing,
            number=self._number,
            rates=() if self._step_depth else rates_of(optimizer),
            loader_pass=loader_pass,
            batch=batch,
        )
        self._number += 1
        self._brief.append(micro)
        return True

    def _see_briefly(self, optimizer: torch.optim.Optimizer, indices: Sequence[int]) -> None:
        """Keep a window only if none of its size is known; then the next is recorded in full."""
        window = replace(self._new_window(optimizer, indices), is_brief=True)
        window = replace(window, backwards=tuple(self._brief), line=user_line())
        self._stepped_at |= dict.fromkeys(indices, (self._number, window.optimizer))
        sizes = {len(w.backwards) for w in self.windows if w.optimizer == window.optimizer}
        rates = {micro.rates for micro in self._brief}
        if len(self._brief) not in sizes or len(rates) > 1:
            self.windows.append(window)
            self._record_in_full()
        self._brief.clear()
        self._stepped()

    def _kinds(self, optimizer: int) -> set[Hashable]:
        """Return what the windows of an optimizer that were kept are like."""
        return {_kind_of(window) for window in self.windows if window.optimizer == optimizer}

    @property
    def _is_known_enough(self) -> bool:
        """True if the one optimizer that steps has made enough windows, and nothing is left."""
        counts = self.window_counts
        return (
            len(counts) == 1
            and min(counts.values()) >= _MOST_WINDOWS
            and not self._history
            and self._own is None
        )

    # ------------------------------------------------------------- clips, scales

    def _clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ours = any(id(parameter) in self.rows.index for parameter in listed)
        before = self.rows.gradients() if ours and self._history and not self.failure else None
        result = original(listed, *args, **kwargs)
        if before is not None:
            limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
            self._keep_clip(limit, before)
        return result

    @_never_fails
    def _keep_clip(self, limit: Any, before: Tensor) -> None:
        self._clips.append(Clip(self._number, float(limit), before, self.rows.gradients()))

    def _scale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        self._loss_scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        return scaled

    # ------------------------------------------------------------- windows of wholebatch

    @_never_fails
    def window_began(self, window: Any) -> None:
        """Read a window of wholebatch from its ledger, and not from its backwards."""
        self._own, self._own_since = LedgerWindow(window), self._number
        self.passes.note_backward()
        self._own_parameters |= self._own.parameters
        self._history.clear()

    @_never_fails
    def _note_own_backward(self, totals: Any) -> None:
        own = self._own
        if own is None or self._is_brief:
            return
        nodes = [root.grad_fn for root in _listed(totals)]
        sources = self._calls.carried_into(nodes)
        own.carries |= any(source >= self._own_since for source in sources)
        own.is_changed |= self._modules.changed(
            is_first=not own.backwards, trained=self._trained, written=self._calls.written
        )
        own.backwards += 1
        self._next_number()

    def _next_number(self) -> None:
        self._number += 1
        self._calls.number = self._number

    @_never_fails
    def window_closes(self, window: Any) -> None:
        """Record a window of wholebatch that is complete."""
        own, self._own = self._own, None
        self.passes.note_backward()
        if own is None:  # the watch began within it
            return
        for optimizer in own.optimizers:
            self._keep(replace(self._new_window(optimizer, []), ledger=own.ledger()))
        if not self._is_brief and min(self.window_counts.values(), default=0) >= _MOST_WINDOWS:
            self._record_briefly()

    @property
    def open_ledger(self) -> int:
        """Return the micro-batches of a window of wholebatch that was not closed."""
        return 0 if self._own is None else self._own.micro_batches

    # ------------------------------------------------------------- the step

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Record the step now, or after its closure has made the gradients."""
        self._step_depth += 1
        self._calls.is_paused = True
        if self._step_depth > 1 or self._own is not None:  # of a wrapper
            return None
        closure, evaluations = kwargs.get("closure", args[1] if len(args) > 1 else None), 0
        if not callable(closure):
            self._see(optimizer)
            return None

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
        indices = sorted({self.rows.index[id(p)] for p in owned if id(p) in self.rows.index})
        self.rows.is_sharded |= any(hasattr(p, "to_local") for p in owned)
        if self._inside:
            self.stepped_inside |= bool(indices)
        elif any(id(parameter) in self._own_parameters for parameter in owned):
            return  # its window was recorded when it closed
        elif not indices:
            self.steps_on_copies |= bool(self.pending)
            self.other_optimizers[id(optimizer)] = type(optimizer).__name__
        elif self._is_brief and id(optimizer) in self._known:
            self._see_briefly(optimizer, indices)
        elif not self.rows.is_sharded:
            is_new = id(optimizer) not in self._known
            self._keep(self._window(optimizer, indices))
            if self._is_brief and is_new:
                self._record_in_full()
            elif not self._is_brief and self._is_known_enough:
                self.passes.counts = False
                self._record_briefly()

    def _gradient(self, optimizer: torch.optim.Optimizer, indices: Sequence[int]) -> Tensor:
        """Return the gradient of a step; a fused optimizer divides by its scale itself."""
        scale = getattr(optimizer, "grad_scale", None)
        gradient = self.rows.selected(self.rows.gradients(), indices)
        return gradient if scale is None else gradient / float(scale)

    def _know(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer."""
        self._known.setdefault(id(optimizer), optimizer)
        return list(self._known).index(id(optimizer))

    @property
    def optimizer_names(self) -> dict[int, str]:
        return dict(enumerate(type(optimizer).__name__ for optimizer in self._known.values()))

    def _new_window(
        self, optimizer: torch.optim.Optimizer, indices: Sequence[int]
    ) -> WindowEvidence:
        which = self._know(optimizer)
        self.window_counts[which] += 1
        dtypes = {self.rows.parameters[i].dtype.to_real() for i in indices} or {torch.float32}
        return WindowEvidence(
            number=self.window_counts[which],
            optimizer=which,
            eps=max(torch.finfo(dtype).eps / 2 for dtype in dtypes),
            is_half=bool(dtypes & {torch.float16, torch.bfloat16}),
            indices=tuple(indices),
        )

    def _window(self, optimizer: torch.optim.Optimizer, indices: list[int]) -> WindowEvidence:
        """Return the window that this step ends: the backwards since the last step on its own."""
        window, own = self._new_window(optimizer, indices), frozenset(indices)
        steps = [self._stepped_at[i] for i in indices if i in self._stepped_at]
        since, stepped_by = max(steps, default=(0, window.optimizer))
        mine = [b for b in self._history if b.number >= since and b.touched & own]
        gradient = self._gradient(optimizer, indices)
        self.lost_steps |= not mine
        self.stepped_twice |= not mine and stepped_by != window.optimizer and bool(gradient.any())
        self._stepped_at |= dict.fromkeys(indices, (self._number, window.optimizer))
        waiting = [b for b in self._history if b.touched - self._steps_since(b)]
        self._history = waiting[-_MOST_BACKWARDS:]
        self._nodes.clear()
        return replace(
            window,
            gradient=gradient,
            backwards=tuple(self._of(micro, window) for micro in mine),
            clips=tuple(
                replace(
                    clip,
                    number=sum(micro.number < clip.number for micro in mine),
                    before=self.rows.selected(clip.before, indices),
                    after=self.rows.selected(clip.after, indices),
                )
                for clip in self._clips
                if clip.number > since
            ),
            line=user_line(),
            units=self.units if len(self.units) == len(mine) else (),
        )

    def _of(self, micro: _Brought, window: WindowEvidence) -> Backward:
        """Return a backward as one window has it: with the parameters of its optimizer alone."""
        rows = {
            name: self.rows.selected(getattr(micro, name), window.indices)
            for name in ("before", "after", "contribution")
        }
        rates = (micro.rates_by_optimizer or {}).get(window.optimizer, ())
        moved = not micro.moved_parameters.isdisjoint(window.indices)
        return replace(micro, **rows, rates=rates, moved=moved)  # type: ignore[arg-type]

    def _keep(self, window: WindowEvidence) -> None:
        """Keep a window: the first ones, and those that are not like them."""
        count = sum(other.optimizer == window.optimizer for other in self.windows)
        if count < _MOST_WINDOWS or _kind_of(window) not in self._kinds(window.optimizer):
            self.windows.append(window)
        self._stepped()

    @_never_fails
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._step_depth = max(0, self._step_depth - 1)
        self._calls.is_paused = self._step_depth > 0
        is_seen = not (self.rows.is_sharded or self._step_depth or self._is_brief)
        if is_seen and self.rows.parameters:
            self.after_step = self.rows.weights()

    @property
    def unstepped(self) -> list[str]:
        """Return the parameters that had gradients and that no optimizer has stepped on."""
        without = sorted(self._had_gradient - set(self._stepped_at))
        owned = self._own_parameters
        return [self.rows.names[i] for i in without if id(self.rows.parameters[i]) not in owned]


def _listed(roots: Any) -> list[Any]:
    return [roots] if isinstance(roots, Tensor) else list(roots)


def _roots_of(roots: Any, seeds: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return what a backward begins at, and the gradients that it begins with."""
    listed = [r for r in _listed(roots) if isinstance(r, Tensor) and r.grad_fn is not None]
    starts = [seeds] * len(listed) if isinstance(seeds, Tensor | None) else list(seeds)
    return listed, starts


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Return the learning rates and the weight decays of an optimizer."""
    groups, names = optimizer.param_groups, ("lr", "weight_decay")
    return tuple(float(group.get(name) or 0.0) for name in names for group in groups)


def _ends_of(roots: Any) -> set[str]:
    """Return the last operations of losses."""
    nodes = (getattr(root, "grad_fn", None) for root in _listed(roots))
    return {node.name() for node in nodes if node is not None}


def _kind_of(window: WindowEvidence) -> Hashable:
    """Return what makes a window like others: its size, its losses, and changes of its rate."""
    losses = frozenset(tuple(term.node for term in micro.terms) for micro in window.backwards)
    size = len(window.backwards if window.ledger is None else window.ledger.units)
    return size, losses, len({micro.rates for micro in window.backwards}) > 1
