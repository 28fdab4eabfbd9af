"""Losses over all samples of a batch at once: `Coupled`, and the common contrastive losses.

A contrastive loss compares every sample with every other. `Coupled` splits it into two functions:
`encode` turns a micro-batch into representations, and `loss` turns those of the whole batch into a
Loss. The two-pass runner then needs memory for one micro-batch's graph and all representations.

The ready losses compute the similarity matrix a few rows at a time, forward and backward, so memory
is linear in the batch. Each returns a sum over samples and the number of samples.

```python
def encode(model, micro):
    return {"image": model.image(micro["image"]), "text": model.text(micro["text"])}

def loss(all):
    return clip_loss(all["image"], all["text"], scale=model.logit_scale.exp())

train = wb.WholeBatch(model, optimizer, loss=wb.Coupled(encode, loss), micro_batch=256)
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wholebatch.batch.samples import flatten
from wholebatch.errors import LossError, OptionError
from wholebatch.losses.loss import Loss, Terms

_CHUNK = 1 << 25  # Similarities at a time: 128 MiB in float32.


@dataclass(frozen=True, slots=True)
class Coupled:
    """A loss of the whole batch.

    `encode` runs twice on every micro-batch, with the same random numbers. Parameters that only
    `loss` uses (a temperature) get their gradient too.

    Before the first split window, the rows of `encode` are compared with those of half the samples.

    Args:
        encode: A function `encode(model, micro)` that returns the representations of a
            micro-batch and what else the loss needs: a tensor, or a dict, tuple or list of tensors.
        loss: A function of the same structure, with every tensor concatenated over the whole
            batch. It returns a `Loss`.
        tolerance: The largest relative difference between both runs of `encode`.
        keep: So many of the last micro-batches are encoded only once: their graphs stay in memory.
        addends: A function `addends(model, micro)`, where `encode` returns sums over the
            micro-batch: it returns a Loss of them, and its totals are compared instead.
    """

    encode: Callable[[Any, Any], Any]
    loss: Callable[[Any], Loss | Terms | Tensor]
    tolerance: float | None = None
    keep: int = 1
    addends: Callable[[Any, Any], Loss | Terms] | None = None

    def __post_init__(self) -> None:
        for name in ("encode", "loss"):
            if not callable(getattr(self, name)):
                raise OptionError(f"Coupled({name}=...): must be a function")
        is_number = isinstance(self.keep, int) and not isinstance(self.keep, bool)
        if not (is_number and self.keep >= 0):
            raise OptionError(
                f"Coupled(keep={self.keep!r}): must be a number of micro-batches, 0 or more"
            )
        if self.tolerance is not None and self.tolerance < 0:
            raise OptionError(f"Coupled(tolerance={self.tolerance}): must not be negative")

    def __call__(self, model: Any, batch: Any) -> Loss | Terms | Tensor:
        """Return the loss of an undivided batch, with the graphs of all its samples."""
        return self.loss(self.encode(model, batch))

    def stand_in(self, model: Any, micro: Any) -> Loss:
        """Return a loss of one micro-batch that needs the same memory, for predictions."""
        tensors = [leaf.value for leaf in flatten(self.encode(model, micro))[0]]
        made = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        total = sum((t.float().square().sum() for t in made), torch.zeros(()))
        return Loss(total, 1)


class OfTheBatch(Loss):
    """A loss that compares all samples it is given, so it is wrong for a micro-batch alone."""


def refuse_in_parts(loss: object) -> None:
    """Refuse an `OfTheBatch` loss, for a micro-batch that is not the whole batch."""
    terms = loss.by_name.values() if isinstance(loss, Terms) else ()
    if isinstance(loss, OfTheBatch) or any(term.of_the_batch for term in terms):
        raise LossError(
            "a loss that compares all samples with each other (clip_loss, info_nce, siglip_loss, "
            "supcon_loss, kto_loss), computed of one micro-batch, is not that of the batch: give "
            "loss=wb.Coupled(encode, loss) (plain models and DDP), where encode(model, micro) "
            "returns the representations and loss(all) is given those of the whole batch "
            "(audit=False: accept it of each micro-batch by itself)"
        )


def clip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: Tensor | float = 1 / 0.07,
    symmetric: bool = True,
    normalise: bool = True,
    rows: int | None = None,
) -> Loss:
    """Return InfoNCE between two views of the same samples: row i of `a` matches row i of `b`.

    This is the sum over samples of the cross entropy of `scale · a_i · b_j` over j, with target i;
    with `symmetric` the mean of both directions, as in CLIP.

    >>> a, b = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    >>> loss = clip_loss(a, b, rows=2)
    >>> loss.units
    6

    Args:
        a: Representations of one view, `[samples, features]`.
        b: Representations of the other view.
        scale: Factor of the similarities: 1 / temperature.
        symmetric: Average both directions.
        normalise: Scale every representation to length 1 first.
        rows: Rows of the similarity matrix computed at a time. Default: 2^25 similarities.
    """
    a, b, rows = _checked(a, b, normalise, rows)

    def part(some: Tensor, others: Tensor, scale: Tensor | float, first: int) -> Tensor:
        answers = torch.arange(first, first + len(some), device=some.device)
        return F.cross_entropy(scale * (some @ others.T), answers, reduction="sum")

    total = _in_rows(part, a, b, scale, rows)
    if symmetric:
        total = (total + _in_rows(part, b, a, scale, rows)) / 2
    return OfTheBatch(total, len(a))


def info_nce(
    queries: Tensor,
    keys: Tensor,
    *,
    temperature: Tensor | float = 0.07,
    normalise: bool = True,
    rows: int | None = None,
) -> Loss:
    """Return InfoNCE in one direction: query i must find key i among all keys of the batch.

    >>> info_nce(torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)).units
    6

    Args:
        queries: Representations of the queries, `[samples, features]`.
        keys: Representations of the keys.
        temperature: The similarities are divided by it.
        normalise: Scale every representation to length 1 first.
        rows: Rows of the similarity matrix computed at a time. Default: 2^25 similarities.
    """
    return clip_loss(
        queries, keys, scale=1.0 / temperature, symmetric=False, normalise=normalise, rows=rows
    )


def siglip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: Tensor | float = 10.0,
    bias: Tensor | float = -10.0,
    normalise: bool = True,
    rows: int | None = None,
) -> Loss:
    """Return SigLIP: a binary classification of every pair, positive for the pairs (i, i).

    This is the sum over i and j of `-log sigmoid(±(scale · a_i · b_j + bias))`. The units are the
    samples.

    Args:
        a: Representations of one view, `[samples, features]`.
        b: Representations of the other view.
        scale: Factor of the similarities.
        bias: Added to the similarities.
        normalise: Scale every representation to length 1 first.
        rows: Rows of the similarity matrix computed at a time. Default: 2^25 similarities.
    """
    a, b, rows = _checked(a, b, normalise, rows)

    def part(
        some: Tensor, others: Tensor, both: tuple[Tensor | float, Tensor | float], first: int
    ) -> Tensor:
        scale, bias = both
        logits = scale * (some @ others.T) + bias
        # softplus(z) = -log sigmoid(-z), and -log sigmoid(z) = softplus(z) - z for the pairs.
        pairs = logits.diagonal(first)
        return F.softplus(logits).sum() - pairs.sum()

    return OfTheBatch(_in_rows(part, a, b, (scale, bias), rows), len(a))


def supcon_loss(
    z: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | float = 0.07,
    normalise: bool = True,
    rows: int | None = None,
) -> Loss:
    """Return SupCon: samples with the same label attract each other, all others repel.

    For each sample i that shares its label with others, this is the mean over those j of
    `-log softmax(z_i · z_j / temperature)`. The softmax is over all j other than i. The units are
    the samples that share their label.

    Args:
        z: Representations, `[samples, features]`.
        labels: One label per sample.
        temperature: The similarities are divided by it.
        normalise: Scale every representation to length 1 first.
        rows: Rows of the similarity matrix computed at a time. Default: 2^25 similarities.
    """
    z, _, rows = _checked(z, z, normalise, rows)
    if labels.shape != z.shape[:1]:
        raise LossError(
            f"labels of shape {tuple(labels.shape)} for {len(z)} samples: one label per sample"
        )
    same_label = labels[:, None] == labels[None, :] if len(z) <= rows else None

    def part(some: Tensor, others: Tensor, temperature: Tensor | float, first: int) -> Tensor:
        own = labels[first : first + len(some)]
        same = own[:, None] == labels[None, :] if same_label is None else same_label
        self_pairs = torch.zeros_like(same)
        self_pairs.diagonal(first).fill_(True)
        logits = (some @ others.T / temperature).masked_fill(self_pairs, float("-inf"))
        log_probability = logits - logits.logsumexp(1, keepdim=True)
        same = same & ~self_pairs
        found = log_probability.masked_fill(~same, 0.0).sum(1)
        return -(found / same.sum(1).clamp_min(1)).sum()

    total = _in_rows(part, z, z, temperature, rows)
    _, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    return OfTheBatch(total, (counts[inverse] > 1).sum())


def _in_rows(
    part: Callable[..., Tensor], some: Tensor, others: Tensor, extra: Any, rows: int
) -> Tensor:
    """Return the sum of `part` over slices of `some`, each recomputed in the backward pass."""
    total = some.new_zeros(())
    for first in range(0, len(some), rows):
        piece = some[first : first + rows]
        total = total + checkpoint(
            part, piece, others, extra, first, use_reentrant=False, preserve_rng_state=False
        )
    return total


def _checked(a: Tensor, b: Tensor, normalise: bool, rows: int | None) -> tuple[Tensor, Tensor, int]:
    """Return both, normalised if so, and the number of rows at a time: as given, or for a chunk."""
    if a.dim() != 2 or a.shape != b.shape:
        raise LossError(
            f"representations of shapes {tuple(a.shape)} and {tuple(b.shape)}: both must be "
            "(samples, features)"
        )
    rows = max(1, _CHUNK // max(1, len(b))) if rows is None else rows
    if rows < 1:
        raise OptionError(f"rows={rows}: must be a positive number of rows, or None")
    if normalise:
        a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    return a, b, rows
