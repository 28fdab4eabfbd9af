"""The executor of micro-steps: eager code, the joint graph, or a CUDA graph of it.

All of them add the same gradients and record the same sums in the window, and one window may mix
them. The first micro-batch of a kind (`kinds.py`) always runs eagerly, and the graph that is made
for the kind is compared with it (`make_graph.py`). What fails for one kind runs eagerly, and the
other kinds keep their graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.compile import decide
from wholebatch.compile.cuda_graph import wait_for
from wholebatch.compile.execute_mode import CannotTrace, Execute, ExecutePlan, Notes, reason_of
from wholebatch.compile.gradient_buffers import eager_into, empty_cache, is_nearly_full
from wholebatch.compile.graph_check import EagerResult, NothingToCompare
from wholebatch.compile.graph_inputs import DeviceCopies, Inputs, take_apart
from wholebatch.compile.graph_memory import GraphMemory
from wholebatch.compile.joint_graph import Prepared
from wholebatch.compile.kinds import Kind, Kinds, Slot
from wholebatch.compile.make_graph import GraphMaker
from wholebatch.compile.trace import Added, Form
from wholebatch.losses.loss import Loss, Terms
from wholebatch.window.autocast import Precision
from wholebatch.window.forward_state import ForwardState

if TYPE_CHECKING:
    from wholebatch.window.ledger import Ledger


Eager: TypeAlias = Callable[[Any], Loss | Terms]
"""Runs forward and backward of a micro-batch, records them in the window, and returns the loss."""

_FAILURES = 3
"""So many kinds that cannot be one graph, and none that can: the run is eager from then on."""


class Executor:
    """Runs the micro-steps of one window after the other.

    A loss function of an adapter may have an attribute `reads`: the user's code inside it, for the
    guards.
    """

    def __init__(
        self,
        execute: Execute,
        *,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        window: Ledger,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.execute = execute
        self.notes = Notes(asked=execute in ("compile", "graph"))
        self.mode = "eager"
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._window = window
        self._precision = precision
        self._device = device
        self._copies = DeviceCopies(device)
        self._likes: dict[torch.dtype, Tensor] = {}  # one 0-dim tensor of each total's dtype
        self._plan = ExecutePlan.of(execute, device)
        self._begun: Any = None  # the window that has begun
        self._failures = 0  # kinds that could not be one graph
        # Whether the graph that was being made when memory ran out was to be compiled.
        self._too_large: bool | None = None
        self.kinds = Kinds(self._model, getattr(loss, "reads", loss), precision, self.notes)
        self.kinds.as_read = getattr(loss, "as_read", nullcontext)
        self.memory = GraphMemory(self._model, window, device)
        self._maker = GraphMaker(
            execute,
            model=self._model,
            loss=loss,
            device=device,
            kinds=self.kinds,
            memory=self.memory,
            plan=self._plan,
            notes=self.notes,
        )
        reason = window.only_eager
        if reason is not None and not self._plan.eager:
            self._give_up(reason)

    # ------------------------------------------------------------- micro-step

    def on_device(self, micro: Any) -> Any:
        """Return a micro-batch on the device, as `by_graph` and eager code get it."""
        return self._copies(micro)

    def by_graph(self, micro: Any, eager: Eager) -> Added | None:
        """Add one micro-batch's gradients by a graph, record its sums in the window, return them.

        Return None if eager code must do so. Where a graph is compared with it, `eager(micro)` does
        so by forward and backward, and returns the loss.
        """
        if not self._plan.eager:
            try:
                self.memory.reserve()
                return self._graph_step(micro, eager)
            except CannotTrace as reason:  # of this micro-batch, before anything ran
                self.notes.fell_back(self.execute, "eagerly", str(reason))
        return None

    @contextmanager
    def by_eager_code(self) -> Iterator[None]:
        """Let eager code add the gradients of a micro-batch within this context."""
        self.mode = "eager"
        with eager_into(self.memory.gradients, self._window):
            yield
        if not self._plan.eager and not self._window.updates:
            self.memory.settle()

    def guard(
        self,
        reads: Callable[[Any, Any], Any],
        as_read: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Capture this function for the guards, in this context, instead of the loss function."""
        self.kinds.reads, self.kinds.as_read = reads, as_read

    def let_go(self) -> None:
        """Drop every graph and its memory after an out-of-memory error. They are made again."""
        self.kinds.clear()
        self.memory.drop_pool()

    def release(self) -> None:
        """Drop the graphs and the gradient buffers; another window makes them again."""
        self.let_go()
        self.memory.reset([])

    def _graph_step(self, micro: Any, eager: Eager) -> Added | None:
        """Run this micro-batch in a graph if possible; return None if eager code must run it."""
        inputs = take_apart(micro)
        is_open = self._window.open_early()
        self._begin_window()
        self._plan.micro_batches += 1
        kind = self.kinds.of(inputs.key)
        slot = self.kinds.look_up(kind, inputs)
        if isinstance(slot, decide.Eager):
            self._without_graph(slot)
            return None
        if slot.ready is None or not slot.ready.captured:
            slot.times += 1
        slot.entry = slot.entry or self.kinds.known_entry(inputs)
        situation = self.kinds.situation(
            kind, slot, inputs, is_open=is_open, first=not self._window.micro_batches
        )
        decision = decide.decide(situation, self._plan)
        if isinstance(decision, decide.Eager):
            self._without_graph(decision, situation.own)
            return None
        if isinstance(decision, decide.Make):
            run = partial(eager, micro)
            return self._prepare(kind, slot, inputs, run, compiled=decision.compiled)
        assert slot.ready is not None
        if decision.compiles:
            self._maker.compile_beside(slot.ready.joint, inputs)
        return self._run(self._recorded(slot, slot.ready, inputs), inputs)

    def _without_graph(self, decision: decide.Eager, graphs: int = 0) -> None:
        if decision.reason is not None:
            self.notes.fell_back(self.execute, "eagerly", decision.reason)
        if decision.is_full:
            told = f"{graphs} sizes of micro-batches have graphs; further ones run eagerly"
            self.notes.tell(f"{told}: round the sizes", shows=True)

    def _recorded(self, slot: Slot, ready: Prepared, inputs: Inputs) -> Prepared:
        """Record the graph again if a tensor has moved, or if its kind came often enough."""
        if ready.captured and ready.joint.addresses() != ready.addresses:
            ready = slot.ready = replace(ready, run=ready.joint)
        if not ready.captured and self._maker.captures(slot):
            with self._preparing("recording a micro-step"):
                ready = slot.ready = self._maker.captured(ready, inputs, self._seeds(ready.form))
        return ready

    def _run(self, ready: Prepared, inputs: Inputs) -> Added:
        gradients = self.memory.gradients
        if not gradients.are_in_place(ready.joint.used):
            gradients.put_in_place(ready.joint.used)
        if self.mode != ready.mode:
            self.mode = ready.mode
            self.notes.runs_in(self.mode)
        ready.joint.runs += 1
        added = ready.form.read(*ready.run(inputs, self._seeds(ready.form)))
        self._window.record(added.terms)
        return added

    def _seeds(self, form: Form) -> list[Tensor]:
        """Return the seed for the backward of each total; it stays on the device."""
        for dtype in form.dtypes:
            if dtype not in self._likes:
                self._likes[dtype] = torch.zeros((), dtype=dtype, device=self._device)
        return [
            self._window.seed_of(name, self._likes[dtype], weight)
            for name, dtype, weight in zip(form.names, form.dtypes, form.weights, strict=True)
        ]

    def _begin_window(self) -> None:
        """At the start of a window, cast the weights and check that the graphs are still valid."""
        window = self._window
        if window.open is not None and window.open is self._begun:
            return
        self._begun = window.open  # Held, so that no other window gets its identity.
        self.memory.casts.refresh()  # The device casts while the host checks.
        trained = window.target.trained() if window.open is None else window.inputs
        if self.memory.fits(trained):
            self.kinds.begin_window()
        else:
            self.kinds.clear()
            self.memory.reset(trained)

    @property
    def is_eager(self) -> bool:
        """True if micro-steps are eager code, with autograd making the gradients."""
        if self.memory.gradients.lends:
            return False
        kinds = self.kinds.by_key.values()
        is_eager = bool(kinds) and all(kind.is_eager and not any(kind.ready()) for kind in kinds)
        return self._plan.eager or is_eager

    @property
    def progress(self) -> str | None:
        """What the run waits for, or what goes on beside it, for a progress line."""
        return self.notes.work or ("compiling beside the run" if self.kinds.compiling() else None)

    # ---------------------------------------------------------------- prepare

    def _prepare(
        self,
        kind: Kind,
        slot: Slot,
        inputs: Inputs,
        eager: Callable[[], Loss | Terms],
        *,
        compiled: bool,
    ) -> Added:
        """Run this micro-batch eagerly, make its graph, and compare the two."""
        # Eager code may take something out of the micro-batch: keep one as it was.
        try:
            inputs = take_apart(inputs.rebuilt())
        except Exception as problem:  # The user's classes may raise anything.
            reason = f"a micro-batch cannot be built again ({reason_of(problem)})"
            raise CannotTrace(reason) from problem
        on_cuda = self._device.type == "cuda"
        if slot.ready is not None or (on_cuda and is_nearly_full(self._device)):
            self._make_room()
        alone = not self._window.has_losses
        earlier = None
        if not alone and (slot.entry is None or compiled not in slot.entry.proven):
            self.memory.prepare()
            gradients = self.memory.gradients
            earlier = gradients.set_aside(range(len(gradients.parameters)))
        before = ForwardState(self._model)
        began = time.perf_counter()
        with eager_into(self.memory.gradients, self._window):
            loss = eager()
        wait_for(self._device)
        seconds = time.perf_counter() - began
        self.mode = "eager"
        added = Added.of(loss)
        done = EagerResult(inputs, Form.of(loss), added.comparable, before, earlier, alone, seconds)
        del loss
        self._precision.let_go()
        self.memory.settle()  # What is allocated from here on stays: keep it out of the gaps.
        began = time.perf_counter()
        try:
            with self._preparing(f"{'compiling' if compiled else 'tracing'} a micro-step"):
                seeds = self._seeds(done.form)
                slot.ready = step = self._maker.made(slot, done, seeds, compiled=compiled)
        except CannotTrace as reason:
            self._fails(kind, slot, str(reason))
            return added
        except NothingToCompare:  # The next micro-batch may have a gradient.
            return added
        except torch.OutOfMemoryError:
            self._too_large = compiled
            raise
        self.notes.tell(
            f"{'compiled' if step.joint.compiled else 'traced'} a micro-step of "
            f"{step.joint.operations} operations{' and recorded it' if step.captured else ''} in "
            f"{time.perf_counter() - began:.1f} s; {step.joint.fused['products']} weight gradients "
            f"and {step.joint.fused['embeddings']} embeddings add themselves"
        )
        return added

    @contextmanager
    def _preparing(self, what: str) -> Iterator[None]:
        """Put back what trial runs within this context change, and free their memory."""
        before = ForwardState(self._model)
        began = time.perf_counter()
        try:
            with self.notes.working(what):
                yield
        finally:
            before.restore()
            self.kinds.accept_tensors()
            self._plan.spent += time.perf_counter() - began
            empty_cache(self._device)

    def _fails(self, kind: Kind, slot: Slot, reason: str) -> None:
        """Make no more graphs for this kind; and for none, if no kind can be a graph."""
        kind.is_eager = True
        kind.slots.remove(slot)
        self._failures += 1
        if not self.kinds.ready() and self._failures >= _FAILURES:
            self._give_up(reason)
        else:
            self.notes.fell_back(self.execute, "eagerly", reason)

    # ----------------------------------------------------------------- memory

    def _make_room(self) -> None:
        """Free the memory of captured graphs before eager code runs and another graph is made.

        Graphs keep their memory as long as one of them is alive. They are captured again when they
        run.
        """
        if self._device.type != "cuda":
            return
        for slot in self.kinds.slots():
            if slot.ready is not None:
                slot.ready = replace(slot.ready, run=slot.ready.joint)
        self.memory.drop_pool()
        empty_cache(self._device)

    def free_memory(self) -> bool:
        """Use less memory for graphs after running out of it; True if there was any in use.

        Where a graph is compiled, or being compiled, it runs as traced from now on: tuning a kernel
        takes memory. Otherwise eager code runs, and adds into the buffers as before: among the
        activations, its gradients would pin their memory.
        """
        if self._too_large is None and not self.kinds.ready():
            return False
        compiles = bool(self.kinds.compiled() or self.kinds.compiling())
        compiles = bool(compiles or self._too_large)
        self._too_large = None
        if compiles and self._plan.captures:
            self._plan.compiles = False
            self.notes.tell("out of memory: micro-steps run as traced, not compiled")
            self.let_go()
        else:
            buffers = self.memory.gradients
            self._give_up("there is no memory for its graph")
            if buffers.lends:
                self.memory.gradients = buffers
        return True

    def _give_up(self, reason: str) -> None:
        """Stop using joint graphs."""
        self._plan.eager = True
        self.kinds.clear()
        self.memory.reset([])
        self.notes.fell_back(self.execute, "eagerly", reason)
