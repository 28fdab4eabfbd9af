"""The joint step: forward, backward and gradient addition of one micro-batch as one graph.

It runs as traced (`"operations"`), or compiled by Inductor into a few kernels. Its inputs are the
model's tensors, the 16-bit copies of the weights, the gradient buffers, the micro-batch and the
seeds. Its outputs are the totals and units, which stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.compile.cuda_graph import Results, Runnable
from wholebatch.compile.fused_weight_grad import can_add_products
from wholebatch.compile.fusion import fake_like
from wholebatch.compile.gradient_buffers import Casts, Gradients, as_one
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.compile.graph_rewrite import Rewritten, rewrite
from wholebatch.compile.inductor import compiled_by_inductor
from wholebatch.compile.trace import Form, Traced


class JointStep:
    """One graph for micro-batches of one key, or of all sizes that it admits.

    Its signature is `(inputs, seeds) -> (totals, units)`.
    It adds the gradients, times the seeds, into the buffers of `used`.
    `compiled`: it is rewritten for a compiler, and `compile()` must run before its first call.
    """

    def __init__(
        self,
        traced: Traced,
        gradients: Gradients,
        casts: Casts,
        *,
        compiled: bool,
        example: Inputs,
    ) -> None:
        self.traced = traced
        self.form: Form = traced.form
        self.used = traced.used
        self.random = traced.random
        self.sizes = traced.sizes
        self.compiled = compiled
        self.beside: Future[JointStep] | None = None
        """The same step, compiled in a thread beside the run."""
        self.runs = 1
        """The number of runs, replays included; the trial run counts."""
        device = traced.trained[0].device
        rewritten, self._tail = _rewritten(
            traced, gradients, casts, products=can_add_products(device)
        )
        self.fused = rewritten.fused
        self._constants = _constants(rewritten.graph)
        self.operations = sum(node.op == "call_function" for node in rewritten.graph.graph.nodes)
        self._run: Callable[..., Any] = rewritten.graph
        self._examples: list[Any] = []
        if compiled:
            self._examples = self._arguments_like(example)

    def _arguments_like(self, inputs: Inputs) -> list[Any]:
        """Return arguments to compile for: fake ones where sizes are open."""
        if self.sizes is None:
            device = self.traced.trained[0].device
            seeds = [torch.ones((), dtype=dtype, device=device) for dtype in self.form.dtypes]
            return self._arguments(inputs, seeds)
        places = self.traced.graph.graph.find_nodes(op="placeholder")
        tail = [fake_like(self.traced.mode, tensor) for tensor in self._tail]
        return [*(node.meta["val"] for node in places), *tail]

    def compile(self) -> None:
        """Compile it by Inductor, here or in a thread of its own."""
        self._run = compiled_by_inductor(self._run, self._examples)
        self._examples = []

    def __call__(self, inputs: Inputs, seeds: Sequence[Tensor]) -> Results:
        with torch.no_grad():
            results = list(self._run(*self._arguments(inputs, seeds)))
        return results[: len(self.form.names)], results[len(self.form.names) :]

    def addresses(self) -> list[int]:
        """Return the addresses of what it reads; a captured graph is valid only for these."""
        every = (*self.traced.trained, *self.traced.others, *self._constants)
        return [tensor.data_ptr() for tensor in every]

    def _arguments(self, inputs: Inputs, seeds: Sequence[Tensor]) -> list[Any]:
        # Read here, not when it was traced: `parameter.data = ...` gives them other memory.
        state = [tensor.detach() for tensor in (*self.traced.trained, *self.traced.others)]
        sizes = () if self.sizes is None else self.sizes.numbers(inputs)
        return [*sizes, *state, *inputs.tensors, *seeds, *self._tail]


def _constants(graph: fx.GraphModule) -> list[Tensor]:
    """Return the tensors outside of the model that a graph reads."""
    names = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    values = [getattr(graph, name, None) for name in sorted(names)]
    return [value for value in values if isinstance(value, Tensor)]


def _rewritten(
    traced: Traced, gradients: Gradients, casts: Casts, *, products: bool, shares: bool = True
) -> tuple[Rewritten, list[Tensor]]:
    """Return the rewritten graph, and its inputs behind the seeds: casts, buffers, joined ones."""
    dtypes = [buffer.dtype for buffer in gradients.of(traced.used)]
    count, shares = len(traced.trained), products and shares
    rewritten = rewrite(traced, count, dtypes, products=products, shares=shares)
    every = [*casts.of(rewritten.casts), *gradients.of(traced.used)]
    tail = [every[place] for place in rewritten.read]
    for places in rewritten.joined:
        whole = as_one([every[place] for place in places])
        if whole is None:  # Another graph has had some of them put elsewhere before.
            return _rewritten(traced, gradients, casts, products=products, shares=False)
        tail.append(whole)
    return rewritten, tail


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
