"""Kinds of micro-batches that differ in sizes alone, and the one graph that serves them all.

The first kind has a graph of its own, made for its very shapes: whoever has one shape has what is
fastest for it. When a second kind comes that differs in sizes, a graph is traced in which those
sizes are open, and every later kind that it admits runs in it: nothing is traced or compiled again.
What cannot be left open has graphs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch

from wholebatch.execute.inputs import Inputs, Key
from wholebatch.execute.joint import JointStep
from wholebatch.execute.notes import CannotTrace, Notes, first_line
from wholebatch.execute.sizes import Place, Sizes, differing, pattern
from wholebatch.execute.trace import Form, State, Traced

__all__ = ["Shapes", "Shared"]

_TRIES = 3
"""Graphs of open sizes for one pattern: another one where more sizes differ than at first, or one
for those sizes for which code or compiler decide otherwise."""


class Shared:
    """A graph of open sizes, and who runs it: as traced, compiled, or both."""

    def __init__(self, traced: Traced) -> None:
        assert traced.sizes is not None
        self.traced = traced
        self.joints: dict[bool, JointStep] = {}
        """By whether they are compiled."""
        self.proven: set[bool] = set()
        """Which of them gave the gradients of eager code."""
        self.usable = True
        self._sizes = traced.sizes
        self._admitted: dict[Key, bool] = {}

    @property
    def as_hoped(self) -> bool:
        """Whether all of its sizes have stayed open, and it gives what eager code gives."""
        return self.usable and self._sizes.all_open

    def admits(self, inputs: Inputs) -> bool:
        """Whether it holds for micro-batches like this one."""
        if inputs.key not in self._admitted:
            self._admitted[inputs.key] = self._sizes.admit(inputs.tensors)
        return self.usable and self._admitted[inputs.key]

    def joint(self, make: Callable[..., JointStep], state: State, *, compiled: bool) -> JointStep:
        """The step itself; `make` makes it where there is none yet."""
        if compiled not in self.joints:
            self.joints[compiled] = make(self.traced, compiled=compiled)
            self._admitted.clear()  # a compiler asks questions of its own
        self.joints[compiled].hold(state)
        return self.joints[compiled]


class Shapes:
    """The graphs of open sizes of one executor, by the pattern of their micro-batches."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._made: dict[Key, list[Shared]] = {}
        self._tried: dict[Key, list[tuple[set[tuple[Place, ...]], Shared | None]]] = {}

    def find(self, inputs: Inputs) -> Shared | None:
        """The graph that serves this kind, if there is one."""
        if not self._made:
            return None
        made = self._made.get(pattern(inputs.key), ())
        return next((shared for shared in made if shared.admits(inputs)), None)

    @property
    def serve(self) -> bool:
        """Whether there is any graph of open sizes in use."""
        return any(shared.usable for made in self._made.values() for shared in made)

    def ready(self, inputs: Inputs) -> bool:
        """Whether there is a compiled graph for this kind, which only has to be recorded."""
        found = self.find(inputs)
        return found is not None and True in found.joints

    def wants_proof(self, inputs: Inputs, own: Container[Key], *, compiled: bool) -> bool:
        """Whether this kind will run in a graph whose gradients were never compared.

        `own`: kinds that have a graph of their own.
        """
        if inputs.key in own:
            return False
        found = self.find(inputs)
        return found is None or compiled not in found.proven

    def serving(
        self,
        inputs: Inputs,
        form: Form,
        prepared: Iterable[Key],
        seen: Iterable[Key],
        trace: Callable[[Sizes], Traced],
    ) -> Shared | None:
        """The graph that serves this kind, whose loss has this form; made if it is worth it.

        It is, if another kind of the same pattern is prepared. What has failed for the dimensions
        in which those that were seen differ is not tried again for the same.
        """
        found = self.find(inputs)
        if found is None:
            of = pattern(inputs.key)
            if not any(pattern(key) == of for key in prepared):
                return None
            others = [key for key in seen if key != inputs.key and pattern(key) == of]
            found = self._made_for(inputs, differing(inputs, others), trace)
        fits = found is not None and found.traced.form_for(inputs.tensors) == form
        return found if fits else None

    def _made_for(
        self,
        inputs: Inputs,
        places: tuple[tuple[Place, ...], ...],
        trace: Callable[[Sizes], Traced],
    ) -> Shared | None:
        of = pattern(inputs.key)
        tried = self._tried.setdefault(of, [])
        failed = any(
            set(places) == earlier and (shared is None or not shared.as_hoped)
            for earlier, shared in tried
        )
        if not places or failed or len(tried) >= _TRIES:
            return None
        tried.append((set(places), None))
        try:
            shared = Shared(trace(Sizes.of(inputs, places)))
            if not shared.admits(inputs):
                raise CannotTrace("its own sizes are not among those it is for")
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # private parts of torch, and any model's code: it may fail
            self._told(problem)
            return None
        tried[-1] = (set(places), shared)
        self._made.setdefault(of, []).append(shared)
        return shared

    def give_up(self, shared: Shared, problem: Exception) -> None:
        """It could not be compiled, or differs from eager code: no further kind uses it."""
        shared.usable = False
        self._told(problem)

    def _told(self, problem: Exception) -> None:
        reason = str(problem)
        if not isinstance(problem, CannotTrace):
            reason = f"{type(problem).__name__}: {first_line(problem)}"
        self._notes.tell(f"each size of a micro-batch has a graph of its own: {reason}")
