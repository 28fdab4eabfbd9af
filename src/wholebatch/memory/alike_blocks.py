"""Predictions for deep models from shallow ones: blocks that are alike add the same bytes each.

The bytes alive at one moment of a window (block 2's forward, the backward of the last block but
one, …) grow linearly with the number of blocks. The peak does not: it may move to another moment.
So each moment is extrapolated by itself, and the largest is the peak. Moments of blocks in the
middle lie between those near the two ends, because they are linear in the block's place too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from wholebatch.memory.activation_checkpointing import repeated_blocks

FEW, MORE, CHECK = 4, 5, 6
"""The numbers of blocks to simulate; the third checks, once, that memory is linear in them."""
DEEP = 16
"""The number of alike blocks from which extrapolation is faster than simulating all."""
_ENDS = FEW // 2


@dataclass(frozen=True)
class AlikeBlocks:
    """The blocks at the end of one list of modules that differ in nothing but their numbers."""

    inside: str
    names: tuple[str, ...]

    @contextmanager
    def shortened(self, model: nn.Module, number: int | None) -> Iterator[None]:
        """Leave only the first `number` of the blocks in the model, within this context."""
        modules = model.get_submodule(self.inside)._modules
        before = dict(modules)
        for name in self.names[number:] if number else ():
            del modules[name]
        try:
            yield
        finally:
            modules.update(before)

    @contextmanager
    def landmarks(
        self, model: nn.Module, number: int, reached: Callable[[str], None]
    ) -> Iterator[None]:
        """Call `reached(place)` where the forward or backward of a block near an end begins."""

        def output_hook(place: str, module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple | list) else [output]
            first = next((one for one in parts if isinstance(one, torch.Tensor)), None)
            if first is not None and first.requires_grad:
                first.register_hook(lambda gradient: reached(f"backward {place}"))

        blocks = [model.get_submodule(f"{self.inside}.{n}") for n in self.names[:number]]
        handles = []
        for at, block in enumerate(blocks):
            place = str(at if at < _ENDS else at - number)
            if _ENDS <= at < number - _ENDS:
                place = "between"
            start = f"forward {place}"
            handles.append(block.register_forward_pre_hook(lambda *_, at=start: reached(at)))
            handles.append(block.register_forward_hook(partial(output_hook, place)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def find_alike_blocks(model: nn.Module) -> AlikeBlocks | None:
    """Return the longest run of alike blocks at the end of a list, or None if it is short."""

    def kind(name: str) -> tuple[str, Any]:
        return name.rpartition(".")[0], _signature(model.get_submodule(name))

    longest: tuple[str, ...] = ()
    for (inside, _), run in groupby(repeated_blocks(model), key=kind):
        names = tuple(name.rpartition(".")[2] for name in run)
        is_last = names[-1] == next(reversed(model.get_submodule(inside)._modules))
        if inside and is_last and len(names) > len(longest):
            longest, found = names, AlikeBlocks(inside, names)
    return None if len(longest) < DEEP or _share_tensors(model, found) else found


def _share_tensors(model: nn.Module, blocks: AlikeBlocks) -> bool:
    """True if a parameter of a block is used outside of it."""
    inside = [
        id(p)
        for n in blocks.names
        for p in model.get_submodule(f"{blocks.inside}.{n}").parameters()
    ]
    every = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    return len(set(inside)) < len(inside) or sum(one in set(inside) for one in every) > len(inside)


def _signature(block: nn.Module) -> Any:
    """Return all of a block that its memory can depend on, without its number."""
    return [
        (name, type(module), module.training, _shapes(module), _plain_values(module))
        for name, module in block.named_modules()
    ]


def _shapes(module: nn.Module) -> Any:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return [(n, t.shape, t.dtype, t.requires_grad) for n, t in tensors if t is not None]


def _plain_values(module: nn.Module) -> Any:
    """Return numbers and strings of a module; of a rate (dropout) only if it is 0."""
    return {
        name: bool(value) if isinstance(value, float) else value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | tuple)
        and not any(word in name for word in _NUMBERS_OF_BLOCKS)
    }


_NUMBERS_OF_BLOCKS = ("idx", "index", "layer_id", "layer_number", "depth")
