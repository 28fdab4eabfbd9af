"""Graphs with dynamic shapes, each shared by all shapes of micro-batches that it is valid for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from wholebatch.compile.execute_mode import CannotTrace, Notes, reason_of
from wholebatch.compile.graph_inputs import Inputs, Key
from wholebatch.compile.joint_graph import JointStep
from wholebatch.compile.symbolic_sizes import Place, Sizes, differing, is_open, pattern
from wholebatch.compile.trace import Form, State, Traced

_TRIES = 3
"""The most graphs of open sizes per pattern.

Another one is made if more sizes differ than at first, or if code or compiler branch on a size.
"""
_KEPT = 1024
"""The most kinds for which it is remembered if a graph serves them."""


class SharedGraph:
    """A graph of open sizes, and its joint steps: as traced, compiled, or both."""

    def __init__(self, traced: Traced) -> None:
        assert traced.sizes is not None
        self.traced = traced
        self.joints: dict[bool, JointStep] = {}
        """The joint steps; the key is True for the compiled one."""
        self.proven: set[bool] = set()
        """The keys of the joint steps whose gradients matched eager code."""
        self.checked: set[Key] = set()
        """The kinds, without their numbers, for which they did."""
        self.usable = True
        self._sizes = traced.sizes
        self._admitted: dict[Key, bool] = {}

    @property
    def numbers(self) -> list[str]:
        """The names of the batch's numbers for which it stays open."""
        return self._sizes.numbers_of_batch(are_open=True)

    @property
    def as_hoped(self) -> bool:
        """True if all its sizes stayed open and its results match eager code."""
        return self.usable and all(map(is_open, self._sizes.symbols))

    def admits(self, inputs: Inputs) -> bool:
        """True if it is valid for micro-batches like this one."""
        if inputs.key not in self._admitted:
            if len(self._admitted) > _KEPT:
                self._admitted.clear()
            self._admitted[inputs.key] = self._sizes.admit(inputs.tensors)
        return self.usable and self._admitted[inputs.key]

    def joint(self, make: Callable[..., JointStep], state: State, *, compiled: bool) -> JointStep:
        """Return the joint step; `make` makes it if it does not exist yet."""
        if compiled not in self.joints:
            self.joints[compiled] = make(self.traced, compiled=compiled)
            self._admitted.clear()  # Compilation adds guards of its own.
        self.joints[compiled].hold(state)
        return self.joints[compiled]


class SharedGraphs:
    """The graphs of open sizes while the code reads the same, by the pattern of micro-batches.

    `failed` holds the dimensions that could not be left open, whatever the code reads; `fix` is
    called with the names of such numbers in the batch.
    """

    def __init__(
        self,
        notes: Notes,
        failed: dict[Key, list[set[tuple[Place, ...]]]],
        fix: Callable[[Iterable[str]], None],
    ) -> None:
        self._notes = notes
        self._failed, self._fix = failed, fix
        self._tried: dict[Key, list[tuple[set[tuple[Place, ...]], SharedGraph | None]]] = {}
        """The dimensions that were left open, and the graph, or None if there is none."""

    def find(self, inputs: Inputs) -> SharedGraph | None:
        """Return the graph that serves this kind, if there is one."""
        if not self._tried:
            return None
        tried = self._tried.get(pattern(inputs.key), ())
        return next((graph for _, graph in tried if graph and graph.admits(inputs)), None)

    def serving(
        self,
        inputs: Inputs,
        form: Form,
        prepared: Iterable[Key],
        known: Iterable[Key],
        trace: Callable[[Sizes], Traced],
    ) -> SharedGraph | None:
        """Return the graph that serves this kind with a loss of this form; make it if it pays.

        It pays if another kind of the same pattern is prepared, or a number has changed.
        """
        graph = self.find(inputs)
        if graph is None:
            of = pattern(inputs.key)
            if not inputs.numbers and not any(pattern(key) == of for key in prepared):
                return None
            others = [key for key in known if key != inputs.key and pattern(key) == of]
            graph = self._made_for(inputs, differing(inputs, others), trace)
        fits = graph is not None and graph.traced.form_for(inputs.tensors) == form
        return graph if fits else None

    def _made_for(
        self,
        inputs: Inputs,
        places: tuple[tuple[Place, ...], ...],
        trace: Callable[[Sizes], Traced],
    ) -> SharedGraph | None:
        """Trace a graph with these dimensions open, unless that has failed before."""
        wanted = set(places)
        tried = self._tried.setdefault(pattern(inputs.key), [])
        before_failed = self._failed.setdefault(pattern(inputs.key), [])
        failed = wanted in before_failed or any(
            wanted == before and not (g and g.as_hoped) for before, g in tried
        )
        if not wanted or failed or len(tried) >= _TRIES:
            return None
        shared = None
        sizes = Sizes.of(inputs, places)
        opened = sizes.numbers_of_batch(are_open=True)
        try:
            graph = SharedGraph(trace(sizes))
            if not graph.admits(inputs):
                raise CannotTrace("its own sizes are not among those it is for")
            shared = graph
        except torch.OutOfMemoryError:
            raise
        # This uses private parts of torch and runs the model's code: anything may be raised.
        except Exception as problem:
            self.tell(problem)
            before_failed.append(wanted)
        finally:
            tried.append((wanted, shared))
            pinned = sizes.numbers_of_batch(are_open=False)
            self._fix(opened if shared is None else pinned)
        return shared

    def drop(self, graph: SharedGraph, problem: Exception) -> None:
        """Use this graph no more: its results are not those of eager code, or nothing compiles."""
        graph.usable = False
        self.tell(problem)
        self._fix(graph.numbers)
        for of, tried in self._tried.items():
            wanted = [places for places, other in tried if other is graph]
            self._failed.setdefault(of, []).extend(wanted)

    def tell(self, problem: Exception) -> None:
        """Note why sizes do not share a graph."""
        reason = reason_of(problem)
        self._notes.tell(f"each size of a micro-batch has a graph of its own: {reason}")
