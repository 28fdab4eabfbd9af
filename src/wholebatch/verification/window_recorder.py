"""The one recorder of a loop that runs: its micro-batches, and their gradients up to the step.

Nothing of the loop is changed. Every backward is seen before and after it ran, every parameter
tells the gradient that a backward brings it, and clipping and the optimizer's step show what they
were given. Of a large model only every n-th number is kept, so that a copy is cheap.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from wholebatch.batch.samples import tensors_of
from wholebatch.coupled.loss_graph import (
    LossTerm,
    is_ddp_sink,
    linked_samples,
    loss_terms,
    normalised_over_samples,
    saved_by,
)
from wholebatch.verification.batch_statistics import BatchStatistics, Statistic
from wholebatch.verification.observed_window import places_of
from wholebatch.window import window
from wholebatch.window.forward_state import capture_random, same_random

_log = logging.getLogger("wholebatch")

# By its name: `torch.nn.utils` has a deprecated function that hides the module.
_clip_grad: Any = importlib.import_module("torch.nn.utils.clip_grad")

_NUMBERS = 1 << 18
"""Numbers kept of every gradient, unless asked otherwise; of a larger model, every n-th."""
_FEW_PARAMETERS, _FEW_NUMBERS = 8, 64
"""Parameters watched after the first window, and numbers kept of each."""
_LOOKS = "wholebatch.coupled."
_MOST_NODES, _MOST_LOSS_NODES = 1 << 15, 1 << 8
_MOST_OUTPUTS = 1 << 24
"""Numbers kept of the gradients of one call's outputs."""


@dataclass(eq=False)
class Call:
    """One outermost call of the model; `slopes` are the gradients of its outputs, by place."""

    module: nn.Module
    args: Any
    kwargs: dict[str, Any]
    draws: bool
    training: bool = True
    is_borrowed: bool = False
    """True if it ran with other parameters than the module's own (`functional_call`)."""
    has_graph: bool = False
    """True if an output depends on what is trained."""
    slopes: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)
    """The first numbers of every sample's output, by place."""

    @property
    def given(self) -> list[Tensor]:
        """Return the tensors that the model was given."""
        return tensors_of((self.args, self.kwargs))


@dataclass(eq=False)
class RecordedMicroBatch:
    """One micro-batch: its calls of the model, its loss, and the gradient that it brought."""

    calls: list[Call]
    before: Tensor
    after: Tensor
    brought: Tensor
    terms: list[LossTerm] = field(default_factory=list)
    loss_scale: float = 1.0
    rates: tuple[float, ...] = ()
    moved: frozenset[int] = frozenset()
    """The places of the parameters that have changed since the micro-batch before."""
    average_moved: bool = False
    linked: bool = False
    """True if its loss compares samples with each other."""
    roots: list[Any] = field(default_factory=list)
    """The nodes of the graph that its backwards began at."""
    counts: list[float] = field(default_factory=list)
    """Positive numbers, ones and sums of the constants that its loss was made with: targets."""
    padded: list[float] = field(default_factory=list)
    """The sizes of the masks and labels that its loss was made with."""
    factors: list[Tensor] = field(default_factory=list)
    """The weights of its samples in the loss."""
    made_by: tuple[str, ...] = ()
    """The names of the nodes of its loss's graph."""
    number: int = 0
    """How many backwards there were before it."""
    statistic: Statistic | None = None
    """A number over samples that its loss has in it, and that no gradient goes through."""
    is_asked: bool = False
    """True if `torch.autograd.grad` gave the gradient to the loop, and added it nowhere."""

    @property
    def is_passed_on(self) -> bool:
        """True if what the model was given is itself made by a model: a generator's loss."""
        return any(tensor.grad_fn is not None for tensor in self.given)

    @property
    def given(self) -> list[Tensor]:
        """Return the tensors that the first call was given."""
        return self.calls[0].given if self.calls else []


@dataclass(frozen=True)
class RecordedClip:
    """One call that clips: after how many micro-batches, and the gradient before and after it."""

    micro_batches: int
    limit: float
    before: Tensor
    after: Tensor

    @property
    def cuts(self) -> bool:
        return not torch.equal(self.before, self.after)


@dataclass(eq=False)
class RecordedWindow:
    """One window of a live loop: the gradients and calls recorded between two optimizer steps."""

    sizes: list[int]
    """How many numbers are kept of each parameter."""
    names: list[str]
    unit: float
    half: bool
    """True if the gradients are kept in 16 bits."""
    micros: list[RecordedMicroBatch] = field(default_factory=list)
    clips: list[RecordedClip] = field(default_factory=list)
    gradient: Tensor | None = None
    is_empty: bool = False
    """True if the optimizer steps on shards, and none of them has a gradient."""
    autocast: set[torch.dtype] = field(default_factory=set)
    resumed: bool = False
    is_whole: bool = True
    """False if it was not watched from its beginning in one way."""
    used: int = 0
    unused: int = 0
    """Calls of the model whose outputs reached a backward, and those that reached none."""
    moved_buffers: list[str] = field(default_factory=list)
    """Buffers that its forwards have changed, and that are no statistics of a BatchNorm."""
    stepped_inside: bool = False
    """True if weights were stepped on before its end: by hooks, or by another optimizer."""
    earlier_pass: int = 0
    """Micro-batches of a pass before, whose gradients only moved the weights for this one (SAM)."""
    places: frozenset[int] = frozenset()
    """The places of the parameters that its optimizer steps on."""
    leaked: bool = False
    """True if it began with gradients that the window of another optimizer brought."""
    moved_before: bool = False
    """True if the weights went on, or back, along the last step before the first backward."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _never_fails(method: _Method) -> _Method:
    """Return a method that keeps its error: a watch never ends somebody's training."""

    @wraps(method)
    def kept(self: WindowRecorder, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            _log.debug("the watch has failed", exc_info=True)
            self.failure = f"the watch failed: {type(error).__name__}: {error}"
            return None

    return cast(_Method, kept)


@dataclass(eq=False)
class WindowRecorder:
    """Records a loop's windows; `ended(window)` is called inside the step, before it is made.

    `began(window)` is called after the first backward of each. Without a model, the modules that
    are called for the first backward are taken. With `looks=False` nobody searches for averages of
    the weights, or asks if the loss compares samples.
    """

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    ended: Callable[[RecordedWindow], None] = lambda _: None
    began: Callable[[RecordedWindow], None] = lambda _: None
    looks: bool = True
    numbers: int = _NUMBERS
    light: bool = False
    over: BaseException | None = None
    """Raised by every backward to come, once the verdict is known and the script is to end."""

    def __enter__(self) -> WindowRecorder:
        self.window: RecordedWindow | None = None
        self.parameters: Sequence[nn.Parameter] = ()
        self._sizes: list[int] = []
        self._mine: set[int] = set()
        self.steps: list[tuple[Tensor, frozenset[int]]] = []  # gradients, and what they are of
        self.autocast: set[torch.dtype] = set()
        self.sharded = False
        self.failure = ""
        self.stepped_twice = False  # by two optimizers, on the same gradients
        self.optimizer_steps = self.skipped_steps = 0
        self.left_behind = False  # gradients that another optimizer stepped on were never cleared
        self.stepped_on: frozenset[int] = frozenset()
        self._stepped: frozenset[int] = frozenset()
        self._before: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._hidden: frozenset[int] = frozenset()
        self._stepped_by: Any = None
        self.after_step: Tensor | None = None
        self._weights = torch.zeros(0)
        self._used: set[Call] | None = set()
        self._norms: dict[int, float] = {}
        self._depth = 0
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._random: Any = None
        self._in_step = False  # the first evaluation of its closure
        self._inside = False  # a backward, a closure that is evaluated again, a look of our own
        self._in_backward: dict[int, Tensor] = {}  # what hooks have stepped on in this backward
        self._loss_scale = 1.0
        self._scaler: Any = None
        self._calls: list[Call] = []
        self._parts: dict[int, Tensor] = {}
        self._nodes: dict[Any, Call] = {}
        self._outputs: list[Tensor] = []
        self._own = None if self.model is None else set(map(id, self.model.modules()))
        # Compiled code hides how a loss is made; a window is the same without it.
        self._eager = ExitStack()
        if hasattr(torch.compiler, "set_stance"):
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        self._statistics = BatchStatistics()
        if self.looks:
            self._statistics.start()
        self._undo: list[Callable[[], None]] = [
            partial(self._statistics.stop, clear=True),
            self._eager.close,
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._note_weights).remove,
            *self._forward_hooks(),
        ]
        self._patch(_clip_grad, "_clip_grads_with_norm_", self._around_clip)
        for owner, name, around in (
            (torch.nn.utils, "clip_grads_with_norm_", self._around_clip),
            (torch.nn.utils, "clip_grad_value_", self._around_clip),
            (torch.autograd, "backward", partial(self._backward, 0)),
            (torch.autograd, "grad", partial(self._backward, 1)),
            (torch.distributed, "all_gather", self._statistics.around_gather),
            (torch.distributed, "all_gather_into_tensor", self._statistics.around_gather),
        ):
            self._patch_everywhere(owner, name, around)
        self._patch(torch.amp.GradScaler, "scale", self._scaler_scale)
        self._patch(torch.amp.GradScaler, "step", self._scaler_step)
        if "deepspeed" in sys.modules:
            self._patch(sys.modules["deepspeed"].DeepSpeedEngine, "step", self._engine_step)
            utils = sys.modules["deepspeed.runtime.utils"]
            self._patch_everywhere(utils, "clip_grad_norm_", self._around_clip)
        engine, window._run_backward = window._run_backward, None  # ours, by its usual door
        self._undo.append(lambda: setattr(window, "_run_backward", engine))
        if self.model is not None:
            self._adopt(list(self.model.parameters()))
        return self

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _patch(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, replaced)
        self._undo.append(lambda: setattr(owner, name, original))

    def _patch_everywhere(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Patch a function of a module, also in modules that imported it by its name."""
        original = getattr(owner, name, None)
        for module in list(sys.modules.values()):
            if original is not None and getattr(module, "__dict__", {}).get(name) is original:
                self._patch(module, name, around)

    def _forward_hooks(self) -> list[Callable[[], None]]:
        leave: Any = self._leave_call
        after = register_module_forward_hook(leave, with_kwargs=True, always_call=True)

        def remove() -> None:
            after.remove()
            _global_forward_hooks_with_kwargs.pop(after.id, None)  # torch forgets it there

        self._of_forwards = [register_module_forward_pre_hook(self._enter_call).remove, remove]
        return list(self._of_forwards)

    def go_lightly(self) -> None:
        """Keep a few numbers of a few gradients of the windows to come, and no forwards."""
        self.light = True
        self._eager.close()
        self.steps.clear()
        for undo in (*self._of_forwards, *self._of_parameters):
            undo()
            self._undo.remove(undo)
        self._calls.clear()
        self._nodes.clear()
        if self.window is not None:
            self.window.is_whole = False
        trained = [p for p in self.parameters if p.requires_grad]
        largest = sorted(trained, key=lambda p: -self._norms.get(id(p), 0.0))
        self._keep_of(largest[:_FEW_PARAMETERS], _FEW_PARAMETERS * _FEW_NUMBERS)

    def _adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Watch these parameters from now on."""
        trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        if self.optimizer is None:
            self.optimizer = _optimizer_of(trained)
        if self.optimizer is not None:
            owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            # An engine steps on copies of its own: then all are watched.
            trained = [p for p in trained if id(p) in owned] or trained
        # Shards get their gradients from their engine, and not from a backward.
        called = {type(m).__name__ for call in self._calls for m in call.module.modules()}
        self.sharded = any(hasattr(p, "to_local") or not p.numel() for p in trained)
        self.sharded |= any(name.startswith("FSDP") for name in called)
        self._shards = {id(parameter) for parameter in trained}
        self._keep_of([] if self.sharded else trained, self.numbers)

    def _keep_of(self, parameters: list[nn.Parameter], numbers: int) -> None:
        """Keep so many numbers of the gradients of these parameters."""
        self.parameters = parameters
        self._mine = {id(parameter) for parameter in parameters}
        self.stride = max(1, -(-sum(p.numel() for p in parameters) // numbers))
        self._sizes = [-(-p.numel() // self.stride) for p in parameters]
        all_hooked = all(parameter._backward_hooks for parameter in parameters)
        self._of_parameters, self.after_step = [], None
        for place, parameter in enumerate(parameters):
            handle = parameter.register_hook(self._brings(place))
            if all_hooked:  # what they do to every gradient is the loop's: see it before
                hooks: Any = parameter._backward_hooks
                others = [(key, hooks.pop(key)) for key in list(hooks) if key != handle.id]
                hooks.update(others)
            self._of_parameters.append(handle.remove)
        self._undo += self._of_parameters
        if parameters:
            self._device = parameters[0].device.type

    def _brings(self, place: int) -> Callable[[Tensor | None], None]:
        def brings(gradient: Tensor | None) -> None:
            if not self._inside or gradient is None:  # somebody calls the hooks by hand
                return
            part = self._part(gradient).clone()  # it may become .grad, and be added to
            held = self._parts.get(place)
            self._parts[place] = part if held is None else held + part

        return brings

    # ------------------------------------------------------------- gradients, as kept

    @torch.no_grad()
    def _part(self, tensor: Tensor) -> Tensor:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        return dense.reshape(-1)[:: self.stride]

    def _row(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return gradients as they are kept, on the host in float64; None is zero."""
        if self.sharded:
            return torch.zeros(0)
        parts = [
            p.new_zeros(size) if tensor is None else tensor
            for tensor, p, size in zip(tensors, self.parameters, self._sizes, strict=True)
        ]
        return torch.cat([part.detach().to("cpu", torch.float64) for part in parts])

    def row_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return whole gradients as they are kept."""
        return self._row([None if g is None else self._part(g) for g in gradients])

    def spread(self, row: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Make a gradient, as it is kept, that of other parameters; what is not kept is zero."""
        for parameter, part in zip(parameters, row.split(self._sizes), strict=True):
            whole = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            whole[:: self.stride] = part
            parameter.grad = whole.view(parameter.shape).to(parameter.device)

    def _grads(self) -> Tensor:
        return self.row_of([parameter.grad for parameter in self.parameters])

    # ------------------------------------------------------------------- forwards

    def _is_ours(self, module: nn.Module) -> bool:
        if self._inside or self.failure:
            return False
        return self._own is None or id(module) in self._own

    def _enter_call(self, module: nn.Module, args: Any) -> None:
        if not self._inside:
            self._statistics.enter(module)
        if self._is_ours(module):
            if torch.is_autocast_enabled(self._device):
                self.autocast.add(torch.get_autocast_dtype(self._device))
            if not self._depth:
                self._random = capture_random(every=False, to_save=False)
            self._depth += 1

    @_never_fails
    def _leave_call(self, module: nn.Module, args: Any, *rest: Any) -> None:
        # Torch leaves the keywords out where the call has failed.
        kwargs, result = rest if len(rest) == 2 else ({}, None)
        if not self._inside:
            self._statistics.leave(lambda: tensors_of(result))
        if isinstance(module, nn.parallel.DistributedDataParallel):
            made = [t for t in tensors_of(result) if is_ddp_sink(t.grad_fn)]
            passed_on = {t.grad_fn.next_functions[t.output_nr]: t for t in made if t.grad_fn}
            self._outputs = [passed_on.get((t.grad_fn, t.output_nr), t) for t in self._outputs]
        if not self._is_ours(module):
            return
        self._depth = max(0, self._depth - 1)
        if self._depth or not torch.is_grad_enabled():
            return
        if next((p for p in module.parameters() if p.requires_grad), None) is None:
            return
        draws = self._random is None or not same_random(
            self._random, capture_random(every=False, to_save=False)
        )
        is_borrowed = not all(parameter.is_leaf for parameter in module.parameters())
        call = Call(module, args, kwargs, draws, module.training, is_borrowed)
        self._calls.append(call)
        rows = {t.shape[0] for t in tensors_of((args, kwargs)) if t.dim()}
        for place, tensor in enumerate(tensors_of(result)):
            if tensor.grad_fn is None:
                continue
            self._nodes[tensor.grad_fn], call.has_graph = call, True
            if tensor.numel() <= _MOST_OUTPUTS:
                tensor.register_hook(_keeps(call.slopes, place))
            if tensor.dim() and tensor.shape[0] in rows:
                self._outputs.append(tensor)
                call.rows[place] = first_numbers(tensor)

    # ------------------------------------------------------------------- backwards

    def _backward(self, place: int, original: Any, roots: Any, *args: Any, **kwargs: Any) -> Any:
        """See one backward, whose seeds are at this place of its other arguments."""
        if self.over is not None and not self._inside:
            raise self.over
        # Of a checkpoint, inside the model, while a graph is compiled, or a look of our own.
        within = bool(place and self._depth)  # Lightning's steps may be within a forward
        busy: Any = self._inside or within or self.failure or _get_current_dispatch_mode_stack()
        busy = busy or torch._C._functorch.peek_interpreter_stack() is not None
        is_look = bool(place) and not busy and _is_a_look()
        if busy or is_look:
            self._used = None if is_look else self._used
            return original(roots, *args, **kwargs)
        seeds = kwargs.get(("grad_tensors", "grad_outputs")[place], (*args, None, None)[place])
        self._inside = True
        try:
            micro = self._before_backward(roots, seeds)
            if micro is not None:
                micro.is_asked = bool(place)
            result = original(roots, *args, **kwargs)
        finally:
            self._inside = False
        if micro is not None:
            self._after_backward(micro)
        if place:
            self._statistics.add_gradients((*args, *kwargs.values())[:1], result)
        self._parts.clear()
        self._outputs.clear()
        self._statistics.backwards += 1
        return result

    @_never_fails
    def _before_backward(self, roots: Any, seeds: Any) -> RecordedMicroBatch:
        """Return the micro-batch as it is before its backward."""
        if not self.parameters and not self.sharded:
            self._adopt([p for call in self._calls for p in call.module.parameters()])
        listed = [roots] if isinstance(roots, Tensor) else list(roots)
        listed = [root for root in listed if isinstance(root, Tensor) and root.grad_fn is not None]
        seeds = [seeds] * len(listed) if isinstance(seeds, Tensor | None) else list(seeds)
        terms = [t for r, s in zip(listed, seeds, strict=False) for t in _terms_of(r, s)]
        terms = [
            replace(t, node="a gradient that the loop gives its outputs", kind="unknown")
            if t.weighed is not None and self._is_output(t.below)
            else t
            for t in terms
        ]
        before, linked, calls = self._grads(), self._look_for_links(listed), self._calls_of(listed)
        terms = [
            replace(t, kind=t.plain) if t.kind == "picked" and self._is_of_one(t, calls) else t
            for t in terms
        ]
        terms = [replace(t, below=None) for t in terms]
        micro = RecordedMicroBatch(calls, before, before, before, terms, linked=linked)
        micro.roots = [root.grad_fn for root in listed]
        micro.made_by = tuple(node.name() for node in self._nodes_of_loss(listed))
        micro.number, micro.statistic = self._statistics.backwards, self._statistics.of(listed)
        if not self.light:
            constants = list(self._constants(listed))
            factors = [one for name, one in constants if name.startswith("Mul")]
            micro.factors = [one for one in factors if _is_weight(one)]
            if any(term.kind == "sum" and term.over for term in terms):
                micro.counts, micro.padded = _counts_of(constants)
        return micro

    def _constants(self, roots: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors between the losses and the model that no gradient goes through."""
        for node in self._nodes_of_loss(roots):
            for one in (saved_by(node, name[7:]) for name in dir(node) if name[:7] == "_saved_"):
                if isinstance(one, Tensor) and not one.requires_grad and one.dim():
                    yield node.name(), one

    def _nodes_of_loss(self, roots: Sequence[Tensor]) -> Iterator[Any]:
        """Yield the nodes between these losses and the model, in the graph's own order."""
        waiting: list[Any] = [root.grad_fn for root in roots]
        seen = {None, *self._nodes}
        for node in islice(waiting, _MOST_LOSS_NODES):  # it grows
            yield node
            below = [child for child, _ in node.next_functions if child not in seen]
            seen.update(below)
            waiting += below

    def _is_of_one(self, term: LossTerm, calls: list[Call]) -> bool:
        """True if a term picks among the parts of one sample: the points of a cloud."""
        reached = self._reached([term.below])
        if len(calls) > len(reached) == 1 or self.light:  # every call is a sample
            return True
        rows = [len(one) for call in reached for one in call.rows.values()]
        return bool(reached) and term.among not in rows

    def _is_output(self, node: Any) -> bool:
        while node is not None and node not in self._nodes and "View" in node.name():
            node = node.next_functions[0][0]
        return node in self._nodes

    @_never_fails
    def _after_backward(self, micro: RecordedMicroBatch) -> None:
        """Add the micro-batch, if it brought the watched parameters a gradient."""
        micro.after = self._after_steps()
        micro.brought = self._row([self._parts.get(i) for i in range(len(self.parameters))])
        brings = bool(self._parts) or (self.sharded and bool(micro.calls))
        if not brings:  # somebody holds the hooks back: what is seen is what was added
            micro.brought = micro.after - micro.before
        if brings or bool(micro.brought.any()):
            self._add(micro)
        if self._in_backward and self.window is not None:
            self.window.stepped_inside = True
            self._see(self.optimizer, frozenset(self._in_backward), micro.after)
        self._in_backward.clear()

    def _after_steps(self) -> Tensor:
        """Return the gradients now; those that hooks have stepped on, as they were then."""
        if not self._in_backward:
            return self._grads()
        now = list(self._grads().split(self._sizes))
        for place, part in self._in_backward.items():
            now[place] = part.to("cpu", torch.float64)
        return torch.cat(now)

    def _reached(self, nodes: list[Any]) -> dict[Call, None]:
        """Return the calls whose outputs these nodes of the graph were made of."""
        found: dict[Call, None] = {}
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
        return found

    def _calls_of(self, roots: Sequence[Tensor]) -> list[Call]:
        """Return the calls whose outputs these losses were made of."""
        found = self._reached([root.grad_fn for root in roots])
        if self._used is not None:  # None: it cannot be told
            self._used = self._used | set(found) if found else None
        taken = {call for m in self.window.micros for call in m.calls} if self.window else set()
        fresh = [call for call in self._calls if call not in taken]
        return list(found) or fresh or list(self._calls)

    def _look_for_links(self, roots: Sequence[Tensor]) -> bool:
        """Tell if the first loss compares samples with each other."""
        if not self.looks or self.window is not None or len(roots) != 1 or not self._outputs:
            return False
        terms = [term for term in loss_terms(roots[0].grad_fn) if term.kind != "joined"]
        # Weights that add up to 1 make one sample of its rows: the documents of a query.
        flat = all(output.dim() < 3 for output in self._outputs)  # their rows are no steps of time
        known = [t if t.kind != "unknown" or not flat else replace(t, count=2.0) for t in terms]
        counts = [min(t.count, t.weighed or t.count) for t in known]
        units = [count for count in counts if count > 1 + 1e-4]
        if not units or roots[0].numel() != 1:
            return False
        try:
            if normalised_over_samples(roots[0], self._outputs, 0.0):
                # Of texts it may be normalised within a group that stays together (GRPO).
                given = [tensor for call in self._calls for tensor in call.given]
                if not any(t.dim() > 1 and not t.is_floating_point() for t in given):
                    return True
            return bool(linked_samples(roots[0], self._outputs, min(units)))
        except Exception:  # a graph that cannot be asked tells nothing
            return False

    def _add(self, micro: RecordedMicroBatch) -> None:
        """Add a micro-batch, or a second backward of the same forward to its first."""
        if self.window is None:
            self._begin_window()
        assert self.window is not None
        micro.loss_scale, self._loss_scale = self._loss_scale, 1.0
        if self.optimizer is not None and not self._in_step:  # there, it is that of this step
            groups, names = self.optimizer.param_groups, ("lr", "weight_decay")
            micro.rates = tuple(float(g.get(name) or 0.0) for name in names for g in groups)
        self._look_at_weights(micro)
        again = [m for m in self.window.micros if set(m.calls) & set(micro.calls)]
        # A sum of losses so far has a further call of the same module, and is a micro-batch.
        taken = {call for m in again for call in m.calls}
        further = {call.module for call in micro.calls if call not in taken}
        if not again or further & {call.module for call in taken}:
            self.window.micros.append(micro)
            if len(self.window.micros) == 1:
                self.began(self.window)
            return
        first = again[-1]
        if micro.is_asked and not first.is_asked:
            return  # to look at it: a norm, a balance of losses
        if first.is_asked and not micro.is_asked:
            self.window.micros[self.window.micros.index(first)] = micro
            return
        if self.window.is_whole:
            first.after, first.brought = micro.after, first.brought + micro.brought
        first.terms += micro.terms
        first.roots += micro.roots
        first.calls += [call for call in micro.calls if call not in first.calls]

    def new_window(self) -> RecordedWindow:
        """Return a window in which nothing was seen yet."""
        dtypes = {parameter.dtype.to_real() for parameter in self.parameters}
        owner = {id(p): name for name, p in self.model.named_parameters()} if self.model else {}
        return RecordedWindow(
            sizes=list(self._sizes),
            names=[owner.get(id(p), f"parameter {i}") for i, p in enumerate(self.parameters)],
            unit=max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=0.0),
            half=bool(dtypes & {torch.float16, torch.bfloat16}),
            resumed=self.optimizer_steps == 0 and bool(self.optimizer and self.optimizer.state),
        )

    def _begin_window(self) -> None:
        if self.optimizer is None:  # a trainer has made it since
            self.optimizer = _optimizer_of(self.parameters)
        self.window = self.new_window()
        self._weights, was = self.row_of(list(self.parameters)), self._weights
        if self.after_step is not None and was.numel() and not self.light:
            made, moved = self.after_step - was, self._weights - self.after_step
            cosine = float(made @ moved) / max(float(made.norm() * moved.norm()), 1e-300)
            self.window.moved_before = abs(cosine) > 0.999
        self._first_weights = self._weights
        self._buffers = self._buffers_of_calls()
        largest = max(self.parameters, key=lambda p: p.numel(), default=None)
        if self.light or self.optimizer_steps or not self.looks:
            largest = None
        self._averages = [] if largest is None else _averages_of(largest)
        self._averaged: Tensor = torch.zeros(0) if largest is None else largest

    def _look_at_weights(self, micro: RecordedMicroBatch) -> None:
        """Note if weights, or an average of them, have changed since the micro-batch before."""
        if not self.window or not self.window.is_whole:
            return
        weights = self.row_of(list(self.parameters))
        if not self._in_backward:
            micro.moved = filled((weights != self._weights).double(), self._sizes)
        self._weights = weights
        now = [_kept(tensor, home) for tensor, *_, home in self._averages]
        pairs = zip(self._averages, now, strict=True)
        micro.average_moved = any(_follows(*pair, _few(self._averaged)) for pair in pairs)
        self._averages = now

    @_never_fails
    def _note_weights(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.light and not self.sharded and places_of(optimizer, self.parameters):
            self.after_step = self.row_of(list(self.parameters))

    def _begin_at_last_pass(self, window: RecordedWindow) -> None:
        """Leave out what was cleared on purpose: SAM's first pass, and a generator's losses."""
        micros = window.micros
        cleared = [i for i in range(1, len(micros)) if not bool(micros[i].before.any())]
        own = [i for i in cleared if not any(m.is_passed_on for m in micros[i:])]
        if own and all(m.is_passed_on for m in micros[: own[0]]):
            del micros[: own[0]]
            return
        passes = [i for i in cleared if micros[i].moved]
        now, was = self.row_of(list(self.parameters)), self._first_weights
        if passes and float((now - was).norm()) <= 1e-5 * float(was.norm()):
            window.earlier_pass = passes[-1] - (passes[-2] if passes[1:] else 0)
            del micros[: passes[-1]]
            micros[0].moved = frozenset()

    def _buffers_of_calls(self) -> dict[str, tuple[Tensor, int]]:
        modules = dict.fromkeys(call.module for call in self._calls) if not self.light else ()
        return {
            f"{name}.{own}".lstrip("."): (buffer, buffer._version)
            for module in modules
            for name, part in module.named_modules()
            if not isinstance(part, nn.modules.batchnorm._NormBase)
            for own, buffer in part.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }

    def _count_calls(self, window: RecordedWindow) -> None:
        """Count the calls that a backward has reached, and those like them that none has.

        Alike are module, mode and size (one call: the shape), but the inputs are others.
        """
        used = {call for micro in window.micros for call in micro.calls}
        shapes = [call.given[0].shape for call in used if call.given and call.given[0].dim()]
        if self._used is None or window.earlier_pass or not shapes:
            return
        window.used, rows = len(used), sorted(shape[0] for shape in shapes)
        modes = {(call.module, call.training) for call in used}
        pointers = {tensor.data_ptr() for call in used for tensor in call.given}
        for call in self._calls:
            shape = call.given[0].shape if call.given and call.has_graph else ()
            if not shape or call in self._used or (call.module, call.training) not in modes:
                continue
            near = rows[0] <= 2 * shape[0] <= 4 * rows[-1] if len(used) > 1 else shape == shapes[0]
            window.unused += near and not any(t.data_ptr() in pointers for t in call.given)

    # --------------------------------------------------------- clipping, scaling, the step

    def _around_clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ours = any(id(parameter) in self._mine for parameter in parameters)
        if not ours or self.window is None or self.failure:
            return original(parameters, *args, **kwargs)
        limit = float((*args, *kwargs.values())[0])
        before = self._grads()
        result = original(parameters, *args, **kwargs)
        clip = RecordedClip(len(self.window.micros), limit, before, self._grads())
        self.window.clips.append(clip)
        return result

    def _scaler_scale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        self._loss_scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        self._scaler = scaler if scaler.is_enabled() and not self.light else None
        return scaled

    def _scaler_step(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        made = self.optimizer_steps
        result = original(scaler, *args, **kwargs)
        if made == self.optimizer_steps:  # skipped: its gradients were not finite
            self.skipped_steps += 1
            self._forget()
        return result

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """See the gradients now, or after the step's closure has made them."""
        places = places_of(optimizer, self.parameters)
        if self.sharded:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            shards = [p for p in stepped if hasattr(p, "to_local")]
            if self.window is not None:
                self.window.is_empty = bool(shards) and all(p.grad is None for p in shards)
            if shards or any(id(p) in self._shards for p in stepped):
                self._see(optimizer, places)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not places and (masters := self._masters(optimizer)):
            everything = frozenset(range(len(masters)))
            self._see(optimizer, everything, self.row_of([one.grad for one in masters]))
        if not places:
            return None
        if self._inside:  # a hook's, within the loop's backward
            made = [(i, self.parameters[i].grad) for i in places]
            self._in_backward |= {i: self._part(g).clone() for i, g in made if g is not None}
            self.optimizer = optimizer
            return None
        if not callable(closure):
            self._see(optimizer, places)
            return None
        evaluations = 0

        def observed() -> Any:
            nonlocal evaluations
            evaluations += 1
            if evaluations == 1:
                self._in_step = True
                loss = closure()
                self._in_step = False
                self._see(optimizer, places)
                return loss
            self._inside = True  # LBFGS evaluates again, at weights of its own
            try:
                return closure()
            finally:
                self._inside = False

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _masters(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the optimizer's copies of the parameters in a wider format; [] if it has none."""
        groups = optimizer.param_groups
        held = [c for group in groups for c in group["params"] if c.dtype is torch.float32]
        pairs = [(p, [c for c in held if p.shape == c.shape]) for p in self.parameters]
        found = [[c for c in r if p.dtype != c.dtype and torch.equal(c.to(p), p)] for p, r in pairs]
        return [copies[0] for copies in found] if all(found) else []

    def _engine_step(self, original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """End the window at a step of DeepSpeed's whose gradients are not in `.grad`."""
        is_last, made = engine.is_gradient_accumulation_boundary(), self.optimizer_steps
        result = original(engine, *args, **kwargs)
        if is_last and made == self.optimizer_steps and self.window is not None:
            self.window.sizes = []
            self._see(self.optimizer, frozenset())
        return result

    @_never_fails
    def _see(self, optimizer: Any, places: frozenset[int], gradient: Tensor | None = None) -> None:
        seen = self.window
        self._statistics.stop(clear=True)
        gradient = self._grads() if gradient is None else gradient
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:  # a fused optimizer divides by it in its own kernel
            gradient = gradient / float(scale)
        gradient = self._without_scale(gradient, places)
        if not self.light:
            self.steps.append((gradient, places))
        self.optimizer_steps += 1
        if self.failure or self.over is not None:
            return
        if seen is None:
            inner = getattr(self._stepped_by, "__dict__", {}).values()  # of a wrapper: one owner
            again = all(optimizer is not one for one in (self._stepped_by, *inner))
            self.stepped_twice |= again and bool(self._stepped & places)
            self.left_behind |= bool(self._hidden & places & filled(gradient, self._sizes))
            self.stepped_on |= places
            return
        self.optimizer, self._stepped_by, self._stepped = optimizer, optimizer, places
        seen.gradient = gradient
        seen.autocast = set(self.autocast)
        rows = seen.gradient.split(self._sizes) if self._sizes else ()
        self._norms = {
            id(p): float(row.norm()) for p, row in zip(self.parameters, rows, strict=False)
        }
        made = [micro for micro in seen.micros if not micro.is_asked]
        seen.micros[:] = made or seen.micros  # what the loop only asked for is no part of it
        rest: list[RecordedMicroBatch] = []
        if seen.is_whole and not self.light and not self.sharded:
            rest = self._set_aside(seen, places)
            self._begin_at_last_pass(seen)
            self._count_calls(seen)
            self._hide_others(seen, places, bool(rest))
            names = self._buffers.items()
            seen.moved_buffers = [name for name, (b, version) in names if b._version != version]
        _join_pattern(seen)
        self._forget()
        if rest:
            self.window = self.new_window()
            self.window.micros, self.window.stepped_inside = rest, True
        self._inside = True  # what follows is ours
        try:
            self.ended(seen)  # it may stop the script, and that is no failure
        finally:
            self._inside = False
            self._parts.clear()

    def _without_scale(self, gradient: Tensor, places: frozenset[int]) -> Tensor:
        """Divide out the loss scale that the next optimizer's step will divide out."""
        rest = [p for i, p in enumerate(self.parameters) if i not in places]
        if self._scaler is None or not rest or self.sharded:
            return gradient
        states, ready = self._scaler._per_optimizer_states, OptState.READY
        rows = list(gradient.split(self._sizes))
        for other in _optimizers_of(rest):
            if states.get(id(other), {}).get("stage", ready) is ready:
                for place in places_of(other, self.parameters) - places:
                    rows[place] = rows[place] / self._scaler.get_scale()
        return torch.cat(rows)

    def _set_aside(
        self, window: RecordedWindow, places: frozenset[int]
    ) -> list[RecordedMicroBatch]:
        """Take out the micro-batches that bring this optimizer nothing, for the next one's step."""
        brought = [filled(micro.brought, self._sizes) for micro in window.micros]
        rest = [m for m, full in zip(window.micros, brought, strict=True) if full - places == full]
        rest = [m for m in rest if bool(m.brought.any())]
        if len(rest) == len(window.micros):
            return []
        window.clips = [
            replace(clip, micro_batches=sum(m not in rest for m in window.micros[:place]))
            for clip in window.clips
            if (place := clip.micro_batches)
        ]
        window.micros[:] = [micro for micro in window.micros if micro not in rest]
        return rest

    def _hide_others(self, window: RecordedWindow, places: frozenset[int], is_part: bool) -> None:
        """Leave out gradients of before that this optimizer does not step on: a GAN's other half.

        Another one may step on them next, or clear them.
        """
        full = filled(window.micros[0].before, self._sizes)
        stepped, were_full = self._before
        window.leaked = bool(full & places) and not were_full & places and stepped != places
        self._before, hidden = (places, full), full - places
        self._hidden = hidden & self.stepped_on
        window.places, self.stepped_on = places, self.stepped_on | places
        for micro in window.micros:  # another optimizer may step on what is not in this loss
            micro.moved &= places | filled(micro.brought, self._sizes)
        if is_part:
            hidden = frozenset(range(len(self._sizes))) - places
        elif not places or not hidden or len(window.micros) == 1:
            return
        sizes = enumerate(self._sizes)
        mask = torch.cat([torch.full((n,), float(i not in hidden)) for i, n in sizes]).double()
        assert window.gradient is not None
        window.gradient = window.gradient * mask
        for micro in window.micros:
            micro.before, micro.after = micro.before * mask, micro.after * mask
            micro.brought = micro.brought * mask
        window.clips = [
            replace(one, before=one.before * mask, after=one.after * mask) for one in window.clips
        ]

    @property
    def waits_for_others(self) -> bool:
        """True if another optimizer holds parameters of the model that none has stepped on yet."""
        rest = [p for i, p in enumerate(self.parameters) if i not in self.stepped_on]
        return bool(rest) and not self.sharded and bool(_optimizers_of(rest))

    def updates(self) -> list[Tensor]:
        """Return the gradients of the steps; steps on different parameters make one update."""
        made: list[Tensor] = []
        taken: frozenset[int] = frozenset()
        for gradient, places in self.steps:
            if made and not places & taken:
                rows, more = list(made[-1].split(self._sizes)), gradient.split(self._sizes)
                for place in places:
                    rows[place] = more[place]
                made[-1], taken = torch.cat(rows), taken | places
            else:
                made.append(gradient)
                taken = places
        return made

    def _forget(self) -> None:
        self.window = None
        self._calls.clear()
        self._nodes.clear()
        self._used = set()


def with_turns(window: RecordedWindow) -> RecordedWindow:
    """Return a window whose backwards are joined if their graphs take turns."""
    window = replace(window, micros=[replace(micro) for micro in window.micros])
    _join_turns(window, [micro.made_by for micro in window.micros])
    return window


def _join_pattern(window: RecordedWindow) -> None:
    """Join backwards that take turns, such as a GAN's real and fake batch, to one micro-batch."""
    kinds: list[Any] = [tuple((term.node, term.kind) for term in m.terms) for m in window.micros]
    if len(set(kinds)) == 1:  # alike, but for a target that all samples of a backward have
        kinds = [tuple(term.target for term in micro.terms) for micro in window.micros]
        if any(None in targets for targets in kinds):
            return
    _join_turns(window, kinds)


def _join_turns(window: RecordedWindow, kinds: list[Any]) -> None:
    micros = window.micros
    count = len(micros)
    turns = next(n for n in range(1, count + 1) if kinds == kinds[:n] * (count // n))
    is_own = len({micro.is_passed_on for micro in micros}) == 1
    if len(set(kinds)) < turns and window.sizes:  # an actor's loss and a critic's
        both = [(k, filled(m.brought, window.sizes)) for k, m in zip(kinds, micros, strict=True)]
        kinds = both if both == both[:turns] * (count // turns) else kinds
    if not 1 < turns < count or len(set(kinds)) < turns or not is_own:
        return
    window.clips = [replace(c, micro_batches=-(-c.micro_batches // turns)) for c in window.clips]
    for first, *others in [micros[i : i + turns] for i in range(0, count, turns)]:
        for other in others:
            if window.is_whole:
                first.after, first.brought = other.after, first.brought + other.brought
            first.terms, first.calls = first.terms + other.terms, first.calls + other.calls
            micros.remove(other)


def first_numbers(tensor: Tensor) -> Tensor:
    """Return a few numbers of every row of an output."""
    return tensor.detach().reshape(len(tensor), -1)[:, :8].clone()


def _keeps(slopes: dict[int, Tensor], place: int) -> Callable[[Tensor | None], None]:
    def keep(slope: Tensor | None) -> None:
        if slope is not None:  # DDP gives None to an output that no loss has used
            slopes[place] = slope.detach()

    return keep


def _is_a_look() -> bool:
    frame: Any = sys._getframe(3)
    for _ in range(8):
        if frame is not None and frame.f_globals.get("__name__", "").startswith(_LOOKS):
            return True
        frame = frame and frame.f_back
    return False


def _terms_of(root: Tensor, seed: Tensor | None) -> list[LossTerm]:
    """Return the terms of what a backward began at, and with which gradient."""
    if seed is not None and seed.numel() and not bool((seed == seed.flatten()[0]).all()):
        return [LossTerm("backward(gradient=...)", "unknown", 1.0)]
    with torch.enable_grad():
        total = root if not root.dim() else root.sum()
    factor = 1.0 if seed is None else float(seed.flatten()[0])
    return [replace(term, seed=factor) for term in loss_terms(total.grad_fn)]


def _counts_of(constants: Sequence[tuple[str, Tensor]]) -> tuple[list[float], list[float]]:
    """Count in the constants of a loss, one by one and by their nodes: a sum may be over them.

    Return the sizes of masks and labels apart: they count the padding, too.
    """
    found: dict[str, list[list[float]]] = {}
    for node, one in constants:
        if one.dtype is torch.bool or one.is_floating_point():
            counts = [float((one > 0).sum()), float((one == 1).sum()), float(one.sum())]
            found.setdefault(node, []).append(counts)
    added = [[sum(one) for one in zip(*rows, strict=True)] for rows in found.values()]  # of all
    counted = [number for rows in (*found.values(), added) for row in rows for number in row]
    return counted, [float(one.numel()) for _, one in constants if not one.is_floating_point()]


def _is_weight(factor: Tensor) -> bool:
    """True for one weight of each of some samples, if these are no counts."""
    is_row = factor.is_floating_point() and 4 <= factor.numel() == len(factor)
    return is_row and not factor.equal(factor.round())


def filled(row: Tensor, sizes: list[int]) -> frozenset[int]:
    """Return the places of the parameters whose gradient, as it is kept, is not zero."""
    sizes = sizes if row.numel() else []
    return frozenset(i for i, part in enumerate(row.split(sizes)) if bool(part.any()))


def _optimizers_of(parameters: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold one of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    kinds = {torch.optim.Optimizer}
    waiting = list(kinds)
    while waiting:
        kinds.update(below := waiting.pop().__subclasses__())
        waiting += below
    found = [
        one
        for one in _objects(kinds)
        if any(id(p) in wanted for group in one.param_groups for p in group["params"])
    ]
    inner = {id(getattr(one, name, None)) for one in found for name in ("optimizer", "_optimizer")}
    return [one for one in found if id(one) in inner] or found  # not a trainer's wrapper of it


def _optimizer_of(parameters: Sequence[Tensor]) -> torch.optim.Optimizer | None:
    """Return the only optimizer that holds one of these parameters."""
    found = _optimizers_of(parameters)
    return found[0] if len(found) == 1 else None


def _objects(kinds: set[Any]) -> list[Any]:
    """Return all objects of these types."""
    return [one for one in gc.get_objects() if type(one) in kinds]


def _few(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:64].clone()


_Kept = tuple[Tensor, int, Tensor, Any]
"""A tensor, its version, a few of its numbers, and its place: a dict or list, and the key."""


def _kept(tensor: Tensor, home: Any) -> _Kept:
    """Return the tensor that lies at this place now: an average may be made anew every time."""
    with suppress(LookupError):
        now = home[0][home[1]] if home else tensor
        tensor = now if isinstance(now, Tensor) and now.shape == tensor.shape else tensor
    return tensor, tensor._version, _few(tensor), home


def _follows(was: _Kept, now: _Kept, weights: Tensor) -> bool:
    """True if an average has changed; one that is far from the weights, if it moved to them."""
    far, moved = weights - was[2], now[2] - was[2]
    if float(far.norm()) <= 0.5 * float(weights.norm()):
        return was[1] != now[1] or bool(moved.any())
    return float(far @ moved) > 0.99 * float(far.norm() * moved.norm()) > 0


@torch.no_grad()
def _averages_of(parameter: Tensor) -> list[_Kept]:
    """Return tensors that look like an average of this parameter: alike in shape and values."""
    found: list[Tensor] = []
    few = _few(parameter)
    for one in _objects({Tensor, nn.Parameter}):
        if one.shape != parameter.shape or one.device != parameter.device or one.is_sparse:
            continue
        if one.grad_fn is not None or one.dtype != parameter.dtype:
            continue
        try:
            aliases = one.data_ptr() == parameter.data_ptr()
            near = float((_few(one) - few).norm()) <= 0.5 * float(few.norm())
            near |= isinstance(one, nn.Parameter) and not one.requires_grad  # a target network
        except RuntimeError:  # a tensor without numbers
            continue
        found += [one] if near and not aliases else []
    homes = {
        id(one): (box, key)
        for box in (gc.get_referrers(*found) if found else ())
        if isinstance(box, dict | list) and box is not found
        for key, one in list(box.items() if isinstance(box, dict) else enumerate(box))
    }
    return [_kept(one, homes.get(id(one))) for one in found]
