"""A graph compiled by Inductor, with what was found to pay on top of its own choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["compiled_by_inductor"]


def compiled_by_inductor(
    graph: Any, arguments: list[Any], more: Mapping[str, Any], *, whole_rows: int
) -> Callable[..., Any]:
    """The function that computes `graph` on arguments like these; `more` are options of Inductor.

    Rows of up to `whole_rows` numbers that a kernel reduces are read once and held.
    """
    import torch._inductor  # only who compiles pays for its import
    from torch._inductor import config

    # It would put the gradients of a layer norm's weights, as partial sums, into the kernel of its
    # input's gradient: on an H200 that made a window of a GPT (64 sequences in micro-batches of 8)
    # longer, by 2 ms of 132.
    options = {"triton.mix_order_reduction": False, **more}
    known = {name: value for name, value in options.items() if _has(config, name)}
    with torch.no_grad(), config.patch(known), _whole_rows(whole_rows):
        compiled: Callable[..., Any] = torch._inductor.compile(graph, arguments)
        return compiled


@contextmanager
def _whole_rows(longest: int) -> Iterator[None]:
    """Inductor's own bound is 1024; longer rows it reads two or three times over."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V
    from torch.compiler import config

    name = "should_use_persistent_reduction"
    by_itself = getattr(InductorChoices, name, None)
    if by_itself is None or not hasattr(config, "cache_key_tag"):  # another version's Inductor
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
    config.cache_key_tag = f"{tag}wholebatch: rows of {longest}"  # its cache knows no choices
    try:
        yield
    finally:
        setattr(InductorChoices, name, staticmethod(by_itself))
        config.cache_key_tag = tag


def _has(config: Any, name: str) -> bool:
    """Whether this version of Inductor has the option."""
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True
