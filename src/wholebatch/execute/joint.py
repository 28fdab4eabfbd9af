"""The joint step: forward, backward and addition of one micro-batch as one graph.

It runs as written down (`"operations"`), or compiled by Inductor into few kernels. Its inputs are
the model's own tensors, the 16-bit copies of the weights, the gradient buffers, the micro-batch and
the seeds; its outputs are the totals and units, which stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from wholebatch.execute.buffers import Casts, Gradients
from wholebatch.execute.entropy import can_fuse_entropy
from wholebatch.execute.fused import can_add_products
from wholebatch.execute.rewrite import Options, rewrite
from wholebatch.execute.trace import Form, State, Traced

__all__ = ["JointStep", "Prepared", "Results", "Runnable"]

Results: TypeAlias = tuple[list[Tensor], list[Tensor]]
Runnable: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Results]


class JointStep:
    """One graph for micro-batches of one key, or of all that its sizes admit.

    `(tensors, seeds) -> (totals, units)`.
    The gradients, times the seeds, are added into the buffers of `used`.
    """

    fuses_products = True
    """Whether weight gradients add themselves where the device can; off to measure the gain."""

    fuses_entropy = True
    """Whether a cross-entropy and its gradient are one kernel where the device can."""

    recomputes = True
    """Whether a compiled step makes cheap activations again instead of holding them."""

    inductor: ClassVar[dict[str, Any]] = {}
    """More options of the compiler, to measure what they are worth."""

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
        """How often it has run, as itself or recorded; the one that it is tried on counts."""
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
                recompute=compiled and self.recomputes,
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
        self._run = _inductor(rewritten.graph, arguments, self.inductor)

    def hold(self, state: State) -> None:
        """The model's tensors are these now."""
        self._trained = list(state.trained.values())
        self._others = list(state.others.values())

    def __call__(self, tensors: Sequence[Tensor], seeds: Sequence[Tensor]) -> Results:
        with torch.no_grad():
            results = list(self._run(*self._arguments(tensors, seeds)))
        return results[: len(self.form.names)], results[len(self.form.names) :]

    def addresses(self) -> list[int]:
        """Where the model's tensors lie; a captured graph holds for these addresses."""
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
        """That of this kind: units that are a number of samples differ with the sizes."""
        self.run = run
        self.captured = run is not joint
        self.addresses = joint.addresses()

    @property
    def mode(self) -> str:
        how = "compile" if self.joint.compiled else "operations"
        return f"graph of {how}" if self.captured else how


def _inductor(graph: Any, arguments: list[Any], more: Mapping[str, Any]) -> Callable[..., Any]:
    import torch._inductor  # only who compiles pays for its import
    from torch._inductor import config

    # It would put the gradients of a layer norm's weights, as partial sums, into the kernel of its
    # input's gradient: on an H200 that made a window of a GPT (64 sequences in micro-batches of 8)
    # longer, by 2 ms of 132.
    options = {"triton.mix_order_reduction": False, **more}
    known = {name: value for name, value in options.items() if _has(config, name)}
    with torch.no_grad(), config.patch(known):
        compiled: Callable[..., Any] = torch._inductor.compile(graph, arguments)
        return compiled


def _has(config: Any, name: str) -> bool:
    """Whether this version of Inductor has the option."""
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True
