"""Micro-batches of a batch: by samples, or by tokens sorted by length.

The update does not depend on the order of the samples, so sorting them by length costs nothing. In
the given order, every micro-batch would be as wide as its longest sample. Only columns at the right
end are cut (cutting at the left would shift the positions), and only if the batch says which tokens
are padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Number
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from wholebatch.batch.packing import packed_micro_batches
from wholebatch.batch.samples import (
    BatchSize,
    Layout,
    Leaf,
    Rows,
    Static,
    is_array,
    is_positive,
    layout_of,
    take,
)
from wholebatch.errors import OptionError, SplitError


class Batches(tuple[Any, ...]):
    """A window that is given as several batches."""


def split(
    batch: Any, micro_batch: int | Tokens, *, batch_size: BatchSize = None, static: Static = ()
) -> list[Any]:
    """Split `batch` into micro-batches of the same structure: nothing lost, nothing repeated.

    With a number of samples, the micro-batches are views in the order of the batch, and the last
    one may be smaller. With `tokens(...)` each fits a token budget, and the samples are sorted and
    trimmed.

    >>> import torch
    >>> batch = {"x": torch.arange(10).view(5, 2), "names": list("abcde"), "temperature": 0.5}
    >>> [micro["names"] for micro in split(batch, 2)]
    [['a', 'b'], ['c', 'd'], ['e']]
    >>> split(batch, 2)[2]
    {'x': tensor([[8, 9]]), 'names': ['e'], 'temperature': 0.5}

    Tensors, NumPy arrays and lists of samples are split. Mappings, dataclasses, named tuples,
    tuples and lists around them keep their type. Everything else is passed on unchanged.

    Args:
        batch: Tensors, or any structure of them.
        micro_batch: Samples per micro-batch, or `wb.tokens(...)`.
        batch_size: The number of samples, or a function that returns it. Default: the number that
            fits most leaves.
        static: Names of leaves to pass on whole although their first dimension is the number of
            samples: `static=("aux.class_weights",)`.
    """
    return [micro for micro, _ in split_numbered(batch, micro_batch, batch_size, static)]


def split_numbered(
    batch: Any, micro_batch: int | Tokens, batch_size: BatchSize = None, static: Static = ()
) -> list[tuple[Any, Sequence[int]]]:
    """Return the micro-batches, each with the indices of its samples in the batch."""
    if not isinstance(micro_batch, Tokens) and not is_positive(micro_batch):
        raise OptionError(
            f"micro_batch={micro_batch!r}: must be a positive number of samples or "
            "wholebatch.tokens(budget)"
        )
    layout = layout_of(batch, batch_size=batch_size, static=static)
    if isinstance(micro_batch, Tokens):
        return token_micro_batches(layout, micro_batch)
    rows = range(layout.size)
    return [
        (layout.take(slice(start, start + micro_batch)), rows[start : start + micro_batch])
        for start in rows[::micro_batch]
    ]


def joined(
    batches: Sequence[Any],
    by: Tokens | None = None,
    *,
    batch_size: BatchSize = None,
    static: Static = (),
) -> Any:
    """Return these batches as one; None if they differ in more than their number of samples.

    With `by`, they may differ in width as well, if that says where their padding is: narrower ones
    are padded on the right, labels with -100, everything else with `by.pad` or zeros.

    >>> import torch
    >>> parts = [{"x": torch.ones(2, 3), "t": 0.5}, {"x": torch.zeros(1, 3), "t": 0.5}]
    >>> joined(parts)["x"].shape, joined([*parts, {"x": torch.zeros(1, 4), "t": 0.5}])
    (torch.Size([3, 3]), None)
    """
    layouts = [layout_of(one, batch_size=batch_size, static=static) for one in batches]
    first, *others = layouts
    kinds = [(leaf.name, leaf.batched) for leaf in first.leaves]
    if any(kinds != [(leaf.name, leaf.batched) for leaf in other.leaves] for other in others):
        return None
    lengths = [(None, None) if by is None else lengths_of(layout, by) for layout in layouts]
    widths = [None if known is None else width for known, width in lengths]  # of padded ones
    values = []
    for index, leaf in enumerate(first.leaves):
        found = [layout.leaves[index].value for layout in layouts]
        if not leaf.batched:
            if any(value is not leaf.value and not _is_equal(value, leaf.value) for value in found):
                return None
            values.append(leaf.value)
            continue
        if not all(isinstance(value, Tensor) and value.dtype is found[0].dtype for value in found):
            return None
        pad = dict(by.pad or {}) if by is not None else {}
        filler = pad.get(leaf.name, _IGNORED if leaf.name == "labels" else 0)
        parts = _of_one_width(found, widths, filler)
        if parts is None:
            return None
        values.append(torch.cat(parts))
    return first.structure.build(values)


def _of_one_width(
    tensors: list[Tensor], widths: Sequence[int | None], filler: float
) -> list[Tensor] | None:
    """Pad the tokens of each tensor to the widest; None if they differ in another dimension."""
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return tensors
    if len({tensor.shape[2:] for tensor in tensors}) > 1 or any(
        tensor.dim() < 2 or tensor.shape[1] != width
        for tensor, width in zip(tensors, widths, strict=True)
    ):
        return None
    widest = max(tensor.shape[1] for tensor in tensors)
    return [
        functional.pad(
            tensor, (0, 0) * (tensor.dim() - 2) + (0, widest - tensor.shape[1]), value=filler
        )
        for tensor in tensors
    ]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def drop_samples(
    batch: Any, keep: int, *, batch_size: BatchSize = None, static: Static = ()
) -> Any:
    """Return the first `keep` samples of `batch`, as views in the same structure.

    >>> drop_samples({"x": [1, 2, 3, 4]}, 3)
    {'x': [1, 2, 3]}
    """
    layout = layout_of(batch, batch_size=batch_size, static=static)
    if not is_positive(keep) or keep > layout.size:
        raise OptionError(
            f"keep={keep!r}: must be a number of samples from 1 to {layout.size}, the batch's own"
        )
    return batch if keep == layout.size else layout.take(slice(0, keep))


@dataclass(frozen=True)
class Tokens:
    """A micro-batch size of at most `budget` padded tokens, for `split` and `WholeBatch`.

    The length of a sample comes from `mask`, `pad` or `lengths`. If none is given, an
    "attention_mask" in the batch is the mask. Without one, nothing is trimmed, and every sample
    counts as many tokens as the batch is wide. A sample is never cut before its last label (in a
    leaf called "labels") that is not -100: such labels count in the loss even where the mask is
    zero. `pad` or `trim` can override this for the labels.

    `pack=True` puts several samples into each row, without padding, and adds `position_ids` in
    place of the attention mask; `pack=512` makes rows of 512 tokens. A batch that is packed
    already (whose `position_ids` begin again within a row) is divided between its sequences.
    Labels that are shifted already must be called "shift_labels".

    >>> import torch
    >>> batch = {
    ...     "input_ids": torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7], [8, 9, 0, 0]]),
    ...     "length": [2, 1, 4, 2],
    ... }
    >>> from wholebatch.batch import split
    >>> [micro["input_ids"].tolist() for micro in split(batch, tokens(6, lengths="length"))]
    [[[4, 5, 6, 7]], [[1, 2], [8, 9], [3, 0]]]

    Args:
        budget: The most tokens of a micro-batch, padding included.
        mask: The name of a `[samples, tokens]` leaf that is nonzero for real tokens.
        pad: The padding value of each leaf that decides, `{"input_ids": 0, "labels": -100}`. A
            token is padding if all of them have their padding value.
        lengths: The name of a leaf with one length per sample.
        trim: Which dimensions of a leaf to trim. Needed where the width is not the second: for an
            attention mask `[samples, 1, tokens, tokens]` it is `{"name": (2, 3)}`. `{"name": ()}`
            trims none.
        sort: Sort the samples by length. False keeps their order.
        pack: Put several samples into each row, without padding. A number is the length of a row.
        multiple: Trim to multiples of so many tokens. Micro-batches then have few different shapes,
            and each shape has a compiled graph of its own.
    """

    budget: int
    _: KW_ONLY
    mask: str | None = None
    pad: Mapping[str, float] | None = None
    lengths: str | None = None
    trim: Mapping[str, tuple[int, ...]] | None = None
    sort: bool = True
    multiple: int = 1
    pack: bool | int = False

    def __post_init__(self) -> None:
        if not isinstance(self.pack, bool) and not is_positive(self.pack):
            raise OptionError(
                f"tokens(pack={self.pack!r}): must be True, False, or the number of tokens in a row"
            )
        if self.pack and (self.multiple > 1 or self.trim is not None or not self.sort):
            raise OptionError(
                "tokens(pack=...) with multiple=, trim= or sort=False: leave them out"
            )
        if not is_positive(self.budget):
            raise OptionError(f"tokens({self.budget!r}): must be a positive number of tokens")
        if not is_positive(self.multiple):
            raise OptionError(
                f"tokens(multiple={self.multiple!r}): must be a positive number of tokens"
            )
        declared = [name for name in ("mask", "pad", "lengths") if getattr(self, name) is not None]
        if len(declared) > 1:
            raise OptionError(
                f"tokens({' and '.join(f'{name}=' for name in declared)}): give one of them; each "
                "says how long the samples are"
            )
        for option in ("mask", "lengths"):
            value = getattr(self, option)
            if value is not None and not (isinstance(value, str) and value):
                raise OptionError(
                    f"tokens({option}={value!r}): must be the name of a leaf of the batch"
                )
        if self.pad is not None and not (
            isinstance(self.pad, Mapping)
            and self.pad
            and all(isinstance(value, Number) for value in self.pad.values())
        ):
            raise OptionError(
                f"tokens(pad={self.pad!r}): must give the padding value of each leaf by its name, "
                'such as {"input_ids": 0, "labels": -100}'
            )
        if self.trim is not None:
            object.__setattr__(self, "trim", _checked_trim(self.trim))

    def __str__(self) -> str:
        return f"{self.budget} tokens"


tokens = Tokens  # as one writes it: `micro_batch=wb.tokens(4096)`


def check_micro_batch(micro_batch: Any) -> int | Tokens | Literal["auto"]:
    """Return the option; refuse it unless it is a number of samples, "auto" or a token budget."""
    if isinstance(micro_batch, Tokens):
        return micro_batch
    if isinstance(micro_batch, str) and micro_batch == "auto":
        return "auto"
    if not is_positive(micro_batch):
        raise OptionError(
            f'micro_batch={micro_batch!r}: must be a positive number of samples, "auto", or '
            "wb.tokens(4096)"
        )
    return int(micro_batch)


def _checked_trim(trim: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    if not isinstance(trim, Mapping):
        raise OptionError(
            f'tokens(trim={trim!r}): must give dimensions by the name of a leaf, {{"bias": (1, 2)}}'
        )
    checked = {}
    for name, dims in trim.items():
        if not isinstance(dims, (tuple, list)) or not all(
            is_positive(dim) or (dim == 0 and dim is not False) for dim in dims
        ):
            raise OptionError(
                f"tokens(trim={{{name!r}: {dims!r}}}): must be a tuple of dimensions, such as (1,)"
            )
        checked[name] = tuple(int(dim) for dim in dims)
    return checked


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
    batched = (leaf for leaf in layout.leaves if leaf.batched)
    return [leaf for leaf in batched if is_array(leaf.value) and leaf.value.ndim >= 2]


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


def token_micro_batches(layout: Layout, by: Tokens) -> list[tuple[Any, Sequence[int]]]:
    """Return the micro-batches under a token budget, each with its samples' indices in the batch.

    The longest samples come first.
    """
    lengths, width = lengths_of(layout, by)
    if by.pack:
        return packed_micro_batches(layout, by, lengths)  # type: ignore[return-value]
    cuts: dict[int, tuple[int, ...]] = {}
    if lengths is not None and width is not None:
        cuts = _cuts(layout, by, width)
    elif by.trim:
        raise SplitError(
            "tokens(trim=...): the batch does not say what is padding; give mask=, pad= or lengths="
        )
    if lengths is None:
        if width is None:
            raise SplitError(
                f"tokens({by.budget}): no leaf is [samples, tokens]; say lengths= (the name of a "
                "leaf with the length of each sample), or split by a number of samples"
            )
        lengths = [width] * layout.size
    elif by.multiple > 1 and width is not None:
        lengths = [_rounded(length, by, width) for length in lengths]
    return [
        (_micro_batch(layout, rows, cuts, max(1, *(lengths[row] for row in rows))), rows)
        for rows in _pack(lengths, by)
    ]


def without_padding(layout: Layout, by: Tokens, count: int) -> tuple[Any, Any] | None:
    """Return a few short samples as given, and trimmed; None if nothing is trimmed of them."""
    lengths, width = lengths_of(layout, by)
    if lengths is None or width is None:
        return None
    made = [_rounded(length, by, width) for length in lengths]
    rows = sorted((row for row in range(layout.size) if made[row] < width), key=made.__getitem__)
    if not rows[:count]:
        return None
    few = rows[:count]
    cuts = _cuts(layout, by, width)
    return layout.take(few), _micro_batch(layout, few, cuts, made[few[-1]])


def _rounded(length: int, by: Tokens, width: int) -> int:
    """Round up to the next multiple, but not beyond the batch's width, nor beyond the budget."""
    rounded = min(-(-max(length, 1) // by.multiple) * by.multiple, width)
    return rounded if rounded <= by.budget else length


def _pack(lengths: list[int], by: Tokens) -> list[list[int]]:
    """Return which samples go together: filled greedily, in the given order or longest first."""
    order = list(range(len(lengths)))
    if by.sort:
        order.sort(key=lambda row: -lengths[row])
    packs: list[list[int]] = []
    longest = 0
    for row in order:
        length = max(lengths[row], 1)
        if length > by.budget:
            raise SplitError(
                f"sample {row} is {length} tokens long, more than the budget of {by.budget}: "
                f"raise the budget to {max(lengths)} or more, or shorten the samples"
            )
        longest = max(longest, length)
        if packs and (len(packs[-1]) + 1) * longest <= by.budget:
            packs[-1].append(row)
        else:
            packs.append([row])
            longest = length
    return packs


def _micro_batch(
    layout: Layout, rows: list[int], cuts: Mapping[int, tuple[int, ...]], width: int
) -> Any:
    # Neighbours in order are a slice, which needs no copy.
    run = rows == list(range(rows[0], rows[0] + len(rows)))
    picked: Rows = slice(rows[0], rows[0] + len(rows)) if run else rows
    values = []
    for index, leaf in enumerate(layout.leaves):
        value = leaf.value
        for dim in cuts.get(index, ()):
            value = _narrow(value, dim, width)
        values.append(take(value, picked) if leaf.batched else value)
    return layout.structure.build(values)


def _narrow(value: Any, dim: int, width: int) -> Any:
    width = min(width, value.shape[dim])
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            return value.narrow(dim, 0, width)
        return value.index_select(dim, torch.arange(width, device=value.device))
    return value[(slice(None),) * dim + (slice(width),)]


def _cuts(layout: Layout, by: Tokens, width: int) -> dict[int, tuple[int, ...]]:
    """Return the dimensions to trim, by the index of each trimmed leaf in the layout."""
    trim = by.trim or {}
    for name in trim:
        named(layout, name, "trim")
    cuts = {}
    for index, leaf in enumerate(layout.leaves):
        if not is_array(leaf.value):
            continue
        shape = tuple(leaf.value.shape)
        dims = trim.get(leaf.name)
        if dims is not None:
            for dim in dims:
                if dim >= len(shape) or shape[dim] != width or (leaf.batched and dim == 0):
                    raise SplitError(
                        f"tokens(trim={{{leaf.name!r}: {dims}}}): dimension {dim} of {shape} is "
                        f"not the {width} tokens of the batch"
                    )
        else:
            dims = tuple(dim for dim in range(1, len(shape)) if shape[dim] == width)
            if not leaf.batched or width < 2:
                dims = ()
            elif dims not in ((), (1,)):
                raise SplitError(
                    f"the leaf {leaf.name!r} is {shape}, and the batch is {width} tokens wide: "
                    f"cannot tell which dimensions are tokens; say trim={{{leaf.name!r}: {dims}}} "
                    "(those that are), or () for none"
                )
        if dims:
            cuts[index] = dims
    return cuts
