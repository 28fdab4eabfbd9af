"""The executor of micro-steps: eager code, the joint graph, or a CUDA graph of it.

All of them add the same gradients and record the same sums in the window, and one window may mix
them. The first micro-batch of a kind always runs eagerly. The graph made for that kind then runs on
the same micro-batch, and must give the same gradients before it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.compile.captured_state import Fingerprint, only_reads
from wholebatch.compile.compile_workers import CompileWorkers, Pending, compile_workers
from wholebatch.compile.cuda_graph import CapturedGraph, Runnable, rehearse
from wholebatch.compile.execute_mode import (
    CannotTrace,
    Execute,
    ExecutePlan,
    Notes,
    Speed,
    first_line,
    reason_of,
)
from wholebatch.compile.fused_weight_grad import Adding, can_add_products
from wholebatch.compile.gradient_buffers import (
    Casts,
    Gradients,
    eager_into,
    empty_cache,
    take_workspace,
)
from wholebatch.compile.graph_check import Check, EagerResult, NothingToCompare, gradients_in_full
from wholebatch.compile.graph_inputs import DeviceCopies, Inputs, Key, take_apart
from wholebatch.compile.inductor import is_imported, start_compiler, wait_for_import
from wholebatch.compile.joint_graph import JointStep, Prepared
from wholebatch.compile.kept_steps import drop, entry_of, load, save
from wholebatch.compile.switch_together import SwitchTogether
from wholebatch.compile.symbolic_sizes import SharedGraph, SharedGraphs, Sizes
from wholebatch.compile.trace import Added, Form, State, Traced, totals_of, trace
from wholebatch.losses.loss import Loss, Terms, as_loss
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.precision import SIXTEEN_BIT, Precision

if TYPE_CHECKING:
    from wholebatch.window.window import Window


_PART = 0.25
"""Seconds of a window after which no other part of a graph is loaded in it."""


class Executor:
    """Runs the micro-steps of one window after the other.

    `eager(micro, loss)` runs forward and backward with this loss function, records them in the
    window, and returns the loss.
    `adds`: eager code may add weight gradients by the matrix product itself.
    """

    reserves_on: ClassVar[tuple[str, ...]] = ("cuda",)
    """Device types on which gradient memory is reserved before the first micro-step."""
    compiles_beside_on: ClassVar[tuple[str, ...]] = ("cuda",)
    """Device types for which processes of their own compile."""

    def __init__(
        self,
        execute: Execute,
        *,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        window: Window,
        precision: Precision,
        device: torch.device,
        eager: Callable[[Any, Callable[[Any, Any], Any]], Loss | Terms],
        single: str,
        adds: bool = True,
    ) -> None:
        self.execute = execute
        self.notes = Notes(asked=execute in ("compile", "graph"))
        self.mode = "eager"
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._loss = loss
        self._window = window
        self._precision = precision
        self._device = device
        self._eager = Adding(self._model, window, precision, device, eager, allowed=adds)
        self._single = single
        self._copies = DeviceCopies(device)
        self._likes: dict[torch.dtype, Tensor] = {}  # one 0-dim tensor of each total's dtype
        self._plan = ExecutePlan.of(execute, device)
        self.speed = Speed(device, self.notes)
        self._next_place = 0
        self._pool: Any = None
        self._forward: CompiledForward | None = None
        self._ranks = SwitchTogether()
        self._reset()
        reason = window.only_eager
        if reason is not None and not self._plan.eager:
            self._plan.compiles = False
            self._give_up(reason)
        self._workers: CompileWorkers | None = None
        if not self._plan.auto:
            self._start_compiler()

    def _reset(self) -> None:
        """Drop every graph and buffer: the state they were made for has changed."""
        self._fingerprint: Fingerprint | None = None
        self._found: tuple[str | None, ...] = ()  # by `changed`, for the next window
        self._parameters: list[nn.Parameter] = []
        self._gradients = Gradients([])
        self._casts = Casts([])
        self._steps: dict[Key, Prepared] = {}
        self._traced: dict[Key, Traced] = {}
        self._seen: dict[Key, int] = {}
        self._shapes = SharedGraphs(self.notes)
        self._coming: dict[Key, _Coming] = {}
        self._entries: dict[Key, Path | None] = {}  # on disk

    # ------------------------------------------------------------- micro-step

    def micro_step(self, micro: Any, *, reduces: bool = False) -> Added:
        """Add one micro-batch's gradients, record its sums in the window, and return them.

        `reduces`: a backward of eager code is to reduce the gradients over the ranks.
        """
        micro = self._copies(micro)
        self._eager.reduces = reduces
        if not self._plan.eager:
            try:
                self._reserve()
                added = self._graph_step(micro, last=reduces)
                if added is not None:
                    return added
            except CannotTrace as reason:
                self._give_up(str(reason))
        if self._forward is not None:
            try:
                self.mode = "compiled forward"
                return Added.of(self._forward(micro), self._single)
            except CannotTrace as reason:
                self._forward = None
                self.notes.fell_back(self.execute, "eagerly", f"torch.compile fails ({reason})")
        self.mode = "eager"
        # Once no graph is to come, there is nothing to compare eager code with.
        timed = nullcontext() if self._plan.eager else self.speed.timed(self.mode)
        with eager_into(self._gradients, self._window), timed:
            loss = self._eager(micro, self._loss)
        self._settle()
        return Added.of(loss, self._single)

    def let_go(self) -> None:
        """Drop every graph and its memory after an out-of-memory error. They are made again."""
        self._steps.clear()
        self._traced.clear()
        self._seen.clear()
        self._shapes = SharedGraphs(self.notes)
        self._coming.clear()
        self._pool = None
        self._next_place = 0

    def _reserve(self) -> None:
        """Allocate the gradient buffers in one block before the first micro-step.

        Otherwise autograd would allocate the first gradients among the activations of its backward,
        and the optimizer its state beside them. Both would pin that memory for good.
        """
        if self._device.type not in self.reserves_on:
            return
        if self._window.updates or self._gradients.parameters:
            return
        empty_cache(self._device)  # The buffers must not fill gaps left by earlier work either.
        take_workspace(self._device)
        self._look_at_parameters()
        self._make_buffers(State.of(self._model, self._parameters))
        self._gradients.of(range(len(self._gradients.parameters)))
        sparse = any(getattr(one, "sparse", False) is True for one in self._model.modules())
        self._gradients.lends = self._window.lends_buffers and not sparse

    def _look_at_parameters(self) -> None:
        """Note which parameters are trained, and what the code reads."""
        if self._fingerprint is None:
            self._parameters = list(self._window.target.trained())
            self._fingerprint = Fingerprint(self._model, self._loss)

    def _settle(self, *, always: bool = False) -> None:
        """In the first window, move the gradients into their buffers and release cached memory."""
        first = always or not self._window.updates
        if first and self._device.type in self.reserves_on and not self._plan.eager:
            self._gradients.take_in()
            empty_cache(self._device)

    def _make_buffers(self, state: State) -> None:
        parameters = list(state.trained.values())
        self._gradients = Gradients(parameters)
        self._casts = Casts(parameters)

    def _graph_step(self, micro: Any, *, last: bool) -> Added | None:
        """Run this micro-batch in a graph if possible; return None if eager code must run it."""
        inputs = take_apart(micro)
        is_open = self._window.open_early()
        self._look_at_the_window()
        self._plan.micro_batches += 1
        prepared = self._steps.get(inputs.key)
        if prepared is not None and not is_open:
            return None  # The seed of the first window is that of its first loss, by eager code.
        if prepared is None or not prepared.captured:
            self._seen[inputs.key] = self._seen.get(inputs.key, 0) + 1
        if prepared is None:
            self._start_compiler()
            if inputs.key in self._coming:
                compiled = not self._plan.auto or self._has_come(inputs.key)
                # Until it has come, replay the operations as traced.
                if self._window.now.micro_batches or not (compiled or self._plan.captures):
                    return None
                return self._prepare(inputs, micro, compiled=compiled)
            shared = self._shapes.find(inputs)
            if not self._prepares(inputs, shared):
                return None
            if self._plan.auto and self._workers is not None and not self._steps:
                return self._prepare(inputs, micro, compiled=True, beside=True)
            at_once = self._plan.compiles_at_once(self._compiled(), shared=self._shapes.serve)
            return self._prepare(inputs, micro, compiled=at_once or self._shapes.ready(inputs))
        joint = prepared.joint
        if not joint.compiled and self._upgrades(inputs, joint):
            return self._prepare(inputs, micro, compiled=True)
        if not self._gradients.are_in_place(joint.used):
            self._gradients.put_in_place(joint.used)
        if not prepared.captured and self._records(inputs):
            prepared = self._steps[inputs.key] = self._recorded(prepared, inputs)
        self.mode = prepared.mode
        joint.runs += 1
        with self.speed.timed(self.mode):
            results = prepared.run(inputs.tensors, self._seeds(prepared.form))
        added = prepared.form.read(*results)
        self._window.current.record(added.totals, added.units, added.weights)
        return added

    def _seeds(self, form: Form) -> list[Tensor]:
        """Return the seed for the backward of each total; it stays on the device."""
        for dtype in form.dtypes:
            if dtype not in self._likes:
                self._likes[dtype] = torch.zeros((), dtype=dtype, device=self._device)
        return [
            self._window.current.seed_of(name, self._likes[dtype], weight)
            for name, dtype, weight in zip(form.names, form.dtypes, form.weights, strict=True)
        ]

    def _prepares(self, inputs: Inputs, shared: SharedGraph | None) -> bool:
        own = sum(step.joint.sizes is None for step in self._steps.values())
        others = None if shared is None else len(self._steps) - own
        own += sum(key not in self._steps for key in self._coming)
        # A second loss of each micro-batch is never the window's first.
        first = not self._window.now.micro_batches
        return self._plan.prepares(own, self._seen[inputs.key], first=first, shared=others)

    def _records(self, inputs: Inputs) -> bool:
        """True if a shared graph, which runs this kind as it is, is to be captured for it."""
        recorded = sum(step.captured for step in self._steps.values())
        return self._plan.records(recorded, self._seen[inputs.key])

    def _upgrades(self, inputs: Inputs, joint: JointStep) -> bool:
        if joint.sizes is not None and self._shapes.ready(inputs):
            # It is compiled already and only needs a new CUDA graph capture.
            return self._plan.compiles
        if inputs.key in self._coming:
            return not self._window.now.micro_batches and self._has_come(inputs.key)
        if not self._plan.upgrades(joint.to_compile, self._compiled(), joint.runs):
            return False
        if self._workers is None:
            return True
        shared = self._shapes.find(inputs) if joint.sizes is not None else None
        if shared is None or all(
            one.joint.sizes is not joint.sizes for one in self._coming.values()
        ):
            state = State.of(self._model, self._parameters)
            traced = self._traced[inputs.key] if shared is None else shared.traced
            self._send(self._made_of(traced, state, inputs, compiled=True), inputs)
        return False

    def changed(self) -> bool | None:
        """True if what the code reads has changed since the last window; None if nothing is known.

        The window that begins next takes this answer, and does not compare once more.
        """
        if self._fingerprint is None:
            return None
        self._found = (self._fingerprint.changed(),)
        return self._found != (None,)

    def _look_at_the_window(self) -> None:
        """At the start of a window, check that the graphs are still valid."""
        window = self._window
        if window.now.micro_batches == self._next_place and self._next_place:
            self._next_place += 1
            return
        self._next_place = window.now.micro_batches + 1
        self._casts.refresh()  # The device casts while the host checks.
        trained = window.target.trained() if window.open is None else window.now.inputs
        same = len(self._parameters) == len(trained) and all(
            a is b for a, b in zip(self._parameters, trained, strict=True)
        )
        if not self._found:
            self.changed()
        changed, self._found = self._found[0] if self._found else None, ()
        self._plan.look_at(changed, made=len(self._steps) + len(self._coming))
        if not same or self._fingerprint is None or changed is not None:
            self._reset()
            self._fingerprint = Fingerprint(self._model, self._loss)
            self._parameters = list(trained)
            return
        for key, prepared in list(self._steps.items()):
            if prepared.captured and prepared.joint.addresses() != prepared.addresses:
                del self._steps[key]  # A tensor of the model has moved.

    def _compiled(self) -> int:
        return len({id(s.joint) for s in self._steps.values() if s.joint.compiled})

    @property
    def by_autograd(self) -> bool:
        """True if autograd itself adds every gradient of a micro-batch."""
        return self._plan.eager and not self._eager.possible

    @property
    def is_eager(self) -> bool:
        """True if no graph is to come."""
        return self._plan.eager

    @property
    def is_plain(self) -> bool:
        """True if every micro-step will be eager code, with autograd adding the gradients."""
        return self._plan.eager and self._forward is None and not self._eager.replaces

    # ---------------------------------------------------------------- compile

    def _start_compiler(self) -> None:
        """Start the processes that compile; they need seconds until they can."""
        if self._workers is None and self._plan.compiles:
            if self._device.type in self.compiles_beside_on:
                self._workers = compile_workers(self._device)
            if self._device.type == "cuda" and self._workers is None:
                start_compiler(with_processes=True)

    def look_ahead(self, micro: Any, *, known: bool) -> None:
        """Find or make the graph of the first micro-batch before the first test of the model.

        `known`: another process has left the outcome of that test, and probably its graph: the
        compiler is imported beside the first micro-step. Otherwise the graph is compiled beside the
        test. What cannot be done here is tried again, and explained, in the first micro-step.
        """
        if self._plan.eager or self._steps or self._coming or self._window.open is not None:
            return
        if self._precision.name == "fp8":
            return
        try:
            inputs = take_apart(self._copies(micro))
            self._look_at_parameters()
            state = State.of(self._model, self._parameters)
            entry = self._entry(inputs.key, state)
            if known:
                if self._device.type == "cuda" and self._plan.compiles and not self._plan.auto:
                    start_compiler(with_processes=False)
            elif entry is None or not entry.exists():
                self._compile_ahead(inputs, state)
        except Exception as problem:  # The model's own code may raise anything.
            self.notes.tell(f"no graph before the first micro-step: {reason_of(problem)}")

    def _compile_ahead(self, inputs: Inputs, state: State) -> None:
        """Trace the graph of the first micro-batch, and have it compiled."""
        starts = self._plan.compiles and not self._plan.auto and self._workers is not None
        if not starts or self._is_tight():
            return
        # A first call may find things out that a trace would hide from it.
        only_read = only_reads(self._model, self._loss)
        with ForwardState(self._model), only_read, torch.no_grad(), self._precision.forward():
            loss = as_loss(self._loss(self._model, inputs.around(inputs.tensors)))
        form = Form.of(loss, self._single)
        if any(dtype in SIXTEEN_BIT for dtype in form.dtypes):
            return
        self._reserve()
        traced = self._trace(inputs, form, state)
        if not traced.random:
            if not self._gradients.parameters:
                self._make_buffers(state)
            self._send(self._made_of(traced, state, inputs, compiled=True), inputs)
            self._traced[inputs.key] = traced

    def _is_tight(self) -> bool:
        """True if the first test of the model could lack the memory of the gradients."""
        if self._device.type != "cuda":
            return False
        free, all_of_it = torch.cuda.mem_get_info(self._device)
        return free < all_of_it / 2

    def _send(self, joint: JointStep, inputs: Inputs) -> None:
        """Have the pieces of this joint step compiled beside the run."""
        pending = self._pending(joint)
        self._coming[inputs.key] = _Coming(joint, pending)
        if pending is not None and not pending.done:
            self.notes.show(f"compiling beside the run, about {pending.seconds_left:.0f} s left")

    def _pending(self, joint: JointStep) -> Pending | None:
        """Give the pieces of a joint step to the workers, if there are any that can read them."""
        if self._workers is None:
            return None
        try:
            pending = self._workers.compile(joint.jobs())
        except PicklingError as problem:
            self.notes.tell(f"compiled in the training process: {first_line(problem)}")
            return None
        if self._device.type == "cuda" and not self._plan.auto:
            # Earlier it would take its time from the first windows.
            start_compiler(with_processes=False)
        return pending

    def _has_come(self, key: Key) -> bool:
        """True if this joint step is compiled, or must be compiled here, on all ranks.

        It is loaded a part in every window, so that none takes much longer than the others.
        """
        coming = self._coming[key]
        if coming.pending is not None:
            if self._device.type == "cuda" and (self._steps or coming.pending.done):
                start_compiler(with_processes=False)  # Beside a recorded graph, it has time.
            if not coming.pending.done or not is_imported():
                return False
            if coming.pending.problem is None and not coming.is_loaded(self._window.updates):
                return False
        return self._ranks.may_switch(self._window.updates)

    def _compile(self, joint: JointStep, key: Key) -> bool:
        """Compile a joint step: load what the workers have compiled, and compile what is left.

        False if a kernel in it computes wrongly: it is made again without that kernel.
        """
        coming = self._coming.pop(key, None)
        pending = self._pending(joint) if coming is None else coming.pending
        if pending is not None:
            pending.wait()
            if pending.problem is not None:
                self.notes.show(
                    f"a process that compiles failed ({pending.problem}): this one compiles"
                )
        for _ in joint.loading() if coming is None else coming.loading:
            pass
        return joint.loaded

    @property
    def progress(self) -> str | None:
        """The work that goes on beside the run, for a progress line."""
        for coming in self._coming.values():
            if coming.pending is not None and not coming.pending.done:
                return f"compiling beside the run, about {coming.pending.seconds_left:.0f} s left"
        return None

    # ---------------------------------------------------------------- prepare

    def _prepare(
        self, inputs: Inputs, micro: Any, *, compiled: bool, beside: bool = False
    ) -> Added:
        """Run this micro-batch eagerly, make its graph, and compare the two.

        `beside`: only trace the graph, and have it compiled beside the run.
        """
        alone = not self._window.now.owners
        earlier = None
        if not alone and (
            not self._window.now.micro_batches
            or self._shapes.wants_proof(inputs, self._traced, compiled=compiled)
        ):
            if not self._gradients.parameters:
                self._make_buffers(State.of(self._model, self._parameters))
            earlier = self._gradients.in_all()
        before = ForwardState(self._model)
        with eager_into(self._gradients, self._window):
            loss = self._eager(micro, self._loss)
        self.mode = "eager"
        added = Added.of(loss, self._single)
        results = [*(total.detach() for total in totals_of(loss)), *_fractions(added)]
        done = EagerResult(inputs, Form.of(loss, self._single), results, before, earlier, alone)
        del loss
        self._precision.let_go()
        self._settle(always=True)  # What is allocated from here on stays: keep it out of the gaps.
        after = ForwardState(self._model)
        began = time.perf_counter()
        try:
            if beside:
                self._begin(done)
                return added
            step = self._made(done, compiled=compiled)
            self._steps[inputs.key] = step
        except CannotTrace as reason:
            self._give_up(str(reason))
            return added
        finally:
            after.restore()
            if self._fingerprint is not None:
                self._fingerprint.accept_tensors()
            self._plan.spent += time.perf_counter() - began
        # The memory of eager code and of the trial run is not needed again.
        empty_cache(self._device)
        self.notes.tell(
            f"{'compiled' if step.joint.compiled else 'traced'} a micro-step of "
            f"{step.joint.operations} operations{' and recorded it' if step.captured else ''} in "
            f"{time.perf_counter() - began:.1f} s; {step.joint.fused['products']} weight gradients "
            f"and {step.joint.fused['embeddings']} embeddings add themselves"
        )
        return added

    def _begin(self, done: EagerResult) -> None:
        """Trace the graph for this kind, and have it compiled beside the run."""
        state = self._state_for(done)
        inputs = done.inputs
        made = None
        if inputs.key not in self._traced:
            made = self._kept(done, state)
            if made is None:
                self._traced[inputs.key] = self._trace(inputs, done.form, state)
                return  # The next window does the rest.
        self._send(
            made or self._made_of(self._traced[inputs.key], state, inputs, compiled=True), inputs
        )

    def _state_for(self, done: EagerResult) -> State:
        """Return the tensors of the model for a graph; raise CannotTrace if none can be made."""
        if self._window.now.known is not None and any(d in SIXTEEN_BIT for d in done.form.dtypes):
            raise CannotTrace("its totals are 16-bit sums, whose seed changes with the first one")
        state = State.of(self._model, self._parameters)
        parameters = list(state.trained.values())
        if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters):
            raise CannotTrace("it has sparse gradients, and a graph adds dense ones")
        if not self._gradients.parameters:
            self._make_buffers(state)
        return state

    def _trace(
        self, inputs: Inputs, form: Form, state: State, sizes: Sizes | None = None
    ) -> Traced:
        parts = (self._model, self._loss, self._precision, state)
        made = trace(*parts, inputs, form, self._single, sizes)
        empty_cache(self._device)
        if self._fingerprint is not None:
            self._fingerprint.watch(made.sources)
        return made

    def _made_of(
        self, traced: Traced, state: State, inputs: Inputs, *, compiled: bool
    ) -> JointStep:
        parts = (state, self._gradients, self._casts)
        return JointStep(traced, *parts, compiled=compiled, example=inputs.tensors)

    def _made(self, done: EagerResult, *, compiled: bool) -> Prepared:
        """Make the graph for this kind, shared with other sizes if possible, and check it."""
        inputs, form = done.inputs, done.form
        state = self._state_for(done)
        ahead = self._traced.get(inputs.key)
        if ahead is not None and ahead.sizes is None and ahead.form != form:
            del self._traced[inputs.key]
            self._coming.pop(inputs.key, None)

        def traced(sizes: Sizes | None = None) -> Traced:
            return self._trace(inputs, form, state, sizes)

        def make(traced: Traced, *, compiled: bool) -> JointStep:
            coming = self._coming.get(inputs.key) if compiled else None
            if coming is None:
                joint = self._made_of(traced, state, inputs, compiled=compiled)
            else:
                joint = coming.joint
                joint.hold(state)
            if compiled and not self._compile(joint, inputs.key):
                return make(traced, compiled=True)
            return joint

        if inputs.key not in self._traced:
            shared = self._shapes.serving(inputs, form, self._steps, self._seen, traced)
            if shared is not None:
                try:
                    joint = shared.joint(make, state, compiled=compiled)
                    waits = compiled in shared.proven and not self._records(inputs)
                    step = self._proven(joint, done, captures=self._plan.captures and not waits)
                except torch.OutOfMemoryError:
                    raise
                except Exception as problem:  # A compiler, or the check, may raise anything.
                    shared.usable = False
                    self._shapes.tell(problem)
                else:
                    shared.proven.add(compiled)
                    return step
            loaded = self._loaded(done, state) if compiled else None
            if loaded is not None:
                return loaded
            self._traced[inputs.key] = traced()
        joint = self._joint(make, self._traced[inputs.key], compiled)
        try:
            step = self._proven(joint, done, captures=self._plan.captures)
            self._keep(joint, inputs.key)
            return step
        except (CannotTrace, torch.OutOfMemoryError):
            raise
        except Exception as problem:  # An operation may refuse what its fake version admitted.
            raise CannotTrace(f"it fails as a graph ({reason_of(problem)})") from problem

    def _kept(self, done: EagerResult, state: State) -> JointStep | None:
        """Return the joint step that another process has kept for this kind, if there is one."""
        if self._steps or not done.alone or self._precision.name == "fp8":
            return None
        entry = self._entry(done.inputs.key, state)
        kept = None if entry is None else load(entry)
        if kept is None:
            return None
        return JointStep.of_kept(kept, done.form, state, self._gradients, self._casts)

    def _entry(self, key: Key, state: State) -> Path | None:
        """Return the file of the joint step for this kind; None if its key cannot be known."""
        if key not in self._entries:
            tensors = [list(state.trained), list(state.others), self._single]
            options = [vars(JointStep)[name] for name in ("fusions", "blocks")]
            options += [can_add_products(self._device), find_spec("triton") is not None]
            parts = (self._precision.name, key, tensors, options)
            self._entries[key] = entry_of("step", self._model, self._loss, self._device, *parts)
        return self._entries[key]

    def _loaded(self, done: EagerResult, state: State) -> Prepared | None:
        """Return the step that another process has kept, if it gives what eager code gives."""
        key = done.inputs.key
        if key in self._coming:
            joint: JointStep | None = self._coming[key].joint
        else:
            joint = self._kept(done, state)
        if joint is None:
            return None
        joint.hold(state)
        try:
            if self._compile(joint, key):
                return self._proven(joint, done, captures=self._plan.captures, sure=True)
        except torch.OutOfMemoryError:
            raise
        except NothingToCompare:
            pass
        except Exception as problem:  # A compiler, or the check, may raise anything.
            entry = self._entries.get(key)
            if entry is not None:
                drop(entry, reason_of(problem))
        return None

    def _keep(self, joint: JointStep, key: Key) -> None:
        """Keep a joint step that was compared with eager code for the next process."""
        entry = self._entries.get(key)
        kept = None if entry is None or not joint.compiled else joint.kept()
        if entry is not None and kept is not None:
            save(entry, kept)

    def _joint(self, make: Callable[..., JointStep], traced: Traced, compiled: bool) -> JointStep:
        """Compile the graph; if the compiler fails and graphs are captured, run it as traced."""
        try:
            return make(traced, compiled=compiled)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # A compiler may raise anything; the traced graph still runs.
            reason = reason_of(problem)
            if not compiled:
                raise CannotTrace(reason) from problem
            if not self._plan.captures:
                raise CannotTrace(f"it cannot be compiled ({reason})") from problem
            self._plan.compiles = False
            self.notes.fell_back(self.execute, "as traced", f"it cannot be compiled ({reason})")
            return self._joint(make, traced, False)

    def _proven(
        self, joint: JointStep, done: EagerResult, *, captures: bool, sure: bool = False
    ) -> Prepared:
        """Run the graph from the same state as eager code, and capture it if the results agree.

        With `sure`, there must be something to compare, and they agree as well as they once did.
        """
        # The trial run writes into the buffers: save the window's gradients first.
        inputs = done.inputs
        held = self._gradients.set_aside(joint.used)
        self._casts.refresh()
        seeds = self._seeds(done.form)

        def run(step: Runnable = joint) -> list[Tensor]:
            done.before.restore()
            self._gradients.zero(joint.used)
            totals, rest = step(inputs.tensors, seeds)
            return [*totals, *_fractions(done.form.read(totals, rest))]

        def in_full() -> list[Tensor]:
            used = [self._gradients.parameters[index] for index in joint.used]
            done.before.restore()
            micro = inputs.around(inputs.tensors)
            return gradients_in_full(self._model, self._loss, micro, used, seeds)

        try:
            found = rehearse(run, self._device, captures=captures)
            if not joint.random:
                known = joint.distance if sure else None
                check = Check(sixteen_bit=joint.sixteen_bit, known=known)
                wanted = done.gradients(joint.used, held)
                if wanted is None and sure:
                    raise NothingToCompare

                def compare(found: list[Tensor]) -> None:
                    check.hold_against(found, done.results, "loss")
                    if wanted is not None:
                        buffers = self._gradients.of(joint.used)
                        check.hold_against(buffers, wanted, "gradient", truth=in_full)

                compare(found)
                joint.distance = check.distance
            step = self._captured(joint, inputs, seeds) if captures else joint
            if step is not joint and not joint.random:
                compare(run(step))  # What was recorded is what will run.
        finally:
            self._gradients.put_back(joint.used, held)
        return Prepared(joint, step, done.form, joint.addresses())

    def _recorded(self, prepared: Prepared, inputs: Inputs) -> Prepared:
        """Capture a step whose kernels were launched one by one so far."""
        joint, seeds = prepared.joint, self._seeds(prepared.form)
        before = ForwardState(self._model)
        held = self._gradients.set_aside(joint.used)
        began = time.perf_counter()
        try:
            rehearse(lambda: joint(inputs.tensors, seeds)[0], self._device, captures=True)
            return replace(prepared, run=self._captured(joint, inputs, seeds))
        except CannotTrace as reason:
            self._plan.captures = False
            self.notes.tell(str(reason))
            return prepared
        finally:
            self._gradients.put_back(joint.used, held)
            before.restore()
            if self._fingerprint is not None:
                self._fingerprint.accept_tensors()
            self._plan.spent += time.perf_counter() - began

    def _captured(self, joint: JointStep, inputs: Inputs, seeds: list[Tensor]) -> Runnable:
        """Capture the joint step as a CUDA graph; if CUDA cannot, run the compiled step itself."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            return CapturedGraph(joint, inputs.tensors, seeds, pool=self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            reason = f"CUDA cannot record it ({first_line(problem)})"
            if joint.sizes is not None:
                # A graph for this kind alone may still be captured.
                raise CannotTrace(reason) from problem
            self._plan.captures = False
            if not joint.compiled:
                raise CannotTrace(reason) from problem
            self.notes.fell_back(self.execute, "compiled, launched one by one", reason)
            return joint

    def _give_up(self, reason: str) -> None:
        """Stop using joint graphs; if compilation was asked for, use a compiled forward instead."""
        self._plan.eager = True
        self._ranks.announce()
        self._reset()
        compiles = self._plan.compiles and self._precision.name != "fp8"
        if self.execute in ("compile", "graph") and compiles:
            eager = self._eager.plain
            self._forward = CompiledForward(self._model, self._loss, self._window, eager)
        how = "eagerly" if self._forward is None else "with a compiled forward only"
        self.notes.fell_back(self.execute, how, reason)


@dataclass
class _Coming:
    """A joint step that is compiled beside the run; `pending` is None if this process must."""

    joint: JointStep
    pending: Pending | None
    window: int = -1

    def __post_init__(self) -> None:
        self.loading = self.joint.loading()

    def is_loaded(self, window: int) -> bool:
        """Load another part in the window of this number; True if there is none left."""
        until = time.perf_counter() + _PART
        try:
            while window != self.window and time.perf_counter() < until:
                next(self.loading)
        except StopIteration:
            return True
        except torch.OutOfMemoryError:
            raise
        except Exception:  # A compiler may raise anything; whoever loads the rest says so.
            self.loading = self.joint.loading()
            return True
        self.window = window
        return False


def _fractions(added: Added) -> list[Tensor]:
    """Return the extras that can be compared: not whole numbers, such as predicted classes."""
    return [extra for extra in added.extras.values() if extra.is_floating_point()]


class CompiledForward:
    """Micro-steps by torch.compile over ordinary autograd, where one joint graph is impossible.

    torch.compile inspects the model's Python at every call and compiles the parts between graph
    breaks. So it supports hooks, side effects and checkpointing with dropout, and still fuses most
    of the work. Autograd adds the gradients, and every micro-batch casts the weights again.
    A call raises CannotTrace if the first one fails.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        window: Window,
        eager: Callable[[Any, Callable[[Any, Any], Any]], Loss | Terms],
    ) -> None:
        self._model = model
        self._window = window
        self._eager = eager
        wait_for_import()
        self._loss: Callable[[Any, Any], Any] = torch.compile(loss)
        self._proven = False

    def __call__(self, micro: Any) -> Loss | Terms:
        if self._proven:
            return self._eager(micro, self._loss)
        before = ForwardState(self._model)
        entered = len(self._window.now.owners)
        try:
            loss = self._eager(micro, self._loss)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # A compiler may raise anything.
            if self._window.now.broken or len(self._window.now.owners) != entered:
                # It failed after the backward began: some of its gradients are already added.
                raise
            before.restore()
            raise CannotTrace(reason_of(problem)) from problem
        self._proven = True
        return loss
