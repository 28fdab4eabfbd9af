"""Activation checkpointing for any model: its repeated blocks are recomputed in the backward.

```python
blocks = repeated_blocks(model)          # ["blocks.0", "blocks.1", …]
with_checkpoints(model, blocks)          # from now on each keeps only its inputs
```

The results do not change: torch's checkpoint replays the random generators, and buffers that a
block changes (BatchNorm's running statistics) are changed once, by the forward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.window.autograd_graph import in_backward

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's blocks: the outermost modules of a repeated class.

    For example a transformer's layers or a ResNet's bottlenecks. A block has submodules, is not
    just a container, and its class occurs at least twice. Blocks inside blocks are not named. Two
    towers, or an encoder and a decoder, that are stacks of blocks themselves are not blocks. In a
    model without such classes, the innermost `nn.Sequential`s are the blocks.

    >>> layer = lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> repeated_blocks(nn.Sequential(layer(), layer(), nn.Linear(8, 8)))
    ['0', '1']
    """
    by_class: dict[type[nn.Module], list[str]] = defaultdict(list)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name and _is_block(module):
            by_class[_class_of(module)].append(name)
    if all(len(names) < 2 for names in by_class.values()):
        innermost = [name for name, module in modules.items() if name and _is_sequence(module)]
        return innermost if len(innermost) > 1 else []
    repeated = {
        name
        for names in by_class.values()
        if len(names) > 2 or (len(names) == 2 and not all(_is_stack(modules[n]) for n in names))
        for name in names
    }
    outermost = [name for name in repeated if not repeated.intersection(_ancestors(name))]
    order = {name: place for place, name in enumerate(modules)}
    return sorted(outermost, key=order.__getitem__)


def _is_block(module: nn.Module) -> bool:
    has_parts = any(module.children()) and type(module) not in _CONTAINERS
    return has_parts and any(True for _ in module.parameters())


def _is_sequence(module: nn.Module) -> bool:
    """True for an nn.Sequential of several layers, none of which has layers of its own."""
    layers = list(module.children())
    has_parts = len(layers) > 1 and any(True for _ in module.parameters())
    is_innermost = has_parts and not any(any(layer.children()) for layer in layers)
    return is_innermost and _class_of(module) is nn.Sequential


def blocks_to_checkpoint(model: nn.Module) -> list[str]:
    """Return the names of the repeated blocks that are not checkpointed yet."""
    modules = dict(model.named_modules())
    return [name for name in repeated_blocks(model) if not is_checkpointed(modules[name])]


def _is_stack(module: nn.Module) -> bool:
    """True if the module contains a sequence with more than two blocks of one class."""
    for inside in module.modules():
        if isinstance(inside, nn.ModuleList | nn.Sequential):
            kinds = Counter(_class_of(part) for part in inside if _is_block(part))
            if any(count > 2 for count in kinds.values()):
                return True
    return False


def with_checkpoints(model: nn.Module, blocks: Iterable[str] | None = None) -> list[str]:
    """Checkpoint these blocks (default: all repeated ones) and return their names.

    Names, parameters and `state_dict` do not change; `checkpointed` undoes it. A block that is
    already checkpointed is left alone.
    """
    names = repeated_blocks(model) if blocks is None else list(blocks)
    if not names:
        raise UnsupportedError(
            f"{type(model).__name__} has no repeated blocks to checkpoint: call "
            "torch.utils.checkpoint in its forward, or name the modules in your own code, "
            "wholebatch.memory.with_checkpoints(model, ['encoder', 'decoder'])"
        )
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise OptionError(f"blocks: {type(model).__name__} has no module named {name!r}")
    for name in names:
        if not is_checkpointed(modules[name]):
            # Make a subclass, as FSDP2 does. It is copied, moved and saved like the original; a
            # replaced `forward` would keep a reference to the original.
            kind: Any = type(modules[name])
            modules[name].__class__ = _checkpointed(kind)
    return names


@contextmanager
def checkpointed(model: nn.Module, blocks: Iterable[str] | None = None) -> Iterator[list[str]]:
    """Apply `with_checkpoints` within this context."""
    before = {id(module) for module in model.modules() if is_checkpointed(module)}
    try:
        yield with_checkpoints(model, blocks)
    finally:
        for module in model.modules():
            if is_checkpointed(module) and id(module) not in before:
                module.__class__ = _class_of(module)


def is_checkpointed(module: nn.Module) -> bool:
    """True if `with_checkpoints` has been applied to this module itself."""
    return isinstance(module, _Checkpointed)


class _Checkpointed(nn.Module):
    """The mixin that checkpoints the calls of a block."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().__call__(*args, **kwargs)
        forward = super().__call__
        args, kwargs = _without_caches(self, args, kwargs)

        def once_or_again(*args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                return forward(*args, **kwargs)
            with _buffers_kept(self):
                return forward(*args, **kwargs)

        return checkpoint(once_or_again, *args, use_reentrant=False, **kwargs)


@cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Checkpointed{kind.__name__}", (_Checkpointed, kind), {})


def _class_of(module: nn.Module) -> type[nn.Module]:
    kind = type(module)
    return kind.__mro__[2] if is_checkpointed(module) else kind


def _without_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without key-value caches, which the recomputation would write again.

    Models of transformers make an empty cache in every forward, and training does not read it. A
    cache that is not empty (a learned prefix) is part of the model, and is refused.
    """
    if getattr(module, "_can_checkpoint_with_cache", False):  # It only reads the cache.
        return args, kwargs
    caches = [argument for argument in (*args, *kwargs.values()) if _is_cache(argument)]
    if any(cache.get_seq_length() > 0 for cache in caches):
        raise UnsupportedError(
            f"{_class_of(module).__name__} is checkpointed and got a cache with keys and values: "
            "the cache would be written twice. Train without checkpointing, or pass no "
            "past_key_values"
        )
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache") is True:
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and hasattr(value, "update")


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the buffers after a recomputation: the first forward has already changed them."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            # Use `.data`: the graph has just saved these buffers, and autograd would raise if
            # their version changed.
            buffer.data.copy_(value)


def _ancestors(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name
