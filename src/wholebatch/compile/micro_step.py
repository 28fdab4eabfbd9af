"""The executor of micro-steps: eager code, the joint graph, or a CUDA graph of it.

All of them add the same gradients and record the same sums in the window, and one window may mix
them. Each kind of micro-batch (shapes, dtypes, plain values) has a slot, which goes through stages:

    EAGER ─▶ TRACED ─▶ COMPILED

The first micro-batch of a kind always runs eagerly. The graph made for that kind then runs on the
same micro-batch, and must give the same gradients before it is used; so must the compiled graph. On
a CUDA device both are captured as CUDA graphs. In windows 2, 4, 8, 16, … the graph is compared with
eager code again, since Python that a graph was traced from may read something else by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.compile.captured_state import Fingerprint
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
    room_for,
    take_workspace,
)
from wholebatch.compile.graph_check import (
    EagerResult,
    gradients_of,
    hold_against,
    weights_moved,
    without_autocast,
)
from wholebatch.compile.graph_inputs import DeviceCopies, Inputs, Key, take_apart
from wholebatch.compile.joint_graph import JointStep, Prepared
from wholebatch.compile.shared_graphs import SharedGraphs
from wholebatch.compile.symbolic_sizes import Sizes
from wholebatch.compile.trace import Added, Form, State, Traced, trace
from wholebatch.losses.loss import Loss, Terms
from wholebatch.window.autocast import Precision
from wholebatch.window.forward_state import ForwardState

if TYPE_CHECKING:
    from wholebatch.window.ledger import Ledger
    from wholebatch.window.window import Window


class Stage(Enum):
    """The graph of a kind of micro-batch."""

    EAGER = "eager"
    TRACED = "traced"
    COMPILED = "compiled"


@dataclass(eq=False)
class Slot:
    """One kind of micro-batch: its graph, and what is being made of it."""

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


class Executor:
    """Runs the micro-steps of one window after the other.

    `eager(micro, loss)` runs forward and backward with this loss function, records them in the
    window, and returns the loss.
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
        eager: Callable[[Any, Callable[[Any, Any], Any]], Loss | Terms],
    ) -> None:
        self.execute = execute
        self.notes = Notes(asked=execute in ("compile", "graph"))
        self.mode = "eager"
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._loss = loss
        self._window = window
        self._precision = precision
        self._device = device
        self._eager = eager
        self._copies = DeviceCopies(device)
        self._likes: dict[torch.dtype, Tensor] = {}  # one 0-dim tensor of each total's dtype
        self._plan = ExecutePlan.of(execute, device)
        self._begun: Window | None = None  # the window that has begun
        self._compares = False  # True if the next micro-step of a graph is compared again
        self._pool: Any = None
        self._too_large: Stage | None = None  # of the graph that was made when memory ran out
        self._reset()
        reason = window.only_eager
        if reason is not None and not self._plan.eager:
            self._give_up(reason)

    def _reset(self) -> None:
        """Drop every graph and buffer: the state they were made for has changed."""
        self._fingerprint: Fingerprint | None = None
        self._found: tuple[str | None, ...] = ()  # by `changed`, for the next window
        self._parameters: list[nn.Parameter] = []
        self._gradients = Gradients([])
        self._casts = Casts([])
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        self._slots: dict[Key, Slot] = {}
        self._shapes = SharedGraphs(self.notes)

    # ------------------------------------------------------------- micro-step

    def micro_step(self, micro: Any) -> Added:
        """Add one micro-batch's gradients, record its sums in the window, and return them."""
        micro = self._copies(micro)
        if not self._plan.eager:
            try:
                self._reserve()
                added = self._graph_step(micro)
                if added is not None:
                    return added
            except CannotTrace as reason:
                self._give_up(str(reason))
        self.mode = "eager"
        with eager_into(self._gradients, self._window):
            loss = self._eager(micro, self._loss)
        self._settle()
        return Added.of(loss)

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
        if self._fingerprint is None:
            self._parameters = list(self._window.target.trained())
            self._fingerprint = Fingerprint(self._model, self._loss)
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

    def _graph_step(self, micro: Any) -> Added | None:
        """Run this micro-batch in a graph if possible; return None if eager code must run it."""
        inputs = take_apart(micro)
        is_open = self._window.open_early()
        self._begin_window()
        self._plan.micro_batches += 1
        slot = self._slots.setdefault(inputs.key, Slot())
        if slot.ready is not None and not is_open:
            return None  # The seed of the first window is that of its first loss, by eager code.
        if slot.ready is None or not slot.ready.captured:
            slot.seen += 1
        stage = self._advance(slot, inputs)
        if stage is not slot.stage:
            return self._prepare(slot, inputs, micro, compiled=stage is Stage.COMPILED)
        if slot.ready is None:
            return None
        if self._compares and not slot.ready.joint.random:
            self._compares = False
            return self._prepare(slot, inputs, micro, compiled=stage is Stage.COMPILED, again=True)
        if not slot.ready.captured and self._captures(slot):
            slot.ready = self._captured_later(slot.ready, inputs)
        return self._run(slot.ready, inputs)

    def _run(self, ready: Prepared, inputs: Inputs) -> Added:
        if not self._gradients.are_in_place(ready.joint.used):
            self._gradients.put_in_place(ready.joint.used)
        if self.mode != ready.mode:
            self.mode = ready.mode
            self.notes.runs_in(self.mode)
        ready.joint.runs += 1
        added = ready.form.read(*ready.run(inputs.tensors, self._seeds(ready.form)))
        self._window.added.record(added.totals, added.units, added.weights)
        return added

    def _advance(self, slot: Slot, inputs: Inputs) -> Stage:
        """Return the stage that this kind of micro-batch should be in now.

        Where compilation was asked for, the first kinds are compiled at once. Otherwise a thread
        compiles while the graph runs as traced, and the first micro-batch of a window switches.
        """
        plan, stage = self._plan, slot.stage
        first = not self._window.added.micro_batches  # A second loss of a micro-batch never is.
        shared = self._shapes.find(inputs)
        is_compiled = shared is not None and True in shared.joints
        if stage is Stage.EAGER:
            own = sum(one.joint.sizes is None for one in self._ready())
            others = None if shared is None else len(self._ready()) - own
            if not plan.prepares(own, slot.seen, first=first, shared=others):
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
        return [slot.ready for slot in self._slots.values() if slot.ready is not None]

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

    def changed(self) -> bool | None:
        """True if what the code reads has changed since the last window; None if nothing is known.

        The window that begins next takes this answer, and does not compare once more.
        """
        if self._fingerprint is None:
            return None
        self._found = (self._fingerprint.changed(),)
        return self._found != (None,)

    def _begin_window(self) -> None:
        """At the start of a window, check that the graphs are still valid."""
        window = self._window
        if window.open is not None and window.open is self._begun:
            return
        self._begun = window.open  # Held, so that no other window gets its identity.
        self._casts.refresh()  # The device casts while the host checks.
        trained = window.target.trained() if window.open is None else window.inputs
        same = [*map(id, self._parameters)] == [*map(id, trained)]
        if not self._found:
            self.changed()
        changed, self._found = self._found[0] if self._found else None, ()
        self._plan.look_at(changed, made=len(self._ready()))
        if not same or self._fingerprint is None or changed is not None:
            self._reset()
            self._fingerprint = Fingerprint(self._model, self._loss)
            self._parameters = list(trained)
            return
        self._compares = window.is_test_window
        for slot in self._slots.values():
            ready = slot.ready
            if ready is not None and ready.captured and ready.joint.addresses() != ready.addresses:
                slot.ready = None  # A tensor of the model has moved.

    @property
    def is_eager(self) -> bool:
        """True if every micro-step will be eager code, with autograd making the gradients."""
        return self._plan.eager and not self._gradients.lends

    @property
    def progress(self) -> str | None:
        """The work that goes on beside the run, for a progress line."""
        return "compiling beside the run" if self._compiling() else None

    # ---------------------------------------------------------------- prepare

    def _prepare(
        self, slot: Slot, inputs: Inputs, micro: Any, *, compiled: bool, again: bool = False
    ) -> Added:
        """Run this micro-batch eagerly, make its graph, and compare the two.

        `again`: compare the graph that is there.
        """
        if slot.stage is not Stage.EAGER:
            self._make_room(replaces=not again)
        alone = not self._window.added.owners
        earlier = None
        shared = self._shapes.find(inputs)
        proven = slot.traced is not None or (shared is not None and compiled in shared.proven)
        if not alone and (again or not self._window.added.micro_batches or not proven):
            if not self._gradients.parameters:
                self._make_buffers(State.of(self._model, self._parameters))
            earlier = self._gradients.set_aside(range(len(self._gradients.parameters)))
        before = ForwardState(self._model)
        with eager_into(self._gradients, self._window):
            loss = self._eager(micro, self._loss)
        self.mode = "eager"
        added = Added.of(loss)
        results = [*added.totals.values(), *_fractions(added)]
        done = EagerResult(inputs, Form.of(loss), results, before, earlier, alone)
        del loss
        self._precision.let_go()
        self._settle(always=True)  # What is allocated from here on stays: keep it out of the gaps.
        after = ForwardState(self._model)
        began = time.perf_counter()
        try:
            if again:
                self._compare(slot, done)
                return added
            step = self._made(slot, done, compiled=compiled)
            slot.ready = step
        except CannotTrace as reason:
            self._give_up(str(reason))
            return added
        except torch.OutOfMemoryError:
            self._too_large = Stage.COMPILED if compiled else Stage.TRACED
            raise
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

    def _make_room(self, *, replaces: bool) -> None:
        """Free the memory of captured graphs before eager code runs, if it has to.

        It has to where the device or the limit is nearly full, and where one graph `replaces`
        another: graphs keep their memory as long as one of them is alive. They are captured again
        when they run.
        """
        if self._device.type != "cuda":
            return
        if replaces or is_nearly_full(self._device):
            for slot in self._slots.values():
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

    def _compare(self, slot: Slot, done: EagerResult) -> None:
        """Compare the graph that runs with eager code; if they differ, drop all graphs."""
        ready = slot.ready
        assert ready is not None
        try:
            if done.form != ready.form:
                raise CannotTrace("its loss has another form")
            self._compared(ready.joint, ready.run, done)
            self.mode = ready.mode  # Eager code ran for the comparison only.
        except CannotTrace as reason:
            self.notes.stale(f"{reason}", self._window.updates)
            self._plan.look_at("what its code reads", made=1)
            self._drop_graphs()

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
        self, inputs: Inputs, form: Form, state: State, sizes: Sizes | None = None
    ) -> Traced:
        parts = (self._model, self._loss, self._precision, state)
        made = trace(*parts, inputs, form, sizes)
        empty_cache(self._device)
        if self._fingerprint is not None:
            self._fingerprint.watch(made.sources)
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
            shared = self._shapes.serving(
                inputs,
                form,
                [key for key, one in self._slots.items() if one.ready is not None],
                self._slots,
                lambda sizes: self._trace(inputs, form, state, sizes),
            )
            if shared is not None:
                try:
                    joint = shared.joint(joint_of, state, compiled=compiled)
                    waits = compiled in shared.proven and not self._captures(slot)
                    step = self._proven(joint, done, captures=self._plan.captures and not waits)
                except torch.OutOfMemoryError:
                    raise
                except Exception as problem:  # A compiler, or the check, may raise anything.
                    shared.usable = False
                    self._shapes.tell(problem)
                    compiled = compiled and beside is None  # That was the shared graph.
                else:
                    shared.proven.add(compiled)
                    return step
            slot.traced = self._trace(inputs, form, state)
        joint = self._compiled_if_possible(joint_of, slot.traced, compiled)
        try:
            return self._proven(joint, done, captures=self._plan.captures)
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

    def _proven(self, joint: JointStep, done: EagerResult, *, captures: bool) -> Prepared:
        """Run the graph from the same state as eager code, and capture it if the results agree."""
        run: Runnable = joint
        self._compared(joint, joint, done, rehearses=captures)
        if captures:
            run = self._captured(joint, done.inputs, self._seeds(done.form))
            if run is not joint:
                self._compared(joint, run, done)  # What was captured is what will run.
        return Prepared(joint, run, done.form, joint.addresses())

    def _compared(
        self, joint: JointStep, run: Runnable, done: EagerResult, *, rehearses: bool = False
    ) -> None:
        """Run a joint step from the state before eager code ran; raise CannotTrace if it differs.

        A graph that draws random numbers runs, but there is nothing to compare.
        """
        # The trial run writes into the buffers: save the window's gradients first.
        inputs = done.inputs
        held = self._gradients.set_aside(joint.used)
        self._casts.refresh()
        seeds = self._seeds(done.form)

        def results() -> list[Tensor]:
            done.before.restore()
            torch._foreach_zero_(self._gradients.of(joint.used))
            totals, rest = run(inputs.tensors, seeds)
            return [*totals, *_fractions(done.form.read(totals, rest))]

        try:
            found = rehearse(results, self._device, captures=rehearses)
            if not joint.random:
                held_against = partial(hold_against, sixteen_bit=joint.traced.sixteen_bit)
                held_against(found, done.results, "loss")
                wanted = done.gradients(joint.used, held)
                if wanted is not None:
                    buffers = self._gradients.of(joint.used)
                    nearness = partial(self._nearness, joint, done, wanted, seeds)
                    held_against(buffers, wanted, "gradient", nearness=nearness)
        finally:
            self._gradients.put_in_place(joint.used, held)

    def _nearness(
        self, joint: JointStep, done: EagerResult, wanted: Sequence[Tensor], seeds: list[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return two gradients, as far from each other as rounding may bring a graph's gradient.

        They are that of eager code and that in full precision. Where memory is too short for the
        second, they are those of eager code with moved weights and with the weights as they are.
        """
        if done.nearness is not None:
            return done.nearness
        used = [self._gradients.parameters[index] for index in joint.used]

        def gradients(precision: AbstractContextManager[object]) -> list[Tensor]:
            done.before.restore()
            micro = done.inputs.around(done.inputs.tensors)
            made = gradients_of(self._model, self._loss, micro, used, seeds, precision)
            place = room_for(made)
            return [one.to(place) for one in made]

        with suppress(torch.OutOfMemoryError), without_autocast():
            done.nearness = wanted, gradients(nullcontext())
        if done.nearness is None:
            empty_cache(self._device)
            try:
                with weights_moved(used):
                    done.nearness = gradients(self._precision.forward()), wanted
            finally:
                self._precision.let_go()  # It may have kept casts of the moved weights.
        return done.nearness

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
            if self._fingerprint is not None:
                self._fingerprint.accept_tensors()
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


def _fractions(added: Added) -> list[Tensor]:
    """Return the extras that can be compared: not whole numbers, such as predicted classes."""
    return [extra for extra in added.extras.values() if extra.is_floating_point()]
