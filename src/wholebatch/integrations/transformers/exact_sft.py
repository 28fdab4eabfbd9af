"""`ExactSFT`: TRL's SFTTrainer with recorded micro-steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from wholebatch.compile.token_statistics import token_statistics
from wholebatch.integrations.transformers.recorded_trainer import (
    IGNORED,
    RecordedTrainer,
    count_tokens,
    token_losses,
)
from wholebatch.losses.causal_lm import in_slices, logits_of
from wholebatch.losses.loss import Loss, wide


class ExactSFT(RecordedTrainer):
    """Supervised fine-tuning: a mean over the tokens with a label, of a whole window."""

    means_over = {"entropy": "labels", "mean_token_accuracy": "labels"}  # noqa: RUF012

    def recorded_loss(self) -> Callable[..., Loss]:
        """Return the sum over the tokens with a label."""
        trainer: Any = self
        return functools.partial(
            _sft_loss,
            weighs_by_probability=trainer.args.loss_type == "dft",
        )

    def needs_trl_loss(self) -> str | None:
        """Return why TRL's own loss must run."""
        kind = self.args.loss_type  # type: ignore[attr-defined]
        return super().needs_trl_loss() or (
            None if kind in ("nll", "chunked_nll", "dft") else f"loss_type={kind!r}"
        )


def _sft_loss(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    weighs_by_probability: bool,
) -> Loss:
    model_inputs = dict(inputs)
    labels, shifted = model_inputs.pop("labels", None), model_inputs.pop("shift_labels", None)
    # Shifted are the labels: a part of the logits would be a copy of them.
    labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted
    rows, head = logits_of(model, labels, **model_inputs, use_cache=False)
    of_rows = functools.partial(_sums_of_rows, weighs_by_probability=weighs_by_probability)
    total, entropy, correct = in_slices(rows, head, labels, of_rows)
    count = (labels != IGNORED).sum()
    extras = {
        "labels": count,
        "entropy": entropy,
        "mean_token_accuracy": correct,
        "tokens": count_tokens(inputs),
    }
    return Loss(total, count, extras=extras)


def _sums_of_rows(
    logits: Tensor, labels: Tensor, *, weighs_by_probability: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of the losses, of the entropies, and of the right predictions."""
    entropies, likeliest, _ = token_statistics(logits)
    counted = labels != IGNORED
    sums = entropies.where(counted, 0.0).sum(), ((likeliest == labels) & counted).sum()
    if weighs_by_probability:
        losses = token_losses(wide(logits), labels)
        return (losses * (-losses.detach()).exp()).sum(), *sums
    return F.cross_entropy(wide(logits), labels, ignore_index=IGNORED, reduction="sum"), *sums
