"""The calls of a loop's models, seen by hooks: what they return, and if the first ones add up."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch.samples import flatten, readable_layout, tensors_of
from wholebatch.coupled.adds_up import UNTESTED, AdditivityResult, check_adds_up
from wholebatch.coupled.causes import AuditFinding
from wholebatch.window.autograd_graph import transforms_active
from wholebatch.window.forward_state import in_backward

_log = logging.getLogger("wholebatch")

_MOST_OUTPUTS = 32

_watching: WeakSet[ModelCalls] = WeakSet()


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
        self.tests = True
        self.outputs: deque[Tensor] = deque(maxlen=_MOST_OUTPUTS)
        """What the models returned in this micro-batch, with a row for each sample."""
        self.findings: list[AuditFinding] = []
        """What the tests of the first calls showed."""

    def watch(self, *, tests: bool = True) -> None:
        """Put hooks on the models, unless they are there; with `tests`, test the first calls."""
        if self._handles:
            return
        self.tests = tests
        _watching.add(self)
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
        if is_call and self.tests:
            self._test_call(module, args, kwargs)
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._paused or transforms_active():
            return
        self._depth -= 1
        given = [tensor for tensor in tensors_of((args, kwargs)) if tensor.dim()]
        if self._depth or in_backward() or not given or not torch.is_grad_enabled():
            return
        made = (one for one in tensors_of(output) if one.dim() and one.requires_grad)
        self.outputs += [one for one in made if len(one) == len(given[0])]

    def _test_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Run the first call of a model on two parts of its samples, before the call itself."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        inside = set(inner.modules())
        meets = any(isinstance(m, nn.SyncBatchNorm | DistributedDataParallel) for m in inside)
        # The first dimension is time in some of torch's layers.
        by_time = any(getattr(m, "batch_first", True) is False for m in inside)
        if not self._called.isdisjoint(inside) or not inner.training or meets or by_time:
            return
        with self.paused():
            result = parts_of_call(inner, args, kwargs)
        if result.conclusive:
            self._called |= inside
            self.findings += result.findings


def parts_of_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AdditivityResult:
    """Compare the outputs of a call with those of two parts of its samples, forward only.

    Every tensor that is given must have the same number of samples in its first dimension; else
    nothing is tested. The module is left as it was.
    """
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of((args, kwargs))}
    if len(sizes) != 1 or max(sizes) < 2:
        return AdditivityResult(conclusive=False)

    def run(few: Any) -> dict[str, Tensor]:
        given, named = few
        rows = len(next(tensor for tensor in tensors_of(few)))
        leaves, _ = flatten(module(*given, **named))
        made = {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)}
        return {name: one for name, one in made.items() if one.dim() and len(one) == rows}

    layout = readable_layout((tuple(args), dict(kwargs)), None, ())
    try:
        made = check_adds_up(module, run, layout, gradients=False, outputs=True, name="forward")
        if any(found.kind in UNTESTED for found in made.findings):
            # The first dimension may be another one than that of the samples.
            return AdditivityResult(conclusive=False)
        return made
    except Exception as error:  # It cannot be called with fewer samples.
        _log.debug("a call of %s was not tested: %r", type(module).__name__, error)
        return AdditivityResult()


class _Hook:
    """A hook that leaves itself out of copies and pickles of the model, and of compiled code."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)  # checks that nobody holds any more keep no outputs

    def __call__(self, *given: Any) -> None:
        method = None if torch.compiler.is_compiling() else self._method()
        if method is not None:
            method(*given)

    def __reduce__(self) -> Any:
        return partial, (_do_nothing,)


def _do_nothing(*given: Any) -> None:
    """Stand for a hook in a copy of the model."""
