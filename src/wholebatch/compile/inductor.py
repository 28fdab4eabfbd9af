"""Inductor, the compiler of torch, with the options that pay for joint graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from wholebatch.window.replaced_attributes import replaced_attributes

OPTIONS: dict[str, object] = {
    # It does nothing here, but is part of Inductor's cache key: it tells code that was compiled
    # with our choices from code that was not.
    "aot_inductor.metadata": {"wholebatch": "parts written in place"},
}
_MIXED_ORDER = "triton.mix_order_reduction"
"""Inductor computes the gradients of a norm's weights, as partial sums, with that of its input.

On an H200 that takes 1.5% off a window of a Llama (RMSNorm), and adds 2 to 8% to those of a GPT and
a ViT (layer norms).
"""
_ONE_AT_A_TIME = threading.RLock()
_OURS = threading.local()


def compiled_by_inductor(graph: Any, arguments: list[Any]) -> Callable[..., Any]:
    """Compile `graph` for arguments like these.

    Threads take turns: parts of Inductor are replaced meanwhile. What another thread compiles by
    itself gets the original parts.
    """
    from torch._inductor import compile, config  # slow to import: paid only when compiling

    options = {**OPTIONS, **({_MIXED_ORDER: False} if _normalises_with_bias(graph) else {})}
    with ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        choices = _parts_written_in_place(), _in_this_thread()
        for context in (torch.no_grad(), config.patch(options), *choices):
            stack.enter_context(context)
        compiled: Callable[..., Any] = compile(graph, arguments)
        return compiled


def _normalises_with_bias(graph: Any) -> bool:
    """True if the graph has the backward of a layer norm."""
    backward = torch.ops.aten.native_layer_norm_backward.default
    nodes = getattr(graph, "graph", None)
    return nodes is not None and bool(nodes.find_nodes(op="call_function", target=backward))


@contextmanager
def _in_this_thread() -> Iterator[None]:
    _OURS.compiles = True
    try:
        yield
    finally:
        _OURS.compiles = False


def _replaced_if_there(
    owner: Any, name: str, ours: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Replace a private function of Inductor for this thread; another version may not have it."""
    by_itself: Any = getattr(owner, name, None)

    def function(*args: Any, **kwargs: Any) -> Any:
        return (ours if getattr(_OURS, "compiles", False) else by_itself)(*args, **kwargs)

    return replaced_attributes(owner, **({name: function} if by_itself is not None else {}))


def _parts_written_in_place() -> AbstractContextManager[None]:
    """Let the kernel of each part of a concatenation write it where it belongs, in this context.

    Inductor would compute every part for every number of the result, and take the one that counts.
    On an H200 that took 66 µs for the gradients of queries, keys and values (4,096 rows of 768),
    where moving them takes 10. It still does so if the parts are in memory already, and if only
    pointwise operations read the result.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.utils import is_pointwise_use
    from torch._inductor.virtualized import V

    by_itself: Any = getattr(lowering, "pointwise_cat", None)

    def decide(inputs: Any, dim: int = 0) -> Any:
        copies = all(map(ir.is_storage_and_layout, inputs))
        if copies or all(is_pointwise_use(use, _may_be_inlined) for use in V.current_node.users):
            return by_itself(inputs, dim)
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim))

    return _replaced_if_there(lowering, "pointwise_cat", decide)


def _may_be_inlined(operation: Any) -> bool:
    return operation in (torch.ops.aten.cat.default, torch.ops.aten.constant_pad_nd.default)
