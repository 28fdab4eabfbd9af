"""The joint step: forward, backward and gradient addition of one micro-batch as one graph.

It runs as traced (`"operations"`), or compiled by Inductor into a few kernels. Its inputs are the
model's tensors, the 16-bit copies of the weights, the gradient buffers, the micro-batch and the
seeds. Its outputs are the totals and units, which stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from wholebatch.compile.cross_entropy import can_fuse_entropy
from wholebatch.compile.fused_weight_grad import can_add_products
from wholebatch.compile.gelu import can_fuse_gelu
from wholebatch.compile.gradient_buffers import Casts, Gradients
from wholebatch.compile.graph_rewrite import Options, rewrite
from wholebatch.compile.inductor import compiled_by_inductor
from wholebatch.compile.layer_norm import can_fuse_norms
from wholebatch.compile.trace import Form, State, Traced

if TYPE_CHECKING:
    from wholebatch.core.window import Window

__all__ = ["JointStep", "Ledger", "Prepared", "Results", "Runnable"]

Results: TypeAlias = tuple[list[Tensor], list[Tensor]]
Runnable: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Results]


class JointStep:
    """One graph for micro-batches of one key, or of all sizes that it admits.

    Its signature is `(tensors, seeds) -> (totals, units)`.
    It adds the gradients, times the seeds, into the buffers of `used`.
    """

    fuses_products = True
    """Accumulate weight gradients in the matrix product where the device can."""

    fuses_entropy = True
    """Compute a cross-entropy and its gradient in one kernel where the device can."""

    fuses_norms = True
    """Compute a layer norm's backward and the operations around it in one kernel."""

    simplifies_gelu = True
    """Compute GELUs with one exponential in compiled steps on CUDA."""

    fuses_gelu = True
    """Compute a GELU's gradient and that of the bias before it in one kernel."""

    whole_rows = 4096
    """Rows up to this length stay in registers while a kernel reduces them."""

    inductor: ClassVar[dict[str, Any]] = {}
    """More options of Inductor, for measurements."""

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
        self.compiled = compiled
        self.runs = 1
        """The number of runs, replays included; the trial run counts."""
        self._trained = list(state.trained.values())
        self._others = list(state.others.values())
        device = self._trained[0].device
        buffers = gradients.of(self.used)
        rewritten = rewrite(
            traced,
            len(self._trained),
            [buffer.dtype for buffer in buffers],
            Options(
                products=self.fuses_products and can_add_products(device),
                products_in_full=not compiled,
                entropy=self.fuses_entropy and can_fuse_entropy(device),
                norms=self.fuses_norms and can_fuse_norms(device),
                gelu_sums=self.fuses_gelu and can_fuse_gelu(device),
                gelu=compiled and self.simplifies_gelu and device.type == "cuda",
            ),
        )
        self.fused = (rewritten.fused_products, rewritten.fused_embeddings)
        self.operations = sum(node.op == "call_function" for node in rewritten.graph.graph.nodes)
        self._tail = [*casts.of(rewritten.casts), *buffers]
        self._run: Callable[..., Any] = rewritten.graph
        if not compiled:
            return
        arguments: list[Any]
        if self.sizes is None:
            seeds = [torch.ones((), dtype=dtype, device=device) for dtype in self.form.dtypes]
            arguments = self._arguments(example, seeds)
        else:
            tail = map(self.sizes.alike, self._tail)
            arguments = [*self.sizes.symbols, *self.sizes.flat, *tail]
        self._run = compiled_by_inductor(
            rewritten.graph, arguments, self.inductor, whole_rows=self.whole_rows
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


class Prepared:
    """A step that is ready for one kind of micro-batch."""

    def __init__(self, joint: JointStep, run: Runnable, form: Form) -> None:
        self.joint = joint
        self.form = form
        """The form for this kind: units that count samples depend on the sizes."""
        self.run = run
        self.captured = run is not joint
        self.addresses = joint.addresses()

    @property
    def mode(self) -> str:
        how = "compile" if self.joint.compiled else "operations"
        return f"graph of {how}" if self.captured else how


class Ledger:
    """Provides the seeds of micro-steps and records their sums, all on the device."""

    def __init__(self, window: Window, device: torch.device) -> None:
        self._window = window
        self._device = device
        self._likes: dict[torch.dtype, Tensor] = {}

    def seeds(self, form: Form) -> list[Tensor]:
        """Return the seed for the backward of each total."""
        return [
            self._window.seed_of(name, self._like(dtype), weight)
            for name, dtype, weight in zip(form.names, form.dtypes, form.weights, strict=True)
        ]

    def record(self, form: Form, totals: list[Tensor], units: list[Tensor]) -> None:
        """Record a micro-step whose gradients have been added."""
        counted = iter(units)
        self._window.record(
            dict(zip(form.names, totals, strict=True)),
            {
                name: next(counted) if number is None else number
                for name, number in zip(form.names, form.units, strict=True)
            },
            dict(zip(form.names, form.weights, strict=True)),
        )

    def _like(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._likes:
            self._likes[dtype] = torch.zeros((), dtype=dtype, device=self._device)
        return self._likes[dtype]
