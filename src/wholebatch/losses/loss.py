"""The loss contract: a sum, and the units that it is a sum over.

A mean of means is the mean only if all parts have the same size. So a loss function returns two
things, the *total* and the *units*, and the window divides once, by all its units, at its close:

    gradient of the window = sum over micro-batches of d(total) / sum over micro-batches of units

>>> import torch
>>> per_sample = torch.tensor([0.5, 1.5], requires_grad=True)
>>> loss = Loss(per_sample.sum(), units=2)
>>> loss.total.item(), loss.units
(2.0, 2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from wholebatch.errors import LossError

Units: TypeAlias = int | float | Tensor
SINGLE = "loss"
"""The name under which a loss without named terms is kept."""

_SUM_OR_MEAN = (
    "is this scalar a sum or a mean? For a sum return wb.Loss(total, units), for a mean return "
    "wb.mean_loss(mean, units), where units is the number of samples, tokens or weights; or "
    "return the tensor of per-unit losses, without those of ignored labels"
)


_MUST_BE = {
    "total": ("the sum over its units", "call .sum() on per-unit losses"),
    "mean": ("the mean over its units", "call .mean() on per-unit losses, or give their sum"),
}


def check_total(total: object, name: Literal["total", "mean"] = "total") -> Tensor:
    """Return the loss of a micro-batch, or raise a LossError that says what is wrong with it.

    `name` says how it was given: as a sum, or as a mean.
    """
    must_be, reduce = _MUST_BE[name]
    if not isinstance(total, Tensor):
        what = f"{name}={total!r}" if isinstance(total, Real) else name
        do = "Add losses that have the same units; others go into wb.Loss.terms({...})"
        if isinstance(total, Real):
            do = "Give the tensor that the loss function returned, without .item() or float()"
        raise LossError(
            f"{what} is a {type(total).__name__}: must be a 0-dim tensor, {must_be}. {do}"
        )
    if total.dim() != 0:
        raise LossError(
            f"{name} of shape {tuple(total.shape)}: must be a 0-dim tensor, {must_be}; {reduce}"
        )
    if total.is_complex():
        raise LossError(f"{name} of dtype {total.dtype}: must be a real number")
    if not total.requires_grad and torch.is_grad_enabled():  # a first pass makes no graph
        raise LossError(
            f"{name} does not require a gradient: it is detached from the model, was computed "
            "under torch.no_grad(), or every parameter that it depends on is frozen. Give the loss "
            "of a forward pass of the model, without .detach()"
        )
    return total


def check_units(units: object) -> Units:
    """Return the units, or raise a LossError that says what is wrong with them."""
    if type(units) is int and 0 <= units < 2**53:  # nearly always
        return units
    if isinstance(units, Tensor):
        if units.dim() != 0:
            raise LossError(
                f"units of shape {tuple(units.shape)}: must be a number or a 0-dim tensor; "
                "call .sum() on per-sample weights"
            )
        if units.is_complex() or units.dtype is torch.bool:
            raise LossError(f"units of dtype {units.dtype}: must be real numbers")
        if units.requires_grad:
            raise LossError(
                "units require a gradient: the gradient of the mean then needs the units of the "
                "whole window, which a micro-batch does not have. If units are constants, pass "
                "units.detach(). If they are trained, return the mean from the loss of "
                "wb.Coupled, with units=1"
            )
        return units
    if isinstance(units, torch.SymInt | torch.SymFloat):  # a graph of many sizes is being traced
        return units  # type: ignore[return-value]
    if isinstance(units, bool) or not isinstance(units, Real):
        raise LossError(
            f"units={units!r}: must be a number or a 0-dim tensor, what the loss is a sum over "
            "(samples, tokens, weights)"
        )
    try:
        number = float(units)  # also of NumPy's own
    except OverflowError:  # 10**400 is no float
        number = math.inf
    if not 0 <= number < math.inf:
        raise LossError(f"units={repr(units)[:40]}: must be finite and not negative")
    return units if isinstance(units, int) else number


class Term(NamedTuple):
    """One named part of a loss: its sum, the units of that sum, and the weight of its mean."""

    total: Tensor
    units: Units
    weight: float = 1.0
    of_the_batch: bool = False
    """True if the loss compares samples, so that it is wrong for a micro-batch alone."""


@dataclass(frozen=True)
class Terms:
    """Several terms, each normalised by its own units over the window and over all ranks.

    Made by `Loss.terms`. The loss is the sum over terms of `weight * total / units`, with totals
    and units taken over the whole window.
    """

    by_name: Mapping[str, Term]


@dataclass(frozen=True)
class Loss:
    """A sum over units; the window's loss is the sum of totals over the sum of units.

    For a loss that is a mean use `wb.mean_loss(mean, units)`.

    >>> import torch, wholebatch as wb
    >>> def loss(model, micro):
    ...     errors = (model(micro["x"]) - micro["y"]).abs()
    ...     return wb.Loss(errors.sum(), units=errors.numel())

    Args:
        total: The loss of the micro-batch as a sum, a 0-dim tensor.
        units: What the sum is over: a number of samples or tokens, or a sum of weights. A 0-dim
            tensor on the device is read once per window.
        extras: Tensors by name to read in `acc.last_loss.extras` after `acc.run`, such as an
            accuracy. No gradient flows through them.
    """

    total: Tensor
    units: Units
    extras: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        check_total(self.total)
        check_units(self.units)
        for name, extra in self.extras.items():
            if not isinstance(extra, Tensor):
                raise LossError(f"extras[{name!r}] is {extra!r}: must be a tensor")

    @staticmethod
    def terms(terms: Mapping[str, Loss | tuple[Any, ...]]) -> Terms:
        """Return terms with units: `{"lm": (total, units), "aux": (total, units, weight)}`.

        A `Loss` stands for its total and units: `{"policy": loss, "kl": (other, weight)}`. Each
        term is normalised by its own units over the window and over all ranks, which must be
        counted before the first backward: give `WholeBatch` a `units=` function, or call
        `Accumulator.announce`.
        """
        if not terms:
            raise LossError("wb.Loss.terms({}): give at least one term")
        parsed = {}
        for name, term in terms.items():
            term = term if isinstance(term, tuple) else (term,)
            loss = term[0] if term else None
            if isinstance(loss, Loss):
                term = (loss.total, loss.units, *term[1:])
            if len(term) not in (2, 3):
                raise LossError(
                    f"term {name!r} is {term!r}: must be (total, units) or (total, units, weight), "
                    "or a wb.Loss, or (wb.Loss, weight)"
                )
            weight = term[2] if len(term) == 3 else 1.0
            if isinstance(weight, Tensor) and weight.dim() == 0 and not weight.requires_grad:
                weight = float(weight)
            if isinstance(weight, bool) or not isinstance(weight, Real):
                raise LossError(f"term {name!r} has weight {weight!r}: must be a number")
            whole = isinstance(loss, OfTheBatch)
            parsed[name] = Term(check_total(term[0]), check_units(term[1]), float(weight), whole)
        return Terms(parsed)


class OfMean(Loss):
    """The Loss of a mean: its total is the mean times its units."""


class OfTheBatch(Loss):
    """A loss that compares all samples it is given, so it is wrong for a micro-batch alone."""


def as_loss(result: object) -> Loss | Terms:
    """Return the result of a loss function as a Loss: per-unit losses become their sum."""
    if isinstance(result, Loss | Terms):
        return result
    if isinstance(result, Tensor):
        if result.dim() == 0:
            raise LossError(f"the loss function returned a bare scalar: {_SUM_OR_MEAN}")
        return Loss(result.sum(), result.numel())
    kind = type(result).__name__
    if isinstance(result, tuple):
        kind = f"({', '.join(type(each).__name__ for each in result)})"
    item = " (without .item() or float(): a number has no gradient)"
    raise LossError(
        f"the loss function returned {kind}: must be wb.Loss(total, units), wb.mean_loss(mean, "
        "units), wb.Loss.terms({...}) or a tensor of per-unit losses"
        f"{item if isinstance(result, Real) else ''}"
    )


def terms_of(loss: Loss | Terms) -> dict[str, Term]:
    """Return the terms of a loss by name; those of a plain one are a single term."""
    return {SINGLE: Term(loss.total, loss.units)} if isinstance(loss, Loss) else dict(loss.by_name)


def wide(values: Tensor) -> Tensor:
    """Return 16-bit values as float32: sums of thousands overflow fp16 and are rounded in bf16."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def mean_loss(mean: Tensor, units: Units) -> Loss:
    """Return the Loss of a mean over `units`.

    >>> import torch, wholebatch as wb
    >>> def loss(model, micro):
    ...     mean = torch.nn.functional.cross_entropy(model(micro["x"]), micro["y"])
    ...     return wb.mean_loss(mean, units=(micro["y"] != -100).sum())

    Args:
        mean: The loss of the micro-batch as a mean, a 0-dim tensor.
        units: What the mean is over: samples, tokens or a sum of weights.

    A micro-batch without units (all its tokens masked) has the mean 0/0; here it adds nothing
    instead of a nan. On a GPU and in a graph, write a mean of your own that may have no units as
    `total / count.clamp(min=1)`: otherwise its backward computes 0/0 again. A mean over no units
    that is not 0 would be lost, and is refused. Where the units are on a GPU, the loss becomes nan
    instead, and the window makes no update.
    """
    check_total(mean, "mean")
    units = check_units(units)
    mean = wide(mean)
    if is_known_to_be_zero(units):
        number = refuse_lost_mean(mean)
        if number is None:  # it is being traced
            return OfMean(mean.nan_to_num() * 0.0, units)
        nothing: Any = _Nothing
        return OfMean(mean * 0.0 if number == 0.0 else nothing.apply(mean), units)
    if isinstance(units, Tensor):
        value = mean.detach()
        is_lost = (units == 0) & ~value.isnan() & (value != 0)
        weight = units.to(mean.dtype) * torch.ones_like(value).masked_fill(is_lost, math.nan)
        total = torch.where((units == 0) & ~is_lost, mean.new_zeros(()), mean * weight)
        return OfMean(total, units)
    return OfMean(mean * units, units)


def refuse_lost_mean(mean: Tensor) -> float | None:
    """Refuse a mean over no units that is not 0: times its units, it would add nothing.

    Returns the mean, or None while it is traced and has no value yet.
    """
    try:
        value = float(mean.detach())
    except Exception:
        return None
    if not math.isnan(value) and value != 0:  # infinite: a sum, divided by 0
        raise LossError(
            f"a mean of {value:.6g} over units=0: it would be multiplied by 0 and lost. Pass the "
            "sum, wb.Loss(total, units) (for `sum / max(n, 1)`: wb.Loss(sum, n)). For a loss that "
            "must not count, pass `loss * 0`"
        )
    return value


def is_known_to_be_zero(units: Units) -> bool:
    """Return True if there is no unit, as far as that can be read without waiting."""
    if not isinstance(units, Tensor):
        return units == 0
    if units.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return False
    try:
        return not bool(units)
    except Exception:  # a tensor that is being traced, or one without numbers: it has no value yet
        return False


class _Nothing(torch.autograd.Function):
    """Return zero in place of a mean that was divided by zero, and gradients of zero."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor) -> Tensor:
        return torch.zeros_like(mean)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0])


def is_nothing(total: Tensor) -> bool:
    """True for a total over no units whose mean was divided by zero.

    Its backward would divide a zero gradient by zero again, so it is left out where nothing else
    needs it.
    """
    return type(total.grad_fn).__name__ == "_NothingBackward"


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    dim: int | None = None,
) -> Loss:
    """Return the cross-entropy summed over the labels that count, with their number as units.

    Classes are the last dimension (`logits[..., class]`, `labels[...]`) or, as in torch, the
    second (`logits[n, class, ...]`, `labels[n, ...]`). If both fit, pass `dim`. Labels with the
    shape of the logits are probabilities of the classes (mixed or distilled labels); as in torch,
    their mean is over the rows, whatever the weights. The sum is computed in float32 or better.

    Args:
        logits: Scores of the classes.
        labels: The right classes, or their probabilities.
        ignore_index: Labels with this value do not count.
        weight: A weight per class. The units are then the sum of the weights of the labels.
        label_smoothing: As in torch.
        dim: The dimension of the classes: -1, or 1.
    """
    for name, tensor in (("logits", logits), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise LossError(
                f"{name} of type {type(tensor).__name__}: must be a tensor (labels in a list: "
                "torch.tensor(labels); the output of a Hugging Face model: its .logits)"
            )
    shape, has_more = logits.shape, logits.dim() > 2
    of_rows = labels.is_floating_point() and shape == labels.shape and logits.dim() > 1
    is_last = of_rows or shape[:-1] == labels.shape
    is_second = has_more and (of_rows or shape[:1] + shape[2:] == labels.shape)
    shapes = f"logits of shape {tuple(shape)} and labels of shape {tuple(labels.shape)}"
    if is_last and is_second and dim is None:
        raise LossError(
            f"{shapes}: the classes may be the last dimension or the second; pass dim=-1, or dim=1 "
            "(torch's layout)"
        )
    if is_last and dim in (None, -1, logits.dim() - 1):
        logits = logits.reshape(-1, shape[-1])
        labels = labels.reshape(logits.shape if of_rows else -1)
    elif not (is_second and dim in (None, 1)):
        raise LossError(
            f"{shapes}{'' if dim is None else f', dim={dim}'}: must be [..., classes] and [...], "
            "or [n, classes, ...] and [n, ...]; or both of one shape, with probabilities as labels"
            f"{_next_token(shape, labels.shape)}"
        )
    total = functional.cross_entropy(
        wide(logits),
        labels,
        weight=None if weight is None else wide(weight),
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if of_rows:
        return Loss(total, labels.numel() // logits.shape[1])
    counted = labels != ignore_index
    if weight is None:
        return Loss(total, counted.sum())
    places = labels.masked_fill(~counted, 0)  # where() would copy its 0 from the host, and wait
    return Loss(total, (wide(weight)[places] * counted).sum())


def _next_token(logits: torch.Size, labels: torch.Size) -> str:
    """Return what to do with labels that are one token longer than the logits."""
    is_longer = len(logits) == 3 and len(labels) == 2 and labels[1] == logits[1] + 1
    return ". For the next token, give labels[:, 1:]" if is_longer else ""


def refuse_in_parts(loss: object) -> None:
    """Refuse an `OfTheBatch` loss, for a micro-batch that is not the whole batch."""
    terms = loss.by_name.values() if isinstance(loss, Terms) else ()
    if isinstance(loss, OfTheBatch) or any(term.of_the_batch for term in terms):
        raise LossError(
            "a loss that compares all samples with each other (clip_loss, info_nce), "
            "computed on one micro-batch, is not part of the batch's "
            "loss. Use loss=wb.Coupled(encode, loss) (plain models and DDP): encode(model, micro) "
            "returns the representations, and loss(all) gets those of the whole batch. "
            "audit=False computes it on each micro-batch alone"
        )


def check_terms(known: Mapping[str, float] | None, terms: Mapping[str, object]) -> None:
    """Refuse terms whose units were not counted before the first backward."""
    if known is None:
        raise LossError(
            f"a loss of several terms ({', '.join(terms)}): each term is divided by its own units "
            "over the window, which must be known before the first backward. Pass "
            "WholeBatch(units=), a function that counts the units of each term in a micro-batch; "
            "in your own loop, call Accumulator.announce({term: units}) before the window's "
            "first backward"
        )
    if known.keys() != terms.keys():
        raise LossError(
            f"units= counts the terms {sorted(known)}, but the loss has the terms "
            f"{sorted(terms)}: they must be the same"
        )


def loss_of(
    total: Tensor | Loss | Terms | None = None,
    units: Units | None = None,
    mean: Tensor | None = None,
) -> Loss:
    """Return the loss of a micro-batch, which is given as a sum, a `wb.Loss` or a mean.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> loss_of(weight * 6, units=3).total.item()
    6.0
    >>> loss_of(mean=weight * 2, units=3).total.item()
    6.0
    """
    if mean is not None and total is not None:
        raise LossError(
            "backward() with both total and mean=: total is the sum over the units, mean is "
            "the mean over them; pass one of the two"
        )
    if isinstance(total, Loss):
        if units is not None:
            raise LossError("units= with a wb.Loss, which has its own units: leave units= out")
        return total
    if isinstance(total, Terms):
        check_terms(None, total.by_name)  # refuses: a stream cannot know the terms' totals
    if total is None and mean is None:
        raise LossError(
            "backward() without a loss: give total, the sum over its units, or mean=, the mean "
            "over them, with units="
        )
    if units is None:
        raise LossError(
            "backward(mean=...) without units=: pass the number of samples, tokens or weights "
            "that it is a mean over"
            if mean is not None
            else "backward(total) without units=: pass the number of samples, tokens or "
            "weights that total is a sum over. If it is a mean, call backward(mean=..., "
            "units=...)"
        )
    return Loss(cast("Tensor", total), units) if mean is None else mean_loss(mean, units)
