"""The kinds of micro-batches, and the cache entries that serve each.

A cache entry is a guard set, the program that it guards, and the joint steps that were made of it.
Each kind (shapes, dtypes) has a slot for each entry that serves it: it runs eagerly, then as
traced, then compiled. A graph runs only while its guards hold; after a change, a kind gets another
slot. The graphs of an entry whose guards hold again are used again. An entry of open sizes serves
all kinds that it admits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from wholebatch.compile.capture import Place
from wholebatch.compile.decide import Eager, Ready, Situation
from wholebatch.compile.execute_mode import CannotTrace, Notes, reason_of
from wholebatch.compile.graph_inputs import Inputs, Key
from wholebatch.compile.guards import GuardSet, TorchFunctions
from wholebatch.compile.joint_graph import JointStep, Prepared
from wholebatch.compile.opaque_code import refuse_hooks
from wholebatch.compile.symbolic_sizes import differing, pattern
from wholebatch.compile.trace import Form, Traced
from wholebatch.window.autocast import Precision

Places: TypeAlias = tuple[tuple[Place, ...], ...]

_STATES = 4
"""The most states of what its code reads for which one kind of micro-batch keeps a graph."""
_FORGETS = 0.05
"""More than one change in 20 windows is too many: a new graph each time would not pay."""
_TRIES = 8
"""The most entries of open sizes per pattern.

Another one is made if more sizes differ than at first, or if code or compiler branch on a size.
"""
_KEPT = 256
"""The most kinds of micro-batches that are remembered."""


@dataclass(eq=False)
class CacheEntry:
    """A guard set, the graph of its program, and the joint steps that were made of it."""

    guards: GuardSet
    traced: Traced
    open: Places = ()
    """The dimensions that were left open."""
    joints: dict[bool, JointStep] = field(default_factory=dict)
    """The joint steps; the key is True for the compiled one."""
    proven: set[bool] = field(default_factory=set)
    """The keys of the joint steps whose results matched eager code."""

    @property
    def is_shared(self) -> bool:
        """True if it serves more than one kind."""
        return self.traced.sizes is not None

    def admits(self, inputs: Inputs) -> bool:
        """True if what was asked about its sizes has the same answers for this micro-batch."""
        return self.traced.sizes is None or self.traced.sizes.admit(inputs)

    def joint(self, make: Callable[..., JointStep], *, compiled: bool) -> JointStep:
        """Return the joint step; `make` makes it if it does not exist yet."""
        if compiled not in self.joints:
            self.joints[compiled] = make(self.traced, compiled=compiled)
        return self.joints[compiled]


@dataclass(eq=False)
class Slot:
    """A kind of micro-batch, while its code reads the same."""

    entry: CacheEntry | None = None
    times: int = 0
    """The number of micro-batches of this kind, until its graph is captured."""
    ready: Prepared | None = None


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


class Kinds:
    """All kinds of micro-batches of a run, by their key.

    `reads` is the function whose reads are guarded, in the context `as_read`.
    """

    def __init__(
        self, model: nn.Module, reads: Callable[[Any, Any], Any], precision: Precision, notes: Notes
    ) -> None:
        self._model, self._precision, self._notes = model, precision, notes
        self.reads = reads
        self.as_read: Callable[[], AbstractContextManager[object]] = nullcontext
        self.changes = 0
        """How often a value that the code reads was another one."""
        self.clear()

    def clear(self) -> None:
        """Drop every graph."""
        self.by_key: dict[Key, Kind] = {}
        # By the pattern of micro-batches:
        self._shared: dict[tuple[Hashable, ...], list[CacheEntry]] = {}
        self._failed: dict[tuple[Hashable, ...], list[set[tuple[Place, ...]]]] = {}
        self._functions: TorchFunctions | None = None

    def of(self, key: Key) -> Kind:
        """Return the kind with this key; forget one without graphs if there are too many."""
        kind = self.by_key.setdefault(key, Kind())
        if len(self.by_key) > _KEPT:
            first, *_ = self.by_key
            unused = (
                k
                for k, other in self.by_key.items()
                if other is not kind and not any(other.ready())
            )
            del self.by_key[next(unused, first)]
        return kind

    def slots(self) -> list[Slot]:
        return [slot for kind in self.by_key.values() for slot in kind.slots]

    def ready(self) -> list[Prepared]:
        """Return the graphs of all kinds."""
        return [slot.ready for slot in self.slots() if slot.ready is not None]

    def compiled(self) -> int:
        """Return the number of compiled graphs."""
        return len({id(graph.joint) for graph in self.ready() if graph.joint.compiled})

    def compiling(self) -> int:
        """Return the number of graphs that threads are compiling."""
        futures = {graph.joint.beside for graph in self.ready() if graph.joint.beside is not None}
        return sum(not future.done() for future in futures)

    def begin_window(self) -> None:
        """Forget a part of the changes, and all graphs if a function of torch was replaced."""
        if self._functions is None:
            self._functions = TorchFunctions(self._model)
        elif not self._functions.are_unchanged():
            self.clear()
            self.changes += 1
            self._functions = TorchFunctions(self._model)
        for kind in self.by_key.values():
            kind.changes = max(0.0, kind.changes - _FORGETS)

    def look_up(self, kind: Kind, inputs: Inputs) -> Slot | Eager:
        """Return the slot of what the code reads now, or why this kind runs eagerly."""
        with self.as_traced():
            held = next((slot for slot in kind.slots if self._holds(slot, inputs)), None)
            if held is not None:
                return held
            fresh = next((slot for slot in kind.slots if slot.entry is None), None)
            if kind.is_eager:
                return Eager()
            if fresh is None and kind.slots:
                reason = self._changes_often(kind, inputs)
                if reason is not None:
                    return Eager(reason)
        if fresh is None:
            fresh = Slot()
            kind.slots.insert(0, fresh)
            del kind.slots[_STATES:]
        return fresh

    def _holds(self, slot: Slot, inputs: Inputs) -> bool:
        return slot.entry is not None and slot.entry.guards.hold(self._model, inputs.micro)

    def situation(
        self, kind: Kind, slot: Slot, inputs: Inputs, *, is_open: bool, first: bool
    ) -> Situation:
        """Return what the decision for this micro-batch must know."""
        others = (other for other in self.by_key.values() if other is not kind)
        graphs = [ready for other in others for ready in list(other.ready())[:1]]
        own = sum(ready.joint.sizes is None for ready in graphs)
        is_shared = slot.entry is not None and slot.entry.is_shared
        ready = None
        if slot.ready is not None:
            joint = slot.ready.joint
            ready = Ready(joint.compiled, joint.beside, joint.operations, joint.runs)
        return Situation(
            ready=ready,
            is_open=is_open,
            first=first,
            times=slot.times,
            is_another_slot=len(kind.slots) > 1 or slot.entry is not None,
            is_shared=is_shared,
            shared_is_compiled=is_shared and slot.entry is not None and True in slot.entry.joints,
            own=own,
            others=len(graphs) - own,
            compiled=self.compiled(),
            compiling=self.compiling(),
        )

    def _changes_often(self, kind: Kind, inputs: Inputs) -> str | None:
        """Count a change of what the code reads; return the reason if it changes too often."""
        last = kind.slots[0].entry
        assert last is not None
        self.changes += 1
        kind.changes += 1.0
        if kind.changes <= _STATES - 1:
            return None
        kind.is_eager = True
        value = last.guards.broken_by(self._model, inputs.micro)
        return (
            f"{value} changes often, and a graph is made for one value: put it in the batch as a "
            "tensor"
        )

    @contextmanager
    def as_traced(self) -> Iterator[None]:
        """Be in the state in which the code is traced, which guards look at too."""
        with torch.enable_grad(), self._precision.forward(), self.as_read():
            yield

    def known_entry(self, inputs: Inputs) -> CacheEntry | None:
        """Return the entry of open sizes that serves this micro-batch, if there is one."""
        if not self._shared:
            return None
        with self.as_traced():
            for entry in self._shared.get(pattern(inputs.key), ()):
                if entry.admits(inputs) and entry.guards.hold(self._model, inputs.micro):
                    return entry
        return None

    def new_entry(
        self, inputs: Inputs, form: Form, trace: Callable[[GuardSet], Traced]
    ) -> CacheEntry:
        """Capture the code for this micro-batch, for other sizes too if that pays.

        It pays if another kind of the same pattern is prepared.
        """
        of = pattern(inputs.key)
        prepared = (key for key, kind in self.by_key.items() if any(kind.ready()))
        if any(pattern(key) == of for key in prepared):
            others = [key for key in self.by_key if key != inputs.key and pattern(key) == of]
            entry = self._shared_entry(inputs, form, differing(inputs, others), trace)
            if entry is not None:
                return entry
        guards = self._captured(inputs)
        traced = trace(guards)
        if traced.form != form:
            raise CannotTrace("its loss differs in form from one call to the next")
        return CacheEntry(guards, traced)

    def _shared_entry(
        self, inputs: Inputs, form: Form, places: Places, trace: Callable[[GuardSet], Traced]
    ) -> CacheEntry | None:
        """Capture the code with these dimensions open, unless that has failed before."""
        of, wanted = pattern(inputs.key), set(places)
        tried = self._shared.setdefault(of, [])
        failed = self._failed.setdefault(of, [])
        if not wanted or wanted in failed or len(tried) + len(failed) >= _TRIES:
            return None
        entry = None
        try:
            guards = self._captured(inputs, places)
            entry = CacheEntry(guards, trace(guards), places)
            assert entry.traced.sizes is not None
            if not entry.admits(inputs) or entry.traced.form_for(inputs) != form:
                raise CannotTrace("its own sizes are not among those it is for")
            tried.append(entry)
            if not entry.traced.sizes.all_open:
                failed.append(wanted)
        except torch.OutOfMemoryError:
            raise
        # This uses private parts of torch and runs the model's code: anything may be raised.
        except Exception as problem:
            entry = None
            self._tell(problem)
            failed.append(wanted)
        return entry

    def drop(self, entry: CacheEntry, problem: Exception) -> None:
        """Use this entry no more: its results are not those of eager code, or nothing compiles."""
        self._tell(problem)
        for of, entries in self._shared.items():
            if entry in entries:
                entries.remove(entry)
                self._failed.setdefault(of, []).append(set(entry.open))
        for slot in self.slots():
            if slot.entry is entry:
                slot.entry = slot.ready = None

    def _tell(self, problem: Exception) -> None:
        reason = reason_of(problem)
        self._notes.tell(f"each size of a micro-batch has a graph of its own: {reason}")

    def _captured(self, inputs: Inputs, places: Places = ()) -> GuardSet:
        """Capture what the code does and reads for this micro-batch."""
        refuse_hooks(self._model)
        with self.as_traced():
            guards = GuardSet(self.reads, self._model, inputs, open_places=places)
            if not guards.hold(self._model, inputs.micro):
                value = guards.broken_by(self._model, inputs.micro)
                raise CannotTrace(f"{value} changes at every look")
        return guards

    def accept_tensors(self) -> None:
        """Take tensors that the graphs contain as unchanged: all were put back."""
        for entry in {slot.entry for slot in self.slots()}:
            if entry is not None:
                entry.guards.accept_tensors()
