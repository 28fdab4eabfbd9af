"""The kinds of micro-batches, and the graphs of each: a slot for each state of what the code reads.

Each kind (shapes, dtypes) has a slot, which goes through stages:

    EAGER ─▶ TRACED ─▶ COMPILED

A graph runs only while the guards of what its code reads hold; after a change, a kind gets another
slot. The graphs of a state whose guards hold again are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from wholebatch.compile.execute_mode import CannotTrace, Notes
from wholebatch.compile.graph_inputs import Inputs, Key, without_numbers
from wholebatch.compile.guards import Guards
from wholebatch.compile.joint_graph import Prepared
from wholebatch.compile.refused_code import refuse_hooks, refuse_recurrent_layers
from wholebatch.compile.shared_graphs import SharedGraphs
from wholebatch.compile.symbolic_sizes import Place
from wholebatch.compile.trace import Traced
from wholebatch.window.autocast import Precision

_STATES = 4
"""The most states of what its code reads for which one kind of micro-batch keeps a graph."""
_FORGETS = 0.05
"""More than one change in 20 windows is too many: a new graph each time would not pay."""
_NUMBERS = 4
"""The most numbers in the batch that become sizes at once."""
_KEPT = 256
"""The most kinds of micro-batches that are remembered."""


class Stage(Enum):
    """The graph of a kind of micro-batch."""

    EAGER = "eager"
    TRACED = "traced"
    COMPILED = "compiled"


@dataclass(eq=False)
class Reading:
    """The guards of one state of what the code reads, and the graphs of open sizes traced then."""

    guards: Guards
    shapes: SharedGraphs


@dataclass(eq=False)
class Slot:
    """A kind of micro-batch, while its code reads the same: its graph, and what is made of it."""

    reading: Reading | None = None
    times: int = 0
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
        self._readings: list[Reading] = []
        self.sizes: set[str] = set()
        """The names of numbers in the batch that have changed, and are sizes since."""
        self._constants: set[str] = set()  # such numbers that cannot be symbols of a graph
        self._failed: dict[Key, list[set[tuple[Place, ...]]]] = {}

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

    def with_other_numbers(self, inputs: Inputs) -> int:
        """Return how many kinds differ from this one in the numbers of the batch only."""
        if not inputs.numbers:
            return 0
        alike = inputs.without_numbers
        return sum(without_numbers(key) == alike for key in self.by_key) - 1

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
        """Forget a part of the changes, and the captured graphs whose tensors have moved."""
        for kind in self.by_key.values():
            kind.changes = max(0.0, kind.changes - _FORGETS)
        for slot in self.slots():
            ready = slot.ready
            if ready is not None and ready.captured and ready.joint.addresses() != ready.addresses:
                slot.ready = None

    def slot_of(self, kind: Kind, inputs: Inputs) -> Slot | None:
        """Return the slot of what the code reads now; None if this kind runs eagerly.

        Raise CannotTrace, once, for a kind whose values change too often.
        """
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
                if self._frees_numbers(kind, inputs):
                    return None
                self._note_change(kind, inputs)
        if fresh is None:
            fresh = Slot()
            kind.slots.insert(0, fresh)
            del kind.slots[_STATES:]
            used = {id(slot.reading) for slot in self.slots()}
            self._readings = [reading for reading in self._readings if id(reading) in used]
        return fresh

    def _frees_numbers(self, kind: Kind, inputs: Inputs) -> bool:
        """Make sizes of the numbers that were others in the last slot; True if there are any."""
        last = kind.slots[0].reading
        assert last is not None
        known, now = last.guards.numbers, inputs.integers
        changed = {name for name in known.keys() & now.keys() if known[name] != now[name]}
        changed -= self._constants
        if not 0 < len(changed) <= _NUMBERS:
            return False
        self.changes += 1
        self.sizes |= changed
        return True

    def _fix(self, names: Iterable[str]) -> None:
        """Make these numbers no more sizes: no graph can leave them open."""
        self._constants.update(names)
        self.sizes.difference_update(names)

    def _note_change(self, kind: Kind, inputs: Inputs) -> None:
        """Count a change of what the code reads; raise CannotTrace if it changes too often."""
        last = kind.slots[0].reading
        assert last is not None
        self.changes += 1
        kind.changes += 1.0
        if kind.changes > _STATES - 1:
            kind.is_eager = True
            value = last.guards.broken_by(self._model, inputs.micro)
            raise CannotTrace(
                f"{value} changes often, and a graph is traced for one value: put it in the batch "
                "as a tensor"
            )

    @contextmanager
    def _as_traced(self) -> Iterator[None]:
        """Be in the state in which the code is traced, which guards look at too."""
        with torch.enable_grad(), self._precision.forward(), self.as_read():
            yield

    def known_reading(self, inputs: Inputs) -> Reading | None:
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

    def captured_reading(self, inputs: Inputs) -> Reading:
        """Capture what the code reads for this micro-batch."""
        refuse_hooks(self._model)
        refuse_recurrent_layers(self._model)
        with self._as_traced():
            guards = Guards(self.reads, self._model, inputs.micro, inputs.marked())
            if not guards.hold(self._model, inputs.micro):
                value = guards.broken_by(self._model, inputs.micro)
                raise CannotTrace(f"{value} changes at every look")
        reading = Reading(guards, SharedGraphs(self._notes, self._failed, self._fix))
        self._readings.append(reading)
        return reading

    def accept_tensors(self) -> None:
        """Take tensors that the graphs contain as unchanged: all were put back."""
        for reading in self._readings:
            reading.guards.accept_tensors()
