"""`ExactSFT`: TRL's SFTTrainer with recorded micro-steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import functional as F

from wholebatch.integrations.transformers.recorded_trainer import (
    IGNORED,
    RecordedTrainer,
    count_tokens,
    entropies,
    full_precision_logits,
    token_losses,
)
from wholebatch.losses.loss import Loss


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
    given = dict(inputs)
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    logits = model(**given, use_cache=False).logits
    if shifted is None:
        labels, logits = labels[:, 1:], logits[:, :-1]
    else:
        labels = shifted
    logits = full_precision_logits(logits, labels)
    if weighs_by_probability:
        losses = token_losses(logits, labels)
        total = (losses * (-losses.detach()).exp()).sum()
    else:
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
    counted = labels != IGNORED
    is_correct = (logits.detach().argmax(-1) == labels) & counted
    extras = {
        "labels": counted.sum(),
        "entropy": (entropies(logits) * counted).sum(),
        "mean_token_accuracy": is_correct.sum(),
        "tokens": count_tokens(inputs),
    }
    return Loss(total, counted.sum(), extras=extras)
