"""The calls of a loop's models, seen by hooks: what they return, and if the first ones add up."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from wholebatch.audit.adds_up import AdditivityResult, check_adds_up
from wholebatch.audit.check import Warned, silenced
from wholebatch.audit.finding import UNTESTED, AuditFinding
from wholebatch.batch.samples import flatten, readable_layout, tensors_of
from wholebatch.coupled.normalisation_layers import BatchNorm
from wholebatch.window.autograd_graph import in_backward, transforms_active

_log = logging.getLogger("wholebatch")

_MOST_OUTPUTS = 32

_watching: WeakSet[ModelCalls] = WeakSet()
_all: WeakSet[ModelCalls] = WeakSet()


@contextmanager
def unwatched() -> Iterator[None]:
    """Take all hooks off the models, so that a graph can be made of a forward."""
    watching = list(_watching)
    for calls in watching:
        calls.take_hooks_off()
    try:
        yield
    finally:
        for calls in watching:
            calls.watch(tests=calls.tests)


class ModelCalls:
    """Notes the outputs of models, and tests the first call of each.

    Models whose forwards run collectives (FSDP, DeepSpeed) are watched with `tests=False`.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._handles: list[Any] = []
        self._depth = 0
        self._paused = False
        self._called: set[nn.Module] = set()
        self._outermost: set[nn.Module] = set()  # whose calls no other module made
        self.tests = True
        self.outputs: deque[Tensor] = deque(maxlen=_MOST_OUTPUTS)
        """What the models returned in this micro-batch, with a row for each sample."""
        self.findings: list[AuditFinding | Warned] = []
        """What the tests of the first calls showed."""
        self._norms: WeakSet[nn.Module] = WeakSet()  # that trained in calls of any module
        _all.add(self)

    def watch(self, *, tests: bool = True) -> None:
        """Put hooks on the models, unless they are there; with `tests`, test the first calls."""
        if self._handles:
            return
        self.tests = tests
        _watching.add(self)
        if not _compiles():  # torch warns of a hook on all modules where one of them is compiled
            everywhere = register_module_forward_pre_hook(_Hook(self._note_norm))
            self._handles.append(everywhere)
            finalize(self, everywhere.remove)
        for module in {m for model in self._models for m in model.modules()}:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            enter, leave = _Hook(self._enter), _Hook(self._leave)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True, always_call=True),
            ]

    def take_hooks_off(self) -> None:
        """Take the hooks off the models until `watch` is called again."""
        _watching.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make calls of the models that are not those of the loop."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._paused or transforms_active():
            return
        is_call = self._depth == 0 and torch.is_grad_enabled() and not in_backward()
        if is_call:
            self._outermost.add(module)
        if is_call and self.tests:
            self._test_call(module, args, kwargs)
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._paused or transforms_active():
            return
        self._depth -= 1
        inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.dim()]
        if self._depth or in_backward() or not inputs or not torch.is_grad_enabled():
            return
        outputs = (tensor for tensor in tensors_of(output) if tensor.dim() and tensor.requires_grad)
        self.outputs += [tensor for tensor in outputs if len(tensor) == len(inputs[0])]

    def _note_norm(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, BatchNorm) and module.training and not self._paused:
            self._norms.add(module)

    def foreign_norms(self) -> list[nn.Module]:
        """Return the BatchNorms that ran in training mode and are in no model of any loop."""
        if not self._norms:
            return []
        models = (model for calls in _all for model in calls._models)
        known = {module for model in models for module in model.modules()}
        return [norm for norm in self._norms if norm not in known]

    def bypassed(self) -> nn.Module | None:
        """Return a model that has a forward of its own, and of which only layers were called."""
        for model in self._models:
            inner = {*model.modules()} - {model}
            own = type(model).forward is not nn.Module.forward
            is_called = model in self._outermost or not inner & self._outermost
            if self.tests and own and not (is_called or isinstance(model, nn.Sequential)):
                return model
        return None

    def _test_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Run the first call of a model on two parts of its samples, before the call itself."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        inside = set(inner.modules())
        meets = any(isinstance(m, nn.SyncBatchNorm | DistributedDataParallel) for m in inside)
        if not self._called.isdisjoint(inside) or not inner.training or meets:
            return
        # A checkpoint around the call must not count what the test saves for a backward.
        with self.paused(), saved_tensors_hooks(_itself, _itself):
            result = parts_of_call(inner, args, kwargs)
            if result is not None and not result.conclusive:
                return
            self._called |= inside
            if result is None:
                return
            mixes = any(finding.kind not in ("state", "outside") for finding in result.findings)
            doubt = _other_dimension(inner, args, kwargs) if mixes else None
        if doubt is None:
            self.findings += result.findings
        elif doubt:
            begin = f"{type(inner).__name__}: its output for one row of the first dimension changed"
            warning = (
                f"{begin} when another row changed, and {doubt}. If the rows are samples, micro-"
                "batches do not make the update of the whole batch: run wb.verify. If they are "
                f"not, nothing is wrong; {silenced(begin)}"
            )
            self.findings.append(Warned(warning))


def parts_of_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, turns: bool = False
) -> AdditivityResult | None:
    """Compare the outputs of a call with those of two parts of its samples, forward only.

    The first tensor gives the number of samples. Other tensors are given whole if they have another
    number of rows, and are no indices: those of a graph's edges would point to rows that are left
    out. The module is left as it was. With `turns`, samples are the second dimension of tensors.
    Return None if the module cannot be called with fewer samples.
    """
    # A tuple of two arguments would be taken for a list of two samples.
    call: Any = {"args": {str(n): value for n, value in enumerate(args)}, "kwargs": dict(kwargs)}
    if turns:
        columns = next((t.shape[1] for t in tensors_of(call) if t.dim() > 1), 0)
        call = _turned(call, lambda tensor: tensor.shape[1] == columns)
    others = _of_other_rows(call)
    if others is None or any(t.dim() and not t.is_floating_point() for t in others):
        return AdditivityResult(conclusive=False)

    def run(few: Any) -> dict[str, Tensor]:
        rows = len(next(tensor for tensor in tensors_of(few) if tensor.dim()))
        if turns:
            few = _turned(few, lambda tensor: len(tensor) == rows)
        output, _ = flatten(module(*few["args"].values(), **few["kwargs"]))
        tensors = {leaf.name: leaf.value for leaf in output if isinstance(leaf.value, Tensor)}
        if turns:  # where both dimensions are as long, either may be that of the samples
            tensors = {n: t for n, t in tensors.items() if t.shape[:2].count(rows) == 1}
            tensors = _turned(tensors, lambda tensor: len(tensor) != rows)
        return {name: t for name, t in tensors.items() if t.dim() and len(t) == rows}

    layout = readable_layout(call, None, ())
    try:
        result = check_adds_up(module, run, layout, gradients=False, outputs=True, name="forward")
        if any(finding.kind in UNTESTED for finding in result.findings):
            # The first dimension may be another one than that of the samples.
            return AdditivityResult(conclusive=False)
        return result
    except Exception as error:
        _log.debug("a call of %s was not tested: %r", type(module).__name__, error)
        return None


def _turned(tree: Any, where: Callable[[Tensor], bool]) -> Any:
    """Return a structure with the first two dimensions of some tensors exchanged."""
    leaves, structure = flatten(tree)
    values = [leaf.value for leaf in leaves]
    are_turned = [isinstance(v, Tensor) and v.dim() > 1 and where(v) for v in values]
    pairs = zip(values, are_turned, strict=True)
    return structure.build([v.transpose(0, 1) if is_turned else v for v, is_turned in pairs])


def _of_other_rows(call: Any) -> list[Tensor] | None:
    """Return the tensors with other rows than the first has; None if that has fewer than two."""
    tensors = tensors_of(call)
    rows = next((len(tensor) for tensor in tensors if tensor.dim()), 0)
    if rows < 2:
        return None
    return [tensor for tensor in tensors if not tensor.dim() or len(tensor) != rows]


def _other_dimension(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Return why the first dimension may not be that of the samples; "" if it is not, or None."""
    by_time = next(
        (name for name, m in module.named_modules() if getattr(m, "batch_first", True) is False),
        None,
    )
    if by_time is not None:
        result = parts_of_call(module, args, kwargs, turns=True)
        if result is not None and result.conclusive and not result.findings:
            return ""  # the samples are the second dimension
        name = f"its layer {by_time}" if by_time else "it"
        return f"{name} has batch_first=False (torch's default), so it takes this dimension as time"
    return "its tensors have different numbers of rows" if _of_other_rows((args, kwargs)) else None


def _compiles() -> bool:
    """True if the program has called `torch.compile`."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and bool(dynamo.cached_backends)


class _Hook:
    """A hook that leaves itself out of copies and pickles of the model, and of compiled code."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)  # checks that nobody holds any more keep no outputs

    def __call__(self, *call: Any) -> None:
        method = None if torch.compiler.is_compiling() else self._method()
        if method is not None:
            method(*call)

    def __reduce__(self) -> Any:
        return partial, (_do_nothing,)


def _itself(value: Tensor) -> Tensor:
    """Keep a saved tensor as it is."""
    return value


def _do_nothing(*call: Any) -> None:
    """Stand for a hook in a copy of the model."""
