"""TRL's preference trainers: DPO, reward models and KTO. Their losses are TRL's own.

TRL's losses read their metrics on the host, so their micro-steps run as eager code. What is needed
here is what a window must know: what the loss is a mean over, pairs that stay together when a batch
is cut, and KTO's KL estimate, which is one number of the whole window.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wholebatch.errors import UnsupportedError
from wholebatch.integrations.transformers.exact_trainer import ExactTrainerMixin
from wholebatch.integrations.transformers.weighted_loss import engine_of
from wholebatch.window.replaced_attributes import replaced_attributes

_COUPLED = {
    "aot": "sorts the pairs of a batch",
    "aot_unpaired": "sorts the pairs of a batch",
    "sft": "is a mean over tokens, beside others over pairs",
}


class ExactPairs(ExactTrainerMixin):
    """Reward models, and all data of pairs: TRL stacks all chosen samples upon all rejected ones.

    Between the loader and the loss, tensors are [pairs, 2, ...], so that a batch can be cut.
    """

    takes_parts = False  # TRL gathers its metrics, which must be as many on all ranks

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


class ExactDPO(ExactPairs):
    """DPO and its variants: a mean over pairs, with a frozen reference."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        for kind in trainer.loss_types:
            if kind in _COUPLED:
                raise UnsupportedError(
                    f"exact(DPOTrainer) with loss_type={kind!r}, which {_COUPLED[kind]}: "
                    "leave it out, or write the loss with wb.losses.dpo_loss and wb.Loss.terms"
                )


class ExactKTO(ExactTrainerMixin):
    """KTO: every sample is compared with a KL estimate, which TRL takes from its micro-batch.

    Here it is that of the window and all ranks, as for the undivided batch. A pass over the window,
    without gradients, makes it before the first forward. Mismatched answers come from the whole
    window too: TRL would rotate the answers of a micro-batch.
    """

    takes_parts = False

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
            batches[at] = inputs = dict(ExactTrainerMixin._prepared(self, inputs))
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
