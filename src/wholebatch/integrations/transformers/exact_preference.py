"""TRL's preference trainers with recorded micro-steps: DPO, reward models and KTO.

The frozen reference of DPO is part of the graph. With PEFT it is the model without its adapters.
KTO's reference is run before the window, because its KL estimate is one number of the whole window.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.errors import UnsupportedError
from wholebatch.integrations.transformers.recorded_trainer import (
    IGNORED,
    RecordedTrainer,
    count_tokens,
    statistics_of,
    token_losses,
)
from wholebatch.integrations.transformers.weighted_loss import engine_of
from wholebatch.losses.loss import Loss, wide
from wholebatch.losses.preference import reward_loss
from wholebatch.window.replaced_attributes import replaced_attributes

_COUPLED = {
    "aot": "sorts the pairs of a batch",
    "aot_unpaired": "sorts the pairs of a batch",
    "sft": "is a mean over tokens, beside others over pairs",
}


class ExactPairs(RecordedTrainer):
    """Data of pairs: TRL stacks all chosen samples upon all rejected ones.

    Between the loader and the loss, tensors are [pairs, 2, ...], so that a batch can be cut.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_vision(self)

    def count_units(self, inputs: Mapping[str, Any]) -> Any:
        """Return the pairs of a batch."""
        return super().count_units(inputs) if self.units_of else len(inputs["input_ids"])

    def _prepare_inputs(self, inputs: Any) -> Any:
        return _paired(super()._prepare_inputs(inputs))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss of these pairs."""
        return super().compute_loss(model, _stacked(inputs), *args, **kwargs)


def _paired(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors of chosen samples upon rejected ones as [pairs, 2, ...]."""
    rows = len(inputs["input_ids"])
    return {
        name: torch.stack(value.chunk(2), dim=1)
        if isinstance(value, Tensor) and value.dim() and len(value) == rows
        else value
        for name, value in inputs.items()
    }


def _stacked(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `_paired`."""
    pairs = inputs["input_ids"].shape[:2]
    return {
        name: value.transpose(0, 1).flatten(0, 1)
        if isinstance(value, Tensor) and value.shape[:2] == pairs
        else value
        for name, value in inputs.items()
    }


def _refuse_vision(trainer: Any) -> None:
    if getattr(trainer, "_is_vision_dataset", False):
        raise UnsupportedError(
            "exact(...) of TRL's preference trainers with images, whose tensors do not have one "
            "row per sample: train on text, or write the loss with wb.losses.dpo_loss"
        )


# ------------------------------------------------------------------ reward models


class ExactReward(ExactPairs):
    """Reward models: a mean over pairs."""

    means_over = {"mean_reward": "rewards", "accuracy": "pairs", "margin": "pairs"}  # noqa: RUF012
    combined_by = {"min_reward": "amin", "max_reward": "amax"}  # noqa: RUF012

    def recorded_loss(self) -> Callable[..., Loss]:
        """Return the sum over pairs."""
        return functools.partial(
            _reward_loss,
            center=self.args.center_rewards_coefficient or 0.0,  # type: ignore[attr-defined]
        )


def _reward_loss(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    center: float,
) -> Loss:
    inputs_of_both = _stacked(inputs)
    margin = inputs_of_both.pop("margin", 0.0)
    rewards = wide(model(**inputs_of_both, use_cache=False).logits.squeeze(-1))
    chosen, rejected = rewards.chunk(2)
    loss = reward_loss(chosen, rejected, margin=margin, center=center)
    chosen, rejected, rewards = chosen.detach(), rejected.detach(), rewards.detach()
    extras = {
        "pairs": torch.ones_like(chosen).sum(),
        "rewards": torch.ones_like(rewards).sum(),
        "min_reward": rewards.min(),
        "mean_reward": rewards.sum(),
        "max_reward": rewards.max(),
        "accuracy": (chosen > rejected).sum(),
        "margin": (chosen - rejected).sum(),
        "tokens": count_tokens(inputs_of_both),
    }
    return Loss(loss.total, loss.units, extras=extras)


# ---------------------------------------------------------------------------- DPO


class ExactDPO(ExactPairs):
    """DPO and its variants: a mean over pairs, with a frozen reference."""

    means_over = {  # noqa: RUF012
        "entropy": "answer_tokens",
        "logits/chosen": "chosen_tokens",
        "logits/rejected": "rejected_tokens",
        "mean_token_accuracy": "chosen_tokens",
        "rewards/chosen": "pairs",
        "rewards/rejected": "pairs",
        "rewards/accuracies": "pairs",
        "rewards/margins": "pairs",
        "logps/chosen": "pairs",
        "logps/rejected": "pairs",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        for kind in trainer.loss_types:
            if kind in _COUPLED:
                raise UnsupportedError(
                    f"exact(DPOTrainer) with loss_type={kind!r}, which {_COUPLED[kind]}: "
                    "leave it out, or write the loss with wb.losses.dpo_loss and wb.Loss.terms"
                )

    def needs_trl_loss(self) -> str | None:
        """Return why TRL's own loss must run."""
        trainer: Any = self
        reasons = [f"loss_type={kind!r}" for kind in trainer.loss_types if kind not in _PAIR_LOSSES]
        if trainer.f_divergence_type != "reverse_kl":
            reasons.append(f"f_divergence_type={trainer.f_divergence_type!r}")
        reasons += ["ld_alpha"] if trainer.ld_alpha is not None else []
        reasons += ["use_weighting"] if trainer.use_weighting else []
        if not trainer.precompute_ref_logps and trainer.ref_model is None:
            reasons += _why_no_base(trainer.model)
        return super().needs_trl_loss() or next(iter(reasons), None)

    def recorded_loss(self) -> Callable[..., Loss]:
        """Return the sum over pairs."""
        trainer: Any = self
        if trainer.ref_model is not None:
            trainer.ref_model.requires_grad_(False)  # only then the graph may read its weights
        return functools.partial(
            _dpo_loss,
            reference=trainer.ref_model,
            weighted=tuple(zip(trainer.loss_types, trainer.loss_weights or [1.0], strict=True)),
            beta=trainer.beta,
            smoothing=trainer.label_smoothing,
            tau=trainer.args.discopop_tau,
            is_precomputed=trainer.precompute_ref_logps,
        )


def _why_no_base(model: nn.Module) -> list[str]:
    """Return why the model has no reference in itself: the base that its adapters stand on."""
    if not any(map(_is_adapter, model.modules())):
        return ["the reference is a part of the model that is no adapter"]
    return (
        ["the reference is a second adapter"] if "ref" in getattr(model, "peft_config", ()) else []
    )


def _is_adapter(module: nn.Module) -> bool:
    return isinstance(getattr(module, "_disable_adapters", None), bool)


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off, but leave their requires_grad: `disable_adapter` changes it."""
    layers = [module for module in model.modules() if _is_adapter(module)]
    for layer in layers:
        layer._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # type: ignore[assignment]


@dataclass(frozen=True)
class _Pairs:
    """What the losses of pairs are made of: log-ratios to the reference, one per pair."""

    chosen: Tensor
    rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    beta: float
    smoothing: float
    tau: float

    @property
    def scaled(self) -> Tensor:
        return self.beta * (self.chosen - self.rejected)

    @property
    def by_token(self) -> Tensor:
        """The difference of the log-ratios per token."""
        return self.chosen / self.chosen_length - self.rejected / self.rejected_length


def _exo(pairs: _Pairs) -> Tensor:
    scaled, smoothing = pairs.scaled, pairs.smoothing
    wins = scaled.sigmoid() * (F.logsigmoid(scaled) - math.log1p(-smoothing))
    return wins + (-scaled).sigmoid() * (F.logsigmoid(-scaled) - math.log(smoothing))


def _nca(pairs: _Pairs) -> Tensor:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _robust(pairs: _Pairs) -> Tensor:
    clean = -(1 - pairs.smoothing) * F.logsigmoid(pairs.scaled)
    flipped = -pairs.smoothing * F.logsigmoid(-pairs.scaled)
    return (clean - flipped) / (1 - 2 * pairs.smoothing)


def _discopop(pairs: _Pairs) -> Tensor:
    mixed = (pairs.scaled / pairs.tau).sigmoid()
    return -F.logsigmoid(pairs.scaled) * (1 - mixed) + torch.exp(-pairs.scaled) * mixed


_PAIR_LOSSES: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda p: -F.logsigmoid(p.scaled),
    "sigmoid_norm": lambda p: -F.logsigmoid(p.beta * p.by_token),
    "hinge": lambda p: torch.relu(1 - p.scaled),
    "ipo": lambda p: (p.by_token - 1 / (2 * p.beta)).square(),
    "exo_pair": _exo,
    "nca_pair": _nca,
    "robust": _robust,
    "bco_pair": lambda p: -F.logsigmoid(p.beta * p.chosen) - F.logsigmoid(-p.beta * p.rejected),
    "sppo_hard": lambda p: (
        (p.chosen - 0.5 / p.beta).square() + (p.rejected + 0.5 / p.beta).square()
    ),
    "apo_zero": lambda p: 1 - (p.beta * p.chosen).sigmoid() + (p.beta * p.rejected).sigmoid(),
    "apo_down": lambda p: (p.beta * p.chosen).sigmoid() + 1 - p.scaled.sigmoid(),
    "discopop": _discopop,
}


def _log_probabilities(
    model: Any, model_inputs: Mapping[str, Any], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log probability of each label, and the logits."""
    logits = model(**model_inputs, use_cache=False).logits[:, :-1]
    logits = logits[:, -labels.shape[1] :]  # Prompt learning puts virtual tokens first.
    return -token_losses(wide(logits), labels), logits


def _dpo_loss(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    reference: Any,
    weighted: tuple[tuple[str, float], ...],
    beta: float,
    smoothing: float,
    tau: float,
    is_precomputed: bool,
) -> Loss:
    model_inputs = _stacked(inputs)
    mask = model_inputs.pop("completion_mask")
    known: Any = [
        model_inputs.pop(name, None) for name in ("ref_chosen_logps", "ref_rejected_logps")
    ]
    labels, counted = _completion_labels(model_inputs["input_ids"], mask)
    by_token, logits = _log_probabilities(model, model_inputs, labels)
    if not is_precomputed:
        with torch.no_grad(), _without_adapters(model) if reference is None else nullcontext():
            frozen = model if reference is None else reference
            known = _log_probabilities(frozen, model_inputs, labels)[0].sum(1).chunk(2)
    chosen, rejected = by_token.sum(1).chunk(2)
    lengths = mask.sum(1).clamp(min=1).chunk(2)
    pairs = _Pairs(
        chosen - known[0], rejected - known[1], lengths[0], lengths[1], beta, smoothing, tau
    )
    losses = [weight * _PAIR_LOSSES[kind](pairs) for kind, weight in weighted]
    total = torch.stack(losses).sum()
    rewards = beta * pairs.chosen.detach(), beta * pairs.rejected.detach()
    extras = _token_extras(logits, labels, counted, model_inputs) | {
        "pairs": torch.ones_like(chosen).sum(),
        "rewards/chosen": rewards[0].sum(),
        "rewards/rejected": rewards[1].sum(),
        "rewards/accuracies": (rewards[0] > rewards[1]).sum(),
        "rewards/margins": (rewards[0] - rewards[1]).sum(),
        "logps/chosen": chosen.detach().sum(),
        "logps/rejected": rejected.detach().sum(),
    }
    return Loss(total, len(chosen), extras=extras)


def _completion_labels(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels of an answer's tokens, shifted, and where they count."""
    counted = mask[:, 1:] != 0
    return ids[:, 1:].masked_fill(~counted, IGNORED), counted


def _token_extras(
    logits: Tensor, labels: Tensor, counted: Tensor, model_inputs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the sums over tokens, of chosen and rejected answers, that TRL's metrics need."""
    entropies, likeliest, means = statistics_of(logits)
    mean_logits = (means * counted).sum(1).chunk(2)
    tokens = counted.sum(1).chunk(2)
    is_correct = (likeliest == labels) & counted
    return {
        "tokens": count_tokens(model_inputs),
        "entropy": (entropies * counted).sum(),
        "logits/chosen": mean_logits[0].sum(),
        "logits/rejected": mean_logits[1].sum(),
        "chosen_tokens": tokens[0].sum(),
        "rejected_tokens": tokens[1].sum(),
        "answer_tokens": counted.sum(),
        "mean_token_accuracy": is_correct.chunk(2)[0].sum(),
    }


# ---------------------------------------------------------------------------- KTO


class ExactKTO(RecordedTrainer):
    """KTO: every sample is compared with a KL estimate, which TRL takes from its micro-batch.

    Here it is that of the window and all ranks, as for the undivided batch. A pass over the window,
    without gradients, makes it before the first forward. Mismatched answers come from the whole
    window too: TRL would rotate the answers of a micro-batch.
    """

    leaves_out_empty = True
    means_over = {"kl": "samples", "entropy": "answer_tokens"} | {
        f"{name}/{kind}": f"{kind}{count}"
        for name, count in (("logits", "_tokens"), ("rewards", ""), ("logps", ""))
        for kind in ("chosen", "rejected")
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_vision(self)

    def count_units(self, inputs: Mapping[str, Any]) -> Any:
        """Return the samples of a batch."""
        return super().count_units(inputs) if self.units_of else len(inputs["label"])

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        trl: Any = super()
        if name == "train":
            args = copy.copy(args)
            args.per_device_train_batch_size *= args.gradient_accumulation_steps
        return trl._prepare_dataset(dataset, processing_class, args, name)

    def prepare_window(self, batches: list[Any]) -> None:
        """Run the reference, and estimate the KL divergence over the window and all ranks.

        Each sample then holds the estimate as its log-ratio of a mismatched answer.
        """
        super().prepare_window(batches)
        trainer: Any = self
        if engine_of(trainer.model_wrapped) != "replicated":
            raise UnsupportedError(
                f"exact(KTOTrainer) on {type(trainer.model_wrapped).__name__}: its forward runs "
                "collectives, and the pass before the window is not tested with them; use one "
                "process or DDP"
            )
        trl: Any = super()
        model, reference = trainer.model.train(), trainer.ref_model or trainer.model
        sums = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        for at, inputs in enumerate(batches):
            batches[at] = inputs = dict(RecordedTrainer._prepared(self, inputs))
            if "ref_logps" not in inputs:
                known = trainer.compute_ref_log_probs(reference, inputs)
                inputs["ref_logps"], inputs["ref_KL_logps"] = known
            if trainer.calculate_KL:
                with torch.no_grad(), trainer.compute_loss_context_manager():
                    ratios = trl._compute_kl_logps(model, inputs) - inputs["ref_KL_logps"]
                sums += torch.stack([ratios.double().sum(), sums.new_tensor(len(ratios))])
        total, number = trainer.accelerator.gather(sums.reshape(1, 2)).sum(0)
        estimate = total / number.clamp(min=1)
        for inputs in batches:
            none = torch.zeros_like(inputs["ref_logps"])
            inputs["ref_KL_logps"] = none - estimate.to(none)

    def _compute_kl_logps(self, model: Any, batch: Any) -> Any:
        """Return zeros in training, where the estimate is in the batch."""
        trl: Any = super()
        if not self.model_wrapped.training:
            return trl._compute_kl_logps(model, batch)
        return torch.zeros_like(batch["ref_KL_logps"])

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss, with the reference of the pass before."""
        changed = {"precompute_ref_logps": True} if self.model_wrapped.training else {}
        with replaced_attributes(self, **changed):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def needs_trl_loss(self) -> str | None:
        """Return why TRL's own loss must run."""
        kind = self.loss_type  # type: ignore[attr-defined]
        known = kind in ("kto", "apo_zero_unpaired")
        return super().needs_trl_loss() or (None if known else f"loss_type={kind!r}")

    def recorded_loss(self) -> Callable[..., Loss]:
        """Return the sum over samples."""
        trainer: Any = self
        return functools.partial(
            _kto_loss,
            beta=trainer.beta,
            weights=(trainer.desirable_weight, trainer.undesirable_weight),
        )

    def metrics_of(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return TRL's means over tokens and over the samples of both kinds, where there are."""
        metrics = super().metrics_of(sums)
        if sums["chosen"] and sums["rejected"]:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics


_KTO_ONLY = ("completion_mask", "label", "ref_logps", "ref_KL_logps")


def _kto_loss(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    beta: float,
    weights: tuple[float, float],
) -> Loss:
    model_inputs = {
        name: value
        for name, value in inputs.items()
        if name not in _KTO_ONLY and not name.startswith("KL_")
    }
    labels, counted = _completion_labels(model_inputs["input_ids"], inputs["completion_mask"])
    by_token, logits = _log_probabilities(model, model_inputs, labels)
    logps = by_token.sum(1)
    good, kl = inputs["label"].bool(), -inputs["ref_KL_logps"].clamp(max=0)
    ratios = logps - inputs["ref_logps"]
    gains = torch.where(good, ratios - kl, kl - ratios)
    weight = torch.where(good, *weights)
    total = (weight * (1 - (beta * gains).sigmoid())).sum()
    entropies, _, means = statistics_of(logits)
    sums = {
        "logits": (means * counted).sum(1),
        "rewards": beta * ratios.detach(),
        "logps": logps.detach(),
    }
    extras = {
        "tokens": count_tokens(model_inputs),
        "samples": torch.ones_like(logps).sum(),
        "answer_tokens": counted.sum(),
        "kl": kl.sum(),
        "entropy": (entropies * counted).sum(),
    }
    for kind, which in (("chosen", good), ("rejected", ~good)):
        extras[kind] = which.sum()
        extras[f"{kind}_tokens"] = (counted.sum(1) * which).sum()
        extras |= {f"{name}/{kind}": (sums[name] * which).sum() for name in sums}
    return Loss(total, len(logps), extras=extras)
