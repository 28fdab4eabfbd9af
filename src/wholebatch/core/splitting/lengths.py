"""The length of each sample of a padded batch, according to the batch itself."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from wholebatch.core.splitting.layout import Layout
from wholebatch.core.splitting.structure import Leaf, is_array
from wholebatch.core.splitting.token_budget import Tokens
from wholebatch.errors import SplitError

__all__ = ["lengths_of", "named"]

# The label that losses ignore, by the convention of PyTorch and Hugging Face.
_IGNORED = -100


def lengths_of(layout: Layout, by: Tokens) -> tuple[list[int] | None, int | None]:
    """Return the length of each sample (None if unknown), and the width of the batch."""
    width: int | None
    if by.lengths is not None:
        lengths, width = _lengths_given(layout, by, by.lengths)
    else:
        if by.pad is not None:
            real: Tensor | None = _real_by_padding(layout, by.pad)
        elif by.mask is not None:
            real = _real_by_mask(layout, named(layout, by.mask, "mask"))
        else:
            real = _real_by_attention_mask(layout)
        if real is None:
            return None, _width(layout)
        lengths, width = _ends(real), real.shape[1]
    counted = _counted_labels(layout, by, width)
    if counted is not None:
        lengths = [max(pair) for pair in zip(lengths, _ends(counted), strict=True)]
    return lengths, width


def _ends(real: Tensor) -> list[int]:
    """Return the index after each sample's last real token: holes and left padding are kept."""
    if real.shape[1] == 0:
        return [0] * len(real)
    places = torch.arange(1, real.shape[1] + 1, device=real.device)
    ends: list[int] = (real * places).amax(dim=1).tolist()
    return ends


def _lengths_given(layout: Layout, by: Tokens, name: str) -> tuple[list[int], int | None]:
    value = named(layout, name, "lengths").value
    listed = value.tolist() if is_array(value) else value
    if (
        not isinstance(listed, (list, tuple))
        or len(listed) != layout.size
        or not all(isinstance(n, Integral) and int(n) >= 0 for n in listed)
    ):
        raise SplitError(
            f"tokens(lengths={name!r}): must hold one whole number per sample ({layout.size}), "
            f"got {_described(value)}"
        )
    width = _width_beside_lengths(layout, by)
    longest = max(range(layout.size), key=lambda row: listed[row])
    if width is not None and listed[longest] > width:
        raise SplitError(
            f"tokens(lengths={name!r}): sample {longest} has length {listed[longest]}, but the "
            f"batch is {width} tokens wide"
        )
    return [int(n) for n in listed], width


def _real_by_padding(layout: Layout, pad: Mapping[str, float]) -> Tensor:
    reals: dict[str, Tensor] = {}
    for name, value in pad.items():
        leaf = named(layout, name, "pad")
        if not is_array(leaf.value) or leaf.value.ndim < 2 or len(leaf.value) != layout.size:
            raise SplitError(
                f"tokens(pad=...): {name!r} must be [samples, tokens, ...], got "
                f"{_described(leaf.value)}"
            )
        real = _dense(leaf.value) != value
        reals[name] = real.flatten(2).any(dim=2) if real.ndim > 2 else real
    widths = {name: real.shape[1] for name, real in reals.items()}
    if len(set(widths.values())) > 1:
        raise SplitError(f"tokens(pad=...): the leaves differ in their number of tokens: {widths}")
    first, *others = reals.values()
    for other in others:
        first = first | other.to(first.device)
    return first


def _real_by_mask(layout: Layout, leaf: Leaf) -> Tensor:
    value = leaf.value
    if not is_array(value) or value.ndim != 2 or len(value) != layout.size:
        raise SplitError(
            f"tokens(mask={leaf.name!r}): must be [samples, tokens], got {_described(value)}"
        )
    mask = _dense(value)
    if _is_additive(mask):
        raise SplitError(
            f"tokens(mask={leaf.name!r}): has negative values, so it is one that is added to the "
            "scores (0 where a token is real); give one that is nonzero where a token is real"
        )
    return mask != 0


def _real_by_attention_mask(layout: Layout) -> Tensor | None:
    """Return the mask that Hugging Face's tokenizers produce, if the batch has one."""
    for leaf in _sequences(layout):
        if leaf.name == "attention_mask" and leaf.value.ndim == 2:
            mask = _dense(leaf.value)
            return None if _is_additive(mask) else mask != 0
    return None


def _is_additive(mask: Tensor) -> bool:
    return mask.is_floating_point() and bool((mask < 0).any())


def _counted_labels(layout: Layout, by: Tokens, width: int | None) -> Tensor | None:
    """Return a mask of the labels that count in the loss; these tokens are never trimmed."""
    if "labels" in (by.pad or ()) or "labels" in (by.trim or ()):
        return None
    for leaf in _sequences(layout):
        if leaf.name == "labels" and tuple(leaf.value.shape) == (layout.size, width):
            labels = _dense(leaf.value)
            return None if labels.is_floating_point() else labels != _IGNORED
    return None


def _sequences(layout: Layout) -> list[Leaf]:
    return [
        leaf
        for leaf, batched in zip(layout.leaves, layout.batched, strict=True)
        if batched and is_array(leaf.value) and leaf.value.ndim >= 2
    ]


def _width(layout: Layout) -> int | None:
    """Return the tokens of the first [samples, tokens] leaf, else of [samples, tokens, ...]."""
    shapes = [leaf.value.shape for leaf in _sequences(layout)]
    flat = [shape for shape in shapes if len(shape) == 2]
    return int((flat or shapes)[0][1]) if shapes else None


def _width_beside_lengths(layout: Layout, by: Tokens) -> int | None:
    """Return the width of the batch if only lengths are given: that of `trim`, or of all leaves."""
    sizes: dict[str, int] = {}
    if by.trim:
        for name, dims in by.trim.items():
            shape = tuple(getattr(named(layout, name, "trim").value, "shape", ()))
            sizes |= {f"{name}, dimension {dim}": shape[dim] for dim in dims if dim < len(shape)}
    if not sizes:
        sizes = {leaf.name: int(leaf.value.shape[1]) for leaf in _sequences(layout)}
    if len(set(sizes.values())) > 1:
        raise SplitError(
            f"tokens(lengths={by.lengths!r}): cannot tell how wide the batch is, the leaves have "
            f'{sizes}; say which hold tokens, such as trim={{"{next(iter(sizes))}": (1,)}}'
        )
    return next(iter(sizes.values()), None)


def named(layout: Layout, name: str, option: str) -> Leaf:
    """Return the leaf that an option of `tokens` names."""
    for leaf in layout.leaves:
        if leaf.name == name:
            return leaf
    names = ", ".join(leaf.name for leaf in layout.leaves)
    raise SplitError(f"tokens({option}=...): the batch has no leaf {name!r}; it has {names}")


def _dense(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of shape {tuple(value.shape)}" if is_array(value) else kind
