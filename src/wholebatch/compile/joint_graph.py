"""The joint step: forward, backward and gradient addition of one micro-batch as one graph.

It runs as traced (`"operations"`), or compiled by Inductor into a few kernels. Its inputs are the
model's tensors, the 16-bit copies of the weights, the gradient buffers, the micro-batch and the
seeds. Its outputs are the totals and units, which stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pickle import PicklingError
from typing import Any, ClassVar

import torch
from torch import Tensor

from wholebatch.compile.biased_attention import can_fuse_attention
from wholebatch.compile.compile_workers import Job, check_of, job_of
from wholebatch.compile.cross_entropy import can_fuse_entropy
from wholebatch.compile.cuda_graph import Results, Runnable
from wholebatch.compile.fake_results import fake_mode
from wholebatch.compile.fused_weight_grad import can_add_products
from wholebatch.compile.fusion import collection_paused, is_checked
from wholebatch.compile.gelu import can_fuse_gelu
from wholebatch.compile.gradient_buffers import Cast, Casts, Gradients, as_one
from wholebatch.compile.graph_rewrite import Fusions, Rewritten, rewrite
from wholebatch.compile.inductor import compiled_by_inductor
from wholebatch.compile.layer_norm import NORMS, can_fuse_norms
from wholebatch.compile.repeated_blocks import BlockPlan, BlockProgram, Blocks, calls_other_graphs
from wholebatch.compile.trace import Form, State, Traced

aten = torch.ops.aten
_KERNELS: dict[str, tuple[set[Any], Callable[[torch.device], bool]]] = {
    "entropy": ({aten._log_softmax_backward_data.default}, can_fuse_entropy),
    "norms": (NORMS, can_fuse_norms),
    "gelu_sums": ({aten.gelu_backward.default}, can_fuse_gelu),
    "attention": (
        {aten._scaled_dot_product_efficient_attention_backward.default},
        can_fuse_attention,
    ),
}
"""The operations that each kernel of ours replaces, and its check on the device."""
_wrong: set[str] = set()
"""The kernels that have failed their check."""


class JointStep:
    """One graph for micro-batches of one key, or of all sizes that it admits.

    Its signature is `(tensors, seeds) -> (totals, units)`.
    It adds the gradients, times the seeds, into the buffers of `used`.
    `compiled`: it is rewritten for a compiler, and must be loaded before it runs (`loading`).
    """

    fusions: ClassVar[Fusions] = Fusions(
        products=True,
        products_in_full=True,
        entropy=True,
        norms=True,
        gelu_sums=True,
        attention=True,
        shared_inputs=True,
        gelu=True,
    )
    """The fusions to use where the device has them; measurements switch some off."""

    blocks: ClassVar[bool] = True
    """Compile layers that are alike once; measurements switch it off."""

    whole_rows = 4096
    """Rows up to this length stay in registers while a kernel reduces them."""

    loaded = False
    """True once it is compiled."""

    distance = 0.0
    """The distance of its results from those of eager code."""

    inductor: ClassVar[dict[str, Any]] = {}
    """More options of Inductor, for measurements."""

    @collection_paused()
    def __init__(
        self,
        traced: Traced,
        state: State,
        gradients: Gradients,
        casts: Casts,
        *,
        compiled: bool,
        example: Sequence[Tensor],
    ) -> None:
        self.form: Form = traced.form
        self.used = traced.used
        self.random = traced.random
        self.sizes = traced.sizes
        self.sixteen_bit = traced.sixteen_bit
        self.compiled = compiled
        self.runs = 1
        """The number of runs, replays included; the trial run counts."""
        self.hold(state)
        device = self._trained[0].device
        fusions = self._possible_fusions(device, {node.target for node in traced.graph.graph.nodes})
        rewritten, self._tail = _rewritten(traced, len(self._trained), gradients, casts, fusions)
        self.fused = rewritten.fused
        self._casts, self._joined = rewritten.casts, rewritten.joined
        self.operations = sum(node.op == "call_function" for node in rewritten.graph.graph.nodes)
        self._gradients = gradients
        self._run: Callable[..., Any] = rewritten.graph
        arguments: list[Any]
        if self.sizes is None:
            seeds = [torch.ones((), dtype=dtype, device=device) for dtype in self.form.dtypes]
            arguments = self._arguments(example, seeds)
        else:
            tail = map(self.sizes.alike, self._tail)
            arguments = [*self.sizes.symbols, *self.sizes.flat, *tail]
        self.to_compile = self.operations
        """The number of operations that a compiler has to compile: layers that are alike once."""
        self._whole: list[Any] | None = None
        self._blocks: Blocks | None = None
        self._plan: BlockPlan | None = None
        self._keeps = False
        if calls_other_graphs(rewritten.graph):
            self._whole = arguments if compiled else None
            return
        blocks = Blocks(rewritten.graph, arguments, repeats=self.blocks)
        self.to_compile = blocks.operations
        if compiled:
            self._blocks, self._plan = blocks, blocks.plan()
            self._keeps = not (blocks.constants or traced.sources or self.random or self.sizes)

    def kept(self) -> KeptStep | None:
        """Return it as plain data for another process; None if it holds tensors of this one.

        A graph that draws random numbers is not kept: nothing could be compared with eager code.
        """
        if self._plan is None or not self._keeps:
            return None
        return KeptStep(
            self._plan,
            self.form,
            self.used,
            self.sixteen_bit,
            self._casts,
            self._joined,
            dict(self.fused),
            self.operations,
            self.to_compile,
            tuple(self._kernels),
            self.distance,
        )

    @classmethod
    def of_kept(
        cls, kept: KeptStep, form: Form, state: State, gradients: Gradients, casts: Casts
    ) -> JointStep | None:
        """Return the step of another process, to be compiled; None if it does not fit here."""
        tail = _tail(kept.casts, kept.joined, kept.used, gradients, casts)
        if tail is None or kept.form != form or not _wrong.isdisjoint(kept.kernels):
            return None
        step = cls.__new__(cls)
        step.form, step.used, step.sixteen_bit = form, kept.used, kept.sixteen_bit
        step.random, step.sizes, step.compiled, step.runs = False, None, True, 1
        step.hold(state)
        step.fused, step.operations, step.to_compile = kept.fused, kept.operations, kept.to_compile
        step._gradients, step._tail, step._kernels = gradients, tail, list(kept.kernels)
        step._blocks, step._plan, step._whole, step._keeps = None, kept.plan, None, False
        step.distance = kept.distance
        return step

    @property
    def _options(self) -> dict[str, Any]:
        return {"more": self.inductor, "whole_rows": self.whole_rows}

    def jobs(self) -> list[Job]:
        """Return its pieces for compile workers; raise PicklingError if they are not plain data."""
        if self._plan is None:
            raise PicklingError("it calls other graphs")
        device = self._trained[0].device
        checks = [check_of(_KERNELS[name][1], device) for name in self._kernels]
        return [*checks, *(job_of(one, self._options) for one in self._plan.programs)]

    def kernels_hold(self) -> Iterator[bool]:
        """Check each kernel that it uses. If one fails, another step of this kind does without."""
        device = self._trained[0].device
        for name in self._kernels:
            holds = _KERNELS[name][1](device)
            if not holds:
                _wrong.add(name)
            yield holds

    def loading(self) -> Iterator[None]:
        """Check and compile it, one kernel or piece at a time; then it is `loaded`.

        What compile workers have compiled is loaded from the disk cache. A piece tunes its kernels
        when it first runs, so each runs once here: the first run of all would take seconds.
        """
        for holds in self.kernels_hold():
            if not holds:
                return
            yield
        compile_graph: Any = collection_paused()(partial(compiled_by_inductor, **self._options))
        if self._plan is None:
            self._run = compile_graph(self._run, self._whole or [])
        else:
            runs = []
            mode = fake_mode() if self._blocks is None else self._blocks.mode
            # Generators would notice a run on zeros.
            tunes = not self.random and self._trained[0].is_cuda and self.sizes is None
            made = self._plan.compiled(compile_graph, mode)
            for program, run in zip(self._plan.programs, made, strict=True):
                runs.append(run)
                yield
                if tunes and program.is_safe:
                    program.try_out(run)
                    yield
            constants = () if self._blocks is None else self._blocks.constants
            self._run = BlockProgram(self._plan, runs, constants)
        self._blocks = self._whole = None
        self.loaded = True

    def _possible_fusions(self, device: torch.device, targets: set[Any]) -> Fusions:
        """Return the fusions that this device has and that pay for this way of running.

        A kernel is compiled and checked only if the graph has operations (`targets`) for it: while
        the graph is compiled (`kernels_hold`). A graph that runs as traced does not wait for that.
        """
        wanted = self.fusions
        later = self.compiled and device.type == "cuda" and find_spec("triton") is not None
        by_kernel = {
            name: getattr(wanted, name)
            and not fused.isdisjoint(targets)
            and (name not in _wrong if later else is_checked(has_kernel, device))
            for name, (fused, has_kernel) in _KERNELS.items()
        }
        self._kernels = [name for name, used in by_kernel.items() if used and later]
        products = wanted.products and can_add_products(device)
        return replace(
            wanted,
            products=products,
            shared_inputs=wanted.shared_inputs and products,
            products_in_full=wanted.products_in_full and not self.compiled,
            gelu=wanted.gelu and self.compiled and device.type == "cuda",
            **by_kernel,
        )

    def hold(self, state: State) -> None:
        """Use these tensors of the model from now on."""
        self._trained = list(state.trained.values())
        self._others = list(state.others.values())

    def __call__(self, tensors: Sequence[Tensor], seeds: Sequence[Tensor]) -> Results:
        with torch.no_grad():
            results = list(self._run(*self._arguments(tensors, seeds)))
        return results[: len(self.form.names)], results[len(self.form.names) :]

    def addresses(self) -> list[int]:
        """Return the addresses of the model's tensors; a captured graph is valid only for these."""
        return [tensor.data_ptr() for tensor in (*self._trained, *self._others)]

    def _arguments(self, tensors: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Any]:
        trained = [parameter.detach() for parameter in self._trained]
        sizes = () if self.sizes is None else self.sizes.numbers(tensors)
        return [*sizes, *trained, *self._others, *tensors, *seeds, *self._tail]


def _rewritten(
    traced: Traced, trained: int, gradients: Gradients, casts: Casts, fusions: Fusions
) -> tuple[Rewritten, list[Tensor]]:
    """Return the rewritten graph, and its inputs behind the seeds."""
    dtypes = [buffer.dtype for buffer in gradients.of(traced.used)]
    rewritten = rewrite(traced, trained, dtypes, fusions)
    tail = _tail(rewritten.casts, rewritten.joined, traced.used, gradients, casts)
    if tail is None:
        return _rewritten(traced, trained, gradients, casts, replace(fusions, shared_inputs=False))
    return rewritten, tail


def _tail(
    kinds: Sequence[Cast],
    joined: Sequence[Sequence[int]],
    used: Sequence[int],
    gradients: Gradients,
    casts: Casts,
) -> list[Tensor] | None:
    """Return the casts, the buffers and those that are joined; None if these lie apart.

    Another graph may have had some of them put elsewhere before.
    """
    tail = [*casts.of(kinds), *gradients.of(used)]
    for places in joined:
        one = as_one([tail[place] for place in places])
        if one is None:
            return None
        tail.append(one)
    return tail


@dataclass(frozen=True)
class KeptStep:
    """A joint step as plain data, for another process with the same code, values and kinds."""

    plan: BlockPlan
    form: Form
    used: tuple[int, ...]
    sixteen_bit: bool
    casts: tuple[Cast, ...]
    joined: tuple[tuple[int, ...], ...]
    fused: dict[str, int]
    operations: int
    to_compile: int
    kernels: tuple[str, ...]
    distance: float
    """The distance of its results from those of eager code."""


@dataclass(frozen=True)
class Prepared:
    """A step that is ready for one kind of micro-batch; `run` replays `joint` if it is captured."""

    joint: JointStep
    run: Runnable
    form: Form
    """The form for this kind: units that count samples depend on the sizes."""
    addresses: list[int]
    """The addresses of the model's tensors when it was captured."""

    @property
    def captured(self) -> bool:
        """True if a CUDA graph is replayed."""
        return self.run is not self.joint

    @property
    def mode(self) -> str:
        """The name of this way to run a micro-step."""
        how = "compile" if self.joint.compiled else "operations"
        return f"graph of {how}" if self.captured else how
