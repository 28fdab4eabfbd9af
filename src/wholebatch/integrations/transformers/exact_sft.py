"""`ExactSFT`: TRL's SFTTrainer with micro-steps that are one graph, metrics included.

TRL's own loss reads the metrics of every batch on the host, which cannot be part of a graph. Here
the sums that the metrics are made of leave the graph as tensors, and stay on the device until the
trainer logs. The numbers in the log are TRL's own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.integrations.transformers.exact_trainer import ExactTrainerMixin
from wholebatch.integrations.transformers.given_windows import GivenWindows
from wholebatch.losses.causal_lm import in_slices, logits_of
from wholebatch.losses.loss import Loss, wide

IGNORED = -100
_log = logging.getLogger("wholebatch")
_RECORDED = ("nll", "chunked_nll", "dft")
"""The losses that are computed here; others are TRL's own, as eager code."""
_OUTSIDE = {
    "compute_loss_func": "compute_loss_func",
    "label_smoother": "label smoothing",
    "aux_loss_enabled": "the balance of experts",
}


class ExactSFT(ExactTrainerMixin):
    """Supervised fine-tuning: a mean over the tokens with a label, of a whole window."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread: list[Tensor] = []  # [names, batches], for each window since the last log
        self._names: tuple[str, ...] = ()

    def needs_trl_loss(self) -> str | None:
        """Return why TRL's own `compute_loss` must run, as eager code; None if it need not."""
        trainer: Any = self
        owner = next(
            kind
            for kind in type(self).__mro__
            if "compute_loss" in vars(kind) and not issubclass(kind, ExactTrainerMixin)
        )
        if not owner.__module__.startswith("trl."):
            return f"{owner.__name__}.compute_loss is not TRL's own"
        for name, what in _OUTSIDE.items():
            if getattr(trainer, name, None):
                return what
        kind = trainer.args.loss_type
        return None if kind in _RECORDED else f"loss_type={kind!r}"

    def _loss_options(self) -> dict[str, Any]:
        trainer: Any = self
        why = "units= is your own" if self.units_of is not None else self.needs_trl_loss()
        if why is not None:
            _log.info("micro-steps run eagerly, by TRL's own loss: %s", why)
            return super()._loss_options()
        inner = functools.partial(_sft_loss, weighs_by_probability=trainer.args.loss_type == "dft")

        def loss(model: nn.Module, inputs: Mapping[str, Any]) -> Loss:
            with trainer.compute_loss_context_manager():
                return inner(model, inputs)

        named: Any = loss
        named.__name__ = "the loss"
        named.reads, named.as_read = inner, trainer.compute_loss_context_manager
        return {"loss": loss, "units": self.count_units}

    def _run_window(self, whole: GivenWindows, model: nn.Module) -> Sequence[Tensor]:
        shares = super()._run_window(whole, model)
        if whole.extras:
            self._names = tuple(whole.extras)
            rows = [self._over_ranks(values) for values in whole.extras.values()]
            self._unread.append(torch.stack(rows))
        return shares

    def _over_ranks(self, values: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return values
        summed: Tensor = self.accelerator.gather(values[None]).sum(0)
        return summed

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Read the metrics from the device, and log as TRL does."""
        trainer: Any = self
        if self._unread:
            metrics = trainer._metrics["train"]
            for column in torch.cat(self._unread, dim=1).T.tolist():
                sums = dict(zip(self._names, column, strict=True))
                for name in ("entropy", "mean_token_accuracy"):
                    metrics[name].append(sums[name] / max(sums["labels"], 1))
                trainer._total_train_tokens += int(sums["tokens"])
            metrics["num_tokens"] = [trainer._total_train_tokens]
            self._unread.clear()
        super().log(logs, *args, **kwargs)


def _sft_loss(model: Any, inputs: Mapping[str, Any], *, weighs_by_probability: bool) -> Loss:
    """Return the sum over the tokens with a label, with the sums of the metrics as extras."""
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
        "tokens": _count_tokens(inputs),
    }
    return Loss(total, count, extras=extras)


def _sums_of_rows(
    logits: Tensor, labels: Tensor, *, weighs_by_probability: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of the losses, of the entropies, and of the right predictions."""
    counted = labels != IGNORED
    with torch.no_grad():
        logs = wide(logits).log_softmax(-1)
        entropies = -(logs.exp() * logs).sum(-1)
        right = (logits.argmax(-1) == labels) & counted
    sums = entropies.where(counted, 0.0).sum(), right.sum()
    if weighs_by_probability:
        losses = F.cross_entropy(wide(logits), labels, ignore_index=IGNORED, reduction="none")
        return (losses * (-losses.detach()).exp()).sum(), *sums
    return F.cross_entropy(wide(logits), labels, ignore_index=IGNORED, reduction="sum"), *sums


def _count_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """Return the tokens of a batch that are not padding, as TRL counts them."""
    if "attention_mask" in inputs:
        tokens: Tensor = inputs["attention_mask"].sum()
        return tokens
    positions: Tensor = inputs["position_ids"]
    return (positions >= 0).sum()  # packed rows have no padding
