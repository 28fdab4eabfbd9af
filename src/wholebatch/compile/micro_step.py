"""The executor of micro-steps: eager code, the joint graph, or a CUDA graph of it.

All of them add the same gradients and record the same sums in the window, and one window may mix
them. Each kind of micro-batch (shapes, dtypes, plain values) has a slot, which goes through stages:

    EAGER ─▶ TRACED ─▶ COMPILED

The first micro-batch of a kind always runs eagerly. The graph made for that kind then runs on the
same micro-batch, and must give the same gradients before it is used; so must the compiled graph. On
a CUDA device both are captured as CUDA graphs. A graph runs only while the guards of what its code
reads hold; after a change, a kind gets another slot. What fails for one kind runs eagerly, and the
other kinds keep their graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.compile.compile_thread import in_a_thread
from wholebatch.compile.cuda_graph import CapturedGraph, Runnable, rehearse
from wholebatch.compile.execute_mode import (
    CannotTrace,
    Execute,
    ExecutePlan,
    Notes,
    first_line,
    reason_of,
)
from wholebatch.compile.gradient_buffers import (
    Casts,
    Gradients,
    eager_into,
    empty_cache,
    is_nearly_full,
    take_workspace,
)
from wholebatch.compile.graph_check import EagerResult, GraphCheck
from wholebatch.compile.graph_inputs import DeviceCopies, Inputs, Key, take_apart
from wholebatch.compile.guards import Guards
from wholebatch.compile.joint_graph import JointStep, Prepared
from wholebatch.compile.refused_code import refuse_hooks, refuse_recurrent_layers
from wholebatch.compile.shared_graphs import SharedGraphs
from wholebatch.compile.symbolic_sizes import Place, Sizes
from wholebatch.compile.trace import Added, Form, State, Traced, trace
from wholebatch.losses.loss import Loss, Terms
from wholebatch.window.autocast import Precision
from wholebatch.window.forward_state import ForwardState

if TYPE_CHECKING:
    from wholebatch.window.ledger import Ledger


Eager: TypeAlias = Callable[[Any], Loss | Terms]
"""Runs forward and backward of a micro-batch, records them in the window, and returns the loss."""


class Stage(Enum):
    """The graph of a kind of micro-batch."""

    EAGER = "eager"
    TRACED = "traced"
    COMPILED = "compiled"


_STATES = 4
"""The most states of what its code reads for which one kind of micro-batch keeps a graph."""
_FORGETS = 0.05
"""More than one change in 20 windows is too many: a new graph each time would not pay."""
_KEPT = 256
"""The most kinds of micro-batches that are remembered."""
_FAILURES = 3
"""So many kinds that cannot be one graph, and none that can: the run is eager from then on."""


@dataclass(eq=False)
class Reading:
    """The guards of one state of what the code reads, and the graphs of open sizes traced then."""

    guards: Guards
    shapes: SharedGraphs


@dataclass(eq=False)
class Slot:
    """A kind of micro-batch, while its code reads the same: its graph, and what is made of it."""

    reading: Reading | None = None
    seen: int = 0
    """The number of micro-batches of this kind, until its graph is captured."""
    traced: Traced | None = None
    """The graph for exactly this kind; None if a graph of dynamic sizes serves it."""
    ready: Prepared | None = None

    @property
    def stage(self) -> Stage:
        if self.ready is None:
            return Stage.EAGER
        return Stage.COMPILED if self.ready.joint.compiled else Stage.TRACED


@dataclass(eq=False)
class Kind:
    """Micro-batches with the same tensors: a slot for each state of what the code reads."""

    slots: list[Slot] = field(default_factory=list)
    changes: float = 0.0
    """A decaying count of changes that made graphs invalid."""
    is_eager: bool = False
    """True if it can be no graph, or not for long enough."""

    def ready(self) -> Iterator[Prepared]:
        """Yield its graphs."""
        return (slot.ready for slot in self.slots if slot.ready is not None)


class Executor:
    """Runs the micro-steps of one window after the other.

    A loss function of an adapter may have an attribute `reads`: the user's code inside it, for the
    guards.
    """

    reserves_on: ClassVar[tuple[str, ...]] = ("cuda",)
    """Device types on which gradient memory is reserved before the first micro-step."""

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
        self._loss = loss
        self._reads = getattr(loss, "reads", loss)
        self._as_read: Callable[[], AbstractContextManager[object]] = nullcontext
        self._window = window
        self._precision = precision
        self._device = device
        self._copies = DeviceCopies(device)
        self._likes: dict[torch.dtype, Tensor] = {}  # one 0-dim tensor of each total's dtype
        self._plan = ExecutePlan.of(execute, device)
        self._begun: Any = None  # the window that has begun
        self._failures = 0  # kinds that could not be one graph
        self.changes = 0
        """How often a value that the code reads was another one."""
        self._changes_told = 0  # when `changed` was asked
        self._pool: Any = None
        self._too_large: Stage | None = None  # of the graph that was made when memory ran out
        self._reset()
        reason = window.only_eager
        if reason is not None and not self._plan.eager:
            self._give_up(reason)

    def _reset(self) -> None:
        """Drop every graph and buffer: the state they were made for has changed."""
        self._take([])
        self._gradients = Gradients([])
        self._casts = Casts([])
        self._drop_graphs()

    def _take(self, trained: Sequence[nn.Parameter]) -> None:
        """Note the parameters for which buffers are made; a buffer is laid out as its parameter."""
        self._parameters, self._layout = list(trained), _layout_of(trained)

    def _drop_graphs(self) -> None:
        self._slots: dict[Key, Kind] = {}
        self._readings: list[Reading] = []
        self._failed: dict[Key, list[set[tuple[Place, ...]]]] = {}

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
                self._reserve()
                return self._graph_step(micro, eager)
            except CannotTrace as reason:  # of this micro-batch, before anything ran
                self.notes.fell_back(self.execute, "eagerly", str(reason))
        return None

    @contextmanager
    def by_eager_code(self) -> Iterator[None]:
        """Let eager code add the gradients of a micro-batch within this context."""
        self.mode = "eager"
        with eager_into(self._gradients, self._window):
            yield
        self._settle()

    def guard(
        self,
        reads: Callable[[Any, Any], Any],
        as_read: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Capture this function for the guards, in this context, instead of the loss function."""
        self._reads, self._as_read = reads, as_read

    def let_go(self) -> None:
        """Drop every graph and its memory after an out-of-memory error. They are made again."""
        self._drop_graphs()
        self._pool = None

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
        if not self._parameters:
            self._take(self._window.target.trained())
        self._make_buffers(State.of(self._model, self._parameters))
        self._gradients.of(range(len(self._gradients.parameters)))
        sparse = any(getattr(one, "sparse", False) is True for one in self._model.modules())
        self._gradients.lends = self._window.lends_buffers and not sparse

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

    def _graph_step(self, micro: Any, eager: Eager) -> Added | None:
        """Run this micro-batch in a graph if possible; return None if eager code must run it."""
        inputs = take_apart(micro)
        is_open = self._window.open_early()
        self._begin_window()
        self._plan.micro_batches += 1
        kind = self._kind_of(inputs.key)
        slot = self._slot_of(kind, inputs)
        if slot is None or (slot.ready is not None and not is_open):
            return None  # The seed of the first window is that of its first loss, by eager code.
        if slot.ready is None or not slot.ready.captured:
            slot.seen += 1
        stage = self._advance(kind, slot, inputs)
        if stage is not slot.stage:
            run = partial(eager, micro)
            return self._prepare(kind, slot, inputs, run, compiled=stage is Stage.COMPILED)
        if slot.ready is None:
            return None
        if not slot.ready.captured and self._captures(slot):
            slot.ready = self._captured_later(slot.ready, inputs)
        return self._run(slot.ready, inputs)

    def _kind_of(self, key: Key) -> Kind:
        kind = self._slots.setdefault(key, Kind())
        if len(self._slots) > _KEPT:
            first, *_ = self._slots
            unused = (
                k for k, one in self._slots.items() if one is not kind and not any(one.ready())
            )
            del self._slots[next(unused, first)]
        return kind

    def _slot_of(self, kind: Kind, inputs: Inputs) -> Slot | None:
        """Return the slot of what the code reads now; None if this kind runs eagerly."""
        fresh = None
        with self._as_traced():
            for slot in kind.slots:
                if slot.reading is None:
                    fresh = slot
                elif slot.reading.guards.hold(self._model, inputs.micro):
                    return slot
            if kind.is_eager:
                return None
            if fresh is None and kind.slots:
                fresh = self._after_change(kind, inputs)
        if fresh is None and not kind.slots:
            fresh = Slot()
            kind.slots.append(fresh)
        return fresh

    def _after_change(self, kind: Kind, inputs: Inputs) -> Slot | None:
        """Return a new slot after a change of what the code reads; None if it changes too often."""
        last = kind.slots[0].reading
        assert last is not None
        self.changes += 1
        kind.changes += 1.0
        if kind.changes > _STATES - 1:
            kind.is_eager = True
            value = last.guards.broken_by(self._model, inputs.micro)
            reason = f"{value} changes often, and a graph is traced for one value: put it in the "
            self.notes.fell_back(self.execute, "eagerly", f"{reason}batch as a tensor")
            return None
        slot = Slot()
        kind.slots.insert(0, slot)
        del kind.slots[_STATES:]
        used = {id(one.reading) for each in self._slots.values() for one in each.slots}
        self._readings = [one for one in self._readings if id(one) in used]
        return slot

    @contextmanager
    def _as_traced(self) -> Iterator[None]:
        """Be in the state in which the code is traced, which guards look at too."""
        with torch.enable_grad(), self._precision.forward(), self._as_read():
            yield

    def _known_reading(self, inputs: Inputs) -> Reading | None:
        """Return what the code reads for this micro-batch, if a graph of open sizes knows it.

        Such a graph admits only sizes for which the code takes the same way.
        """
        with self._as_traced():
            for reading in self._readings:
                if reading.shapes.find(inputs) is not None and reading.guards.hold(
                    self._model, inputs.micro
                ):
                    return reading
        return None

    def _captured_reading(self, inputs: Inputs) -> Reading:
        """Capture what the code reads for this micro-batch."""
        refuse_hooks(self._model)
        refuse_recurrent_layers(self._model)
        with self._as_traced():
            guards = Guards(self._reads, self._model, inputs.micro)
            if not guards.hold(self._model, inputs.micro):
                value = guards.broken_by(self._model, inputs.micro)
                raise CannotTrace(f"{value} changes at every look")
        reading = Reading(guards, SharedGraphs(self.notes, self._failed))
        self._readings.append(reading)
        return reading

    def _run(self, ready: Prepared, inputs: Inputs) -> Added:
        if not self._gradients.are_in_place(ready.joint.used):
            self._gradients.put_in_place(ready.joint.used)
        if self.mode != ready.mode:
            self.mode = ready.mode
            self.notes.runs_in(self.mode)
        ready.joint.runs += 1
        added = ready.form.read(*ready.run(inputs.tensors, self._seeds(ready.form)))
        self._window.added.record(added.terms)
        return added

    def _advance(self, kind: Kind, slot: Slot, inputs: Inputs) -> Stage:
        """Return the stage that this kind of micro-batch should be in now.

        Where compilation was asked for, the first kinds are compiled at once. Otherwise a thread
        compiles while the graph runs as traced, and the first micro-batch of a window switches.
        """
        plan, stage = self._plan, slot.stage
        first = not self._window.added.micro_batches  # A second loss of a micro-batch never is.
        slot.reading = slot.reading or self._known_reading(inputs)
        shared = None if slot.reading is None else slot.reading.shapes.find(inputs)
        is_compiled = shared is not None and True in shared.joints
        if stage is Stage.EAGER:
            others = (one for one in self._slots.values() if one is not kind)
            now = [ready for one in others for ready in list(one.ready())[:1]]
            first = first or (len(kind.slots) > 1 and slot.seen > 1)
            own = sum(ready.joint.sizes is None for ready in now)
            by_shared = None if shared is None else len(now) - own
            if not plan.prepares(own, slot.seen, first=first, shared=by_shared):
                return stage
            at_once = plan.compiles_at_once(self._compiled()) or (plan.compiles and is_compiled)
            return Stage.COMPILED if at_once else Stage.TRACED
        if stage is Stage.COMPILED or slot.ready is None or not plan.compiles:
            return stage
        if slot.ready.joint.sizes is not None and is_compiled:
            return Stage.COMPILED  # It only needs a new capture.
        joint = slot.ready.joint
        if joint.beside is not None:
            return Stage.COMPILED if first and joint.beside.done() else stage
        if plan.upgrades(joint.to_compile, self._compiled() + self._compiling(), joint.runs):
            state = State.of(self._model, self._parameters)
            make = partial(self._joint_step, joint.traced, state, inputs, compiled=True)
            self.notes.tell("compiling in a thread beside the run")
            joint.beside = in_a_thread(make, self._device)
        return stage

    def _ready(self) -> list[Prepared]:
        return [slot.ready for slot in self._every_slot() if slot.ready is not None]

    def _every_slot(self) -> list[Slot]:
        return [slot for kind in self._slots.values() for slot in kind.slots]

    def _compiled(self) -> int:
        return len({id(one.joint) for one in self._ready() if one.joint.compiled})

    def _compiling(self) -> int:
        futures = {one.joint.beside for one in self._ready() if one.joint.beside is not None}
        return sum(not future.done() for future in futures)

    def _captures(self, slot: Slot) -> bool:
        """True if a shared graph, which runs this kind as it is, is to be captured for it."""
        return self._plan.records(sum(one.captured for one in self._ready()), slot.seen)

    def _seeds(self, form: Form) -> list[Tensor]:
        """Return the seed for the backward of each total; it stays on the device."""
        for dtype in form.dtypes:
            if dtype not in self._likes:
                self._likes[dtype] = torch.zeros((), dtype=dtype, device=self._device)
        return [
            self._window.seed_of(name, self._likes[dtype], weight)
            for name, dtype, weight in zip(form.names, form.dtypes, form.weights, strict=True)
        ]

    def changed(self) -> bool:
        """True if a graph has noticed another value that the code reads, since this was asked."""
        changed, self._changes_told = self.changes > self._changes_told, self.changes
        return changed

    def _begin_window(self) -> None:
        """At the start of a window, cast the weights and check that the graphs are still valid."""
        window = self._window
        if window.open is not None and window.open is self._begun:
            return
        self._begun = window.open  # Held, so that no other window gets its identity.
        self._casts.refresh()  # The device casts while the host checks.
        trained = window.target.trained() if window.open is None else window.inputs
        if self._layout != _layout_of(trained):
            self._reset()
            self._take(trained)
            return
        for kind in self._slots.values():
            kind.changes = max(0.0, kind.changes - _FORGETS)
        for slot in self._every_slot():
            ready = slot.ready
            if ready is not None and ready.captured and ready.joint.addresses() != ready.addresses:
                slot.ready = None  # A tensor of the model has moved.

    @property
    def is_eager(self) -> bool:
        """True if micro-steps are eager code, with autograd making the gradients."""
        if self._gradients.lends:
            return False
        kinds = self._slots.values()
        is_eager = bool(kinds) and all(one.is_eager and not any(one.ready()) for one in kinds)
        return self._plan.eager or is_eager

    @property
    def progress(self) -> str | None:
        """The work that goes on beside the run, for a progress line."""
        return "compiling beside the run" if self._compiling() else None

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
            inputs = take_apart(inputs.around(inputs.tensors))
        except Exception as problem:  # The user's classes may raise anything.
            reason = f"a micro-batch cannot be built again ({reason_of(problem)})"
            raise CannotTrace(reason) from problem
        on_cuda = self._device.type == "cuda"
        if slot.stage is not Stage.EAGER or (on_cuda and is_nearly_full(self._device)):
            self._make_room()
        alone = not self._window.added.owners
        earlier = None
        shared = None if slot.reading is None else slot.reading.shapes.find(inputs)
        proven = slot.traced is not None or (shared is not None and compiled in shared.proven)
        if not alone and (not self._window.added.micro_batches or not proven):
            if not self._gradients.parameters:
                self._make_buffers(State.of(self._model, self._parameters))
            earlier = self._gradients.set_aside(range(len(self._gradients.parameters)))
        before = ForwardState(self._model)
        with eager_into(self._gradients, self._window):
            loss = eager()
        self.mode = "eager"
        added = Added.of(loss)
        done = EagerResult(inputs, Form.of(loss), added.comparable, before, earlier, alone)
        del loss
        self._precision.let_go()
        self._settle(always=True)  # What is allocated from here on stays: keep it out of the gaps.
        after = ForwardState(self._model)
        began = time.perf_counter()
        try:
            slot.reading = slot.reading or self._captured_reading(inputs)
            step = self._made(slot, done, compiled=compiled)
            slot.ready = step
        except CannotTrace as reason:
            self._fails(kind, slot, str(reason))
            return added
        except torch.OutOfMemoryError:
            self._too_large = Stage.COMPILED if compiled else Stage.TRACED
            raise
        finally:
            after.restore()
            self._accept_tensors()
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

    def _accept_tensors(self) -> None:
        for reading in self._readings:
            reading.guards.accept_tensors()

    def _fails(self, kind: Kind, slot: Slot, reason: str) -> None:
        """Make no more graphs for this kind; and for none, if no kind can be a graph."""
        kind.is_eager = True
        kind.slots.remove(slot)
        self._failures += 1
        if not self._ready() and self._failures >= _FAILURES:
            self._give_up(reason)
        else:
            self.notes.fell_back(self.execute, "eagerly", reason)

    def _make_room(self) -> None:
        """Free the memory of captured graphs before eager code runs and another graph is made.

        Graphs keep their memory as long as one of them is alive. They are captured again when they
        run.
        """
        if self._device.type != "cuda":
            return
        for slot in self._every_slot():
            if slot.ready is not None:
                slot.ready = replace(slot.ready, run=slot.ready.joint)
        self._pool = None
        empty_cache(self._device)

    def free_memory(self) -> bool:
        """Use less memory for graphs after running out of it; True if there was any in use.

        Where a graph is compiled, or being compiled, it runs as traced from now on: tuning a kernel
        takes memory. Otherwise eager code runs, and adds into the buffers as before: among the
        activations, its gradients would pin their memory.
        """
        if self._too_large is None and not self._ready():
            return False
        compiles = self._too_large is Stage.COMPILED or self._compiled() or self._compiling()
        self._too_large = None
        if compiles and self._plan.captures:
            self._plan.compiles = False
            self.notes.tell("out of memory: micro-steps run as traced, not compiled")
            self.let_go()
        else:
            buffers = self._gradients
            self._give_up("there is no memory for its graph")
            if buffers.lends:
                self._gradients = buffers
        return True

    def _state_for(self, done: EagerResult) -> State:
        """Return the tensors of the model for a graph; raise CannotTrace if none can be made."""
        state = State.of(self._model, self._parameters)
        parameters = list(state.trained.values())
        if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters):
            raise CannotTrace("it has sparse gradients, and a graph can add only dense ones")
        if not self._gradients.parameters:
            self._make_buffers(state)
        return state

    def _trace(
        self, slot: Slot, inputs: Inputs, form: Form, state: State, sizes: Sizes | None = None
    ) -> Traced:
        parts = (self._model, self._loss, self._precision, state)
        made = trace(*parts, inputs, form, sizes)
        empty_cache(self._device)
        assert slot.reading is not None
        slot.reading.guards.watch(made.sources, every=made.any_source)
        return made

    def _joint_step(
        self, traced: Traced, state: State, inputs: Inputs, *, compiled: bool
    ) -> JointStep:
        parts = (state, self._gradients, self._casts)
        joint = JointStep(traced, *parts, compiled=compiled, example=inputs.tensors)
        if compiled:
            joint.compile()
        return joint

    def _made(self, slot: Slot, done: EagerResult, *, compiled: bool) -> Prepared:
        """Make the graph for this kind, shared with other sizes if possible, and check it."""
        inputs, form = done.inputs, done.form
        state = self._state_for(done)
        beside = None if slot.ready is None else slot.ready.joint.beside

        def joint_of(traced: Traced, *, compiled: bool) -> JointStep:
            if compiled and beside is not None:
                joint = beside.result()
                joint.hold(state)
                return joint
            return self._joint_step(traced, state, inputs, compiled=compiled)

        if slot.traced is None:
            assert slot.reading is not None
            shapes = slot.reading.shapes
            shared = shapes.serving(
                inputs,
                form,
                [k for k, kind in self._slots.items() if any(kind.ready())],
                self._slots,
                lambda sizes: self._trace(slot, inputs, form, state, sizes),
            )
            if shared is not None:
                try:
                    joint = shared.joint(joint_of, state, compiled=compiled)
                    waits = compiled in shared.proven and not self._captures(slot)
                    captures = self._plan.captures and not waits
                    is_new = not shared.proven
                    step = self._proven(joint, done, state, captures=captures, is_new=is_new)
                except torch.OutOfMemoryError:
                    raise
                except Exception as problem:  # A compiler, or the check, may raise anything.
                    shapes.drop(shared, problem)
                    compiled = compiled and beside is None  # That was the shared graph.
                else:
                    shared.proven.add(compiled)
                    return step
            slot.traced = self._trace(slot, inputs, form, state)
        is_new = slot.ready is None
        joint = self._compiled_if_possible(joint_of, slot.traced, compiled)
        try:
            return self._proven(joint, done, state, captures=self._plan.captures, is_new=is_new)
        except (CannotTrace, torch.OutOfMemoryError):
            raise
        except Exception as problem:  # An operation may refuse what its fake version admitted.
            raise CannotTrace(f"it fails as a graph ({reason_of(problem)})") from problem

    def _compiled_if_possible(
        self, joint_of: Callable[..., JointStep], traced: Traced, compiled: bool
    ) -> JointStep:
        """Compile the graph; if the compiler fails and graphs are captured, run it as traced."""
        try:
            return joint_of(traced, compiled=compiled)
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
            return self._compiled_if_possible(joint_of, traced, False)

    def _proven(
        self, joint: JointStep, done: EagerResult, state: State, *, captures: bool, is_new: bool
    ) -> Prepared:
        """Run the graph from the same state as eager code, and capture it if the results agree.

        A new one that is compiled already also runs as traced: there the limit is narrow.
        """
        run: Runnable = joint
        seeds = self._seeds(done.form)
        check = GraphCheck(
            done, self._gradients, self._casts, seeds, self._model, self._loss, self._precision
        )
        if is_new and joint.compiled:
            with suppress(torch.OutOfMemoryError):  # The compiled graph needs less.
                plain = self._joint_step(joint.traced, state, done.inputs, compiled=False)
                check.compare(plain, plain)
            empty_cache(self._device)
        check.compare(joint, joint, rehearses=captures)
        if captures:
            run = self._captured(joint, done.inputs, seeds)
            if run is not joint:
                check.compare(joint, run)  # What was captured is what will run.
        return Prepared(joint, run, done.form, joint.addresses())

    def _captured_later(self, prepared: Prepared, inputs: Inputs) -> Prepared:
        """Capture a step whose kernels were launched one by one so far."""
        joint, seeds = prepared.joint, self._seeds(prepared.form)
        before = ForwardState(self._model)
        began = time.perf_counter()
        try:
            held = self._gradients.set_aside(joint.used)
            try:
                rehearse(lambda: joint(inputs.tensors, seeds)[0], self._device, captures=True)
            finally:
                self._gradients.put_in_place(joint.used, held)
                del held  # Capturing computes nothing.
            return replace(prepared, run=self._captured(joint, inputs, seeds))
        except CannotTrace as reason:
            self._plan.captures = False
            self.notes.tell(str(reason))
            return prepared
        finally:
            before.restore()
            self._accept_tensors()
            self._plan.spent += time.perf_counter() - began
            empty_cache(self._device)

    def _captured(self, joint: JointStep, inputs: Inputs, seeds: list[Tensor]) -> Runnable:
        """Capture the joint step as a CUDA graph; if CUDA cannot, run the compiled step itself."""
        # Its static inputs stay: they must not lie in the gaps of memory that can be released.
        empty_cache(self._device)
        # A pool whose graphs have all been dropped cannot be used again.
        if self._pool is None or not any(ready.captured for ready in self._ready()):
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
        """Stop using joint graphs."""
        self._plan.eager = True
        self._reset()
        self.notes.fell_back(self.execute, "eagerly", reason)


def _layout_of(parameters: Sequence[nn.Parameter]) -> list[Any]:
    return [(id(one), one.dtype, one.stride()) for one in parameters]
