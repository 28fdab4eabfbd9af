"""The joint step: forward, backward and gradient addition of one micro-batch as one graph.

It runs as traced (`"operations"`), or compiled by Inductor into a few kernels. Its inputs are the
model's tensors, the 16-bit copies of the weights, the gradient buffers, the micro-batch and the
seeds. Its outputs are the totals and units, which stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from wholebatch.compile.cross_entropy import can_fuse_entropy
from wholebatch.compile.fused_weight_grad import can_add_products
from wholebatch.compile.fusion import collection_paused
from wholebatch.compile.gelu import can_fuse_gelu
from wholebatch.compile.gradient_buffers import Casts, Gradients
from wholebatch.compile.graph_rewrite import Fusions, rewrite
from wholebatch.compile.layer_norm import can_fuse_norms
from wholebatch.compile.repeated_blocks import Blocks, calls_other_graphs
from wholebatch.compile.trace import Form, State, Traced


@cache
def start_compiler() -> None:
    """Start Inductor's worker processes early.

    They take seconds to start. Until they run, this process compiles one kernel after the other.
    """
    with suppress(ImportError):  # Another version of Inductor.
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def compiled_by_inductor(
    graph: Any, arguments: list[Any], *, more: Mapping[str, Any], whole_rows: int
) -> Callable[..., Any]:
    """Compile `graph` for arguments like these; `more` are options of Inductor.

    A kernel that reduces rows of up to `whole_rows` numbers reads each row once and keeps it.
    """
    import torch._inductor  # Slow to import: paid only when compiling.
    from torch._inductor import config

    # Inductor would compute the gradients of a layer norm's weights, as partial sums, in the kernel
    # of its input's gradient. On an H200 that slowed a window of a GPT (64 sequences in
    # micro-batches of 8) by 2 ms of 132.
    options = {"triton.mix_order_reduction": False, **more}
    known = {name: value for name, value in options.items() if _has(config, name)}
    with torch.no_grad(), config.patch(known), _whole_rows(whole_rows):
        compiled: Callable[..., Any] = torch._inductor.compile(graph, arguments)
        return compiled


@contextmanager
def _whole_rows(longest: int) -> Iterator[None]:
    """Raise Inductor's limit for persistent reductions from 1024 to `longest` within this context.

    Longer rows are read two or three times.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V
    from torch.compiler import config

    name = "should_use_persistent_reduction"
    by_itself = getattr(InductorChoices, name, None)
    # A version of Inductor without these names.
    if by_itself is None or not hasattr(config, "cache_key_tag"):
        yield
        return

    def decide(features: Any, cooperative_reduction: bool) -> bool:
        if by_itself(features, cooperative_reduction):
            return True
        if features.get_reduction_hint() != ReductionHint.INNER:
            return False
        return bool(V.graph.sizevars.statically_known_leq(features.reduction_numel, longest))

    tag = config.cache_key_tag
    setattr(InductorChoices, name, staticmethod(decide))
    # Inductor's cache key does not include this choice.
    config.cache_key_tag = f"{tag}wholebatch: rows of {longest}"
    try:
        yield
    finally:
        setattr(InductorChoices, name, staticmethod(by_itself))
        config.cache_key_tag = tag


def _has(config: Any, name: str) -> bool:
    """True if this version of Inductor has the option."""
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


Results: TypeAlias = tuple[list[Tensor], list[Tensor]]
Runnable: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Results]


class JointStep:
    """One graph for micro-batches of one key, or of all sizes that it admits.

    Its signature is `(tensors, seeds) -> (totals, units)`.
    It adds the gradients, times the seeds, into the buffers of `used`.
    """

    fusions: ClassVar[Fusions] = Fusions(
        products=True,
        products_in_full=True,
        entropy=True,
        norms=True,
        gelu_sums=True,
        attention=True,
        gelu=True,
    )
    """The fusions to use where the device has them; measurements switch some off."""

    blocks: ClassVar[bool] = True
    """Compile layers that are alike once; measurements switch it off."""

    whole_rows = 4096
    """Rows up to this length stay in registers while a kernel reduces them."""

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
        buffers = gradients.of(self.used)
        rewritten = rewrite(
            traced,
            len(self._trained),
            [buffer.dtype for buffer in buffers],
            self._possible_fusions(device, {node.target for node in traced.graph.graph.nodes}),
        )
        self.fused = (rewritten.fused_products, rewritten.fused_embeddings)
        self.operations = sum(node.op == "call_function" for node in rewritten.graph.graph.nodes)
        self._tail = [*casts.of(rewritten.casts), *buffers]
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
        compile_graph = partial(
            compiled_by_inductor, more=self.inductor, whole_rows=self.whole_rows
        )
        if calls_other_graphs(rewritten.graph):
            if compiled:
                self._run = compile_graph(rewritten.graph, arguments)
            return
        blocks = Blocks(rewritten.graph, arguments, repeats=self.blocks)
        self.to_compile = blocks.operations
        if compiled:
            self._run = blocks.compiled(compile_graph)

    def _possible_fusions(self, device: torch.device, targets: set[Any]) -> Fusions:
        """Return the fusions that this device has and that pay for this way of running.

        A kernel is compiled and checked only if the graph has operations (`targets`) for it.
        """
        wanted, aten = self.fusions, torch.ops.aten
        has_entropy = aten._log_softmax_backward_data.default in targets
        has_norms = aten.native_layer_norm_backward.default in targets
        has_gelu = aten.gelu_backward.default in targets
        return replace(
            wanted,
            products=wanted.products and can_add_products(device),
            products_in_full=wanted.products_in_full and not self.compiled,
            entropy=wanted.entropy and has_entropy and can_fuse_entropy(device),
            norms=wanted.norms and has_norms and can_fuse_norms(device),
            gelu_sums=wanted.gelu_sums and has_gelu and can_fuse_gelu(device),
            gelu=wanted.gelu and self.compiled and device.type == "cuda",
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
