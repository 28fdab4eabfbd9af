"""`ExactSFT`: TRL's SFTTrainer with recorded micro-steps.

TRL's own loss reads entropy and token accuracy of every batch on the host, and scores as many
positions as have a label, a number that only the data knows: neither can be part of a graph. Here
the loss is computed from all logits, and the metrics leave the graph as sums on the device. They
are read when the trainer logs. The numbers in the log are TRL's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.integrations.transformers.exact_trainer import ExactTrainerMixin
from wholebatch.integrations.transformers.given_windows import GivenWindows
from wholebatch.losses.loss import Loss
from wholebatch.window.close import read_scalars

_IGNORED = -100


class ExactSFT(ExactTrainerMixin):
    """Supervised fine-tuning: a mean over the tokens with a label, of a whole window."""

    def _loss_options(self) -> dict[str, Any]:
        trainer: Any = self
        count = self.count_units if self.units_of is None else self.units_of
        if self._needs_trl_loss() is not None or self.units_of is not None:
            return super()._loss_options()
        loss = functools.partial(
            _sft_loss,
            context=trainer.compute_loss_context_manager,
            weighs_by_probability=trainer.args.loss_type == "dft",
        )
        loss.__name__ = "the loss"  # type: ignore[attr-defined]
        return {"loss": loss, "units": count}

    def _needs_trl_loss(self) -> str | None:
        """Return why TRL's own `compute_loss` must run, as eager code; None if it need not."""
        trainer: Any = self
        owner = next(
            kind
            for kind in type(self).__mro__
            if "compute_loss" in vars(kind) and not issubclass(kind, ExactTrainerMixin)
        )
        if not owner.__module__.startswith("trl."):
            return f"{owner.__name__}.compute_loss is not TRL's own"
        if trainer.args.loss_type not in ("nll", "dft"):
            return f"loss_type={trainer.args.loss_type!r}"
        if trainer.compute_loss_func is not None:
            return "compute_loss_func"
        if trainer.label_smoother is not None:
            return "label smoothing"
        if getattr(trainer, "aux_loss_enabled", False):
            return "the balance of experts"
        return None

    def _run_window(self, whole: GivenWindows, model: nn.Module) -> Sequence[Tensor]:
        shares = super()._run_window(whole, model)
        if whole.extras:
            self._keep_metrics(whole.extras)
        return shares

    def _keep_metrics(self, sums: Mapping[str, Tensor]) -> None:
        """Keep each batch's metrics on the device, where TRL keeps numbers."""
        trainer: Any = self
        names = ("valid", "entropy", "correct")
        by_batch = torch.stack([sums[name].double() for name in names])
        tokens = torch.as_tensor(sum(map(_tokens, self._open.batches)), device=by_batch.device)
        if trainer.accelerator.num_processes > 1:
            by_batch = trainer.accelerator.gather(by_batch[None]).sum(0)
            tokens = trainer.accelerator.gather(tokens[None]).sum()
        valid, entropy, correct = by_batch
        metrics = trainer._metrics["train"]
        metrics["entropy"] += (entropy / valid.clamp(min=1)).unbind()
        metrics["mean_token_accuracy"] += (correct / valid.clamp(min=1)).unbind()
        trainer._total_train_tokens = trainer._total_train_tokens + tokens
        metrics["num_tokens"] = [trainer._total_train_tokens]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Read the metrics from the device, and log as TRL does."""
        trainer: Any = self
        trainer._total_train_tokens = int(trainer._total_train_tokens)
        for metrics in trainer._metrics.values():
            for name, values in metrics.items():
                metrics[name] = read_scalars(values)
            if "num_tokens" in metrics:
                metrics["num_tokens"] = [*map(int, metrics["num_tokens"])]
        super().log(logs, *args, **kwargs)


def _tokens(inputs: Mapping[str, Any]) -> int | Tensor:
    """Return the tokens of a batch that are not padding, as TRL counts them."""
    if "attention_mask" in inputs:
        tokens: Tensor = inputs["attention_mask"].sum()
        return tokens
    return int(inputs["position_ids"].shape[1])


def _sft_loss(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    context: Callable[[], AbstractContextManager[Any]],
    weighs_by_probability: bool,
) -> Loss:
    """Return the sum over the tokens with a label, and the sums that TRL's metrics are made of."""
    inputs = dict(inputs)
    labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    with context():
        logits = model(**inputs, use_cache=False).logits
    if shifted is None:
        labels, logits = labels[:, 1:], logits[:, :-1]
    else:
        labels = shifted
    logits = logits[:, -labels.shape[1] :]  # behind the virtual tokens of prompt learning
    labels, logits = labels.flatten(), logits.flatten(0, 1)
    counted = labels != _IGNORED
    if weighs_by_probability:
        losses = F.cross_entropy(logits.float(), labels, ignore_index=_IGNORED, reduction="none")
        total = (losses * (-losses.detach()).exp()).sum()
    else:
        total = F.cross_entropy(logits.float(), labels, ignore_index=_IGNORED, reduction="sum")
    with torch.no_grad():
        shares = logits.detach().float().log_softmax(-1)
        entropy = -(shares.exp() * shares).sum(-1)
        correct = (logits.detach().argmax(-1) == labels) & counted
    extras = {
        "valid": counted.sum(),
        "entropy": (entropy * counted).sum(),
        "correct": correct.sum(),
    }
    return Loss(total, counted.sum(), extras=extras)
