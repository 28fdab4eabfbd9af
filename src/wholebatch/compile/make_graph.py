"""The way from a micro-batch that eager code has run to a graph that is compared and recorded.

The graph of a kind runs on the same micro-batch, from the same state, and must give the same
gradients before it is used; so must the compiled graph. On a CUDA device both are captured as CUDA
graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.compile.compile_thread import in_a_thread
from wholebatch.compile.cuda_graph import CapturedGraph, Runnable, rehearse
from wholebatch.compile.decide import is_too_slow
from wholebatch.compile.execute_mode import (
    CannotTrace,
    Execute,
    ExecutePlan,
    Notes,
    first_line,
    reason_of,
)
from wholebatch.compile.gradient_buffers import empty_cache
from wholebatch.compile.graph_check import EagerResult, GraphCheck, NothingToCompare
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.compile.graph_memory import GraphMemory
from wholebatch.compile.guards import GuardSet
from wholebatch.compile.joint_graph import JointStep, Prepared
from wholebatch.compile.kinds import CacheEntry, Kinds, Slot
from wholebatch.compile.trace import Traced, trace


class GraphMaker:
    """Traces, compiles, compares and captures the graphs of one run."""

    def __init__(
        self,
        execute: Execute,
        *,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        device: torch.device,
        kinds: Kinds,
        memory: GraphMemory,
        plan: ExecutePlan,
        notes: Notes,
    ) -> None:
        self._execute, self._plan, self._notes = execute, plan, notes
        self._model, self._loss = model, loss
        self._device = device
        self._kinds, self._memory = kinds, memory

    def made(
        self, slot: Slot, done: EagerResult, seeds: list[Tensor], *, compiled: bool
    ) -> Prepared:
        """Make the graph for this kind, shared with other sizes if possible, and check it."""
        self._memory.prepare()
        trained = self._memory.gradients.parameters
        if any(map(_has_sparse_gradient, trained)):
            raise CannotTrace("it has sparse gradients, and a graph can add only dense ones")
        beside = None if slot.ready is None else slot.ready.joint.beside

        def joint_of(traced: Traced, *, compiled: bool) -> JointStep:
            if compiled and beside is not None:
                return beside.result()
            return self._joint_step(traced, done.inputs, compiled=compiled)

        slot.entry = entry = (
            slot.entry
            or self._kinds.known_entry(done.inputs)
            or self._kinds.new_entry(done.inputs, done.form, partial(self._traced, done.inputs))
        )
        if entry.is_shared:
            try:
                return self._proven(entry, joint_of, slot, done, seeds, compiled=compiled)
            except (torch.OutOfMemoryError, NothingToCompare):
                raise
            except Exception as problem:  # A compiler, or the check, may raise anything.
                self._kinds.drop(entry, problem)
                slot.ready = None
                return self.made(slot, done, seeds, compiled=compiled)
        try:
            return self._proven(entry, joint_of, slot, done, seeds, compiled=compiled)
        except (CannotTrace, NothingToCompare, torch.OutOfMemoryError):
            raise
        except Exception as problem:  # An operation may refuse what its fake version admitted.
            raise CannotTrace(f"it fails as a graph ({reason_of(problem)})") from problem

    def compile_beside(self, joint: JointStep, inputs: Inputs) -> None:
        """Compile the same step in a thread, while this one runs as traced."""
        self._notes.tell("compiling in a thread beside the run")
        make = partial(self._joint_step, joint.traced, inputs, compiled=True)
        joint.beside = in_a_thread(make, self._device)

    def captures(self, slot: Slot) -> bool:
        """True if a shared graph, which runs this kind as it is, is to be captured for it."""
        return self._plan.records(sum(graph.captured for graph in self._kinds.ready()), slot.times)

    def captured(self, prepared: Prepared, inputs: Inputs, seeds: list[Tensor]) -> Prepared:
        """Capture a step whose kernels were launched one by one so far."""
        joint, gradients = prepared.joint, self._memory.gradients
        held = gradients.set_aside(joint.used)
        try:
            rehearse(lambda: joint(inputs, seeds)[0], self._device, captures=True)
        finally:
            gradients.put_in_place(joint.used, held)
            del held  # Capturing computes nothing.
        try:
            return replace(prepared, run=self._captured(joint, inputs, seeds))
        except CannotTrace as reason:
            self._plan.captures = False
            self._notes.tell(str(reason))
            return prepared

    def _traced(self, inputs: Inputs, guards: GuardSet) -> Traced:
        trained = self._memory.gradients.parameters
        traced = trace(guards.program, self._kinds.as_traced, self._model, trained, inputs)
        guards.watch(traced.sources)
        empty_cache(self._device)
        return traced

    def _joint_step(self, traced: Traced, inputs: Inputs, *, compiled: bool) -> JointStep:
        buffers = self._memory.gradients, self._memory.casts
        joint = JointStep(traced, *buffers, compiled=compiled, example=inputs)
        if compiled:
            joint.compile()
        return joint

    def _compiled_if_possible(
        self, entry: CacheEntry, joint_of: Callable[..., JointStep], compiled: bool
    ) -> JointStep:
        """Compile the graph; if the compiler fails and graphs are captured, run it as traced."""
        try:
            return entry.joint(joint_of, compiled=compiled)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # A compiler may raise anything; the traced graph still runs.
            reason = reason_of(problem)
            if not compiled:
                raise CannotTrace(reason) from problem
            if not self._plan.captures or entry.is_shared:
                raise CannotTrace(f"it cannot be compiled ({reason})") from problem
            self._plan.compiles = False
            self._notes.fell_back(self._execute, "as traced", f"it cannot be compiled ({reason})")
            return self._compiled_if_possible(entry, joint_of, False)

    def _proven(
        self,
        entry: CacheEntry,
        joint_of: Callable[..., JointStep],
        slot: Slot,
        done: EagerResult,
        seeds: list[Tensor],
        *,
        compiled: bool,
    ) -> Prepared:
        """Run the graph from the same state as eager code, and capture it if the results agree.

        A new one that is to be compiled runs as traced first: there the limit is narrow.
        """
        memory = self._memory
        check = GraphCheck(done, memory.gradients, memory.casts, seeds)
        as_traced = partial(self._joint_step, entry.traced, done.inputs, compiled=False)
        if compiled and not entry.proven:
            with suppress(torch.OutOfMemoryError):  # The compiled graph needs less.
                plain = as_traced()
                check.compare(plain, plain, plain=lambda: plain)
                del plain
            empty_cache(self._device)
        joint = self._compiled_if_possible(entry, joint_of, compiled)
        waits = entry.is_shared and joint.compiled in entry.proven and not self.captures(slot)
        captures = self._plan.captures and not waits
        run: Runnable = joint
        check.compare(joint, joint, rehearses=captures, plain=as_traced)
        if captures:
            run = self._captured(joint, done.inputs, seeds)
            if run is not joint:
                check.compare(joint, run, plain=as_traced)  # What was captured is what will run.
        stays = self._plan.captures and not self._plan.compiles and not joint.compiled
        if stays and is_too_slow(check.seconds, done.seconds):
            raise CannotTrace("as traced it is slower than eager code, and it cannot be compiled")
        entry.proven.add(joint.compiled)
        return Prepared(joint, run, done.form, joint.addresses())

    def _captured(self, joint: JointStep, inputs: Inputs, seeds: list[Tensor]) -> Runnable:
        """Capture the joint step as a CUDA graph; if CUDA cannot, run the compiled step itself."""
        # Its static inputs stay: they must not lie in the gaps of memory that can be released.
        empty_cache(self._device)
        pool = self._memory.pool(in_use=any(ready.captured for ready in self._kinds.ready()))
        try:
            return CapturedGraph(joint, inputs, seeds, pool=pool)
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
            self._notes.fell_back(self._execute, "compiled, launched one by one", reason)
            return joint


def _has_sparse_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.layout != torch.strided
