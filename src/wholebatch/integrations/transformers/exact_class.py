"""`exact`: make the class of a trainer exact, for Transformers' Trainer or one of TRL's.

| trainer | mean over | what its windows need |
|---|---|---|
| SFTTrainer | tokens | metrics that stay on the device until they are logged |
| DPOTrainer, RewardTrainer | pairs | pairs that stay together when a batch is cut |
| KTOTrainer | samples | the KL estimate of the whole window, from a pass before it |
| GRPOTrainer, RLOOTrainer | tokens or sequences | all completions, before the first forward |
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wholebatch.compile import Execute
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.integrations.transformers.exact_sft import ExactSFT
from wholebatch.integrations.transformers.exact_trainer import (
    ExactTrainerMixin,
    UnitsFunction,
    refuse_own_batches,
)
from wholebatch.integrations.transformers.weighted_loss import engine_of
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import Units
from wholebatch.memory.budget import Budget
from wholebatch.options import Close, Memory, Samples, close_with_only
from wholebatch.whole_batch import MicroBatch
from wholebatch.window.forward_state import replaced_attributes

_COUPLED = {
    "aot": "sorts the pairs of a batch",
    "aot_unpaired": "sorts the pairs of a batch",
    "sft": "is a mean over tokens, beside others over pairs",
}
_TOKEN_MEANS = ("bnpo", "dapo", "cispo", "vespo")


class ExactPairs(ExactTrainerMixin):
    """DPO and reward models: TRL stacks all chosen samples upon all rejected ones.

    Between the loader and the loss, tensors are [pairs, 2, ...], so that a batch can be cut.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        _refuse_vision(trainer)
        for loss_type in getattr(trainer, "loss_types", ()):
            if loss_type in _COUPLED:
                raise UnsupportedError(
                    f"exact(DPOTrainer) with loss_type={loss_type!r}, which {_COUPLED[loss_type]}: "
                    "leave it out, or write the loss with wb.losses.dpo_loss and wb.Loss.terms"
                )

    units_of = staticmethod(lambda inputs: len(inputs["input_ids"]))

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


class ExactKTO(ExactTrainerMixin):
    """KTO: every sample is compared with a KL estimate, which TRL takes from its micro-batch.

    Here it is that of the window and all ranks, as for the undivided batch. A pass over the window,
    without gradients, makes it before the first forward. Mismatched answers come from the whole
    window too: TRL would rotate the answers of a micro-batch.
    """

    units_of = staticmethod(lambda inputs: len(inputs["label"]))
    _kl: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_vision(self)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        trl: Any = super()
        if name == "train":
            args = copy.copy(args)
            args.per_device_train_batch_size *= args.gradient_accumulation_steps
        return trl._prepare_dataset(dataset, processing_class, args, name)

    def prepare_window(self, batches: list[Any]) -> None:
        """Estimate the KL divergence over all batches of the window and all ranks."""
        super().prepare_window(batches)
        trainer: Any = self
        if not trainer.calculate_KL:
            return
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
            if "ref_KL_logps" not in inputs:
                found = trainer.compute_ref_log_probs(reference, inputs)
                inputs["ref_logps"], inputs["ref_KL_logps"] = found
            with torch.no_grad(), trainer.compute_loss_context_manager():
                ratios = trl._compute_kl_logps(model, inputs) - inputs["ref_KL_logps"]
            sums += torch.stack([ratios.double().sum(), sums.new_tensor(len(ratios))])
            inputs["ref_KL_logps"] = torch.zeros_like(inputs["ref_KL_logps"])
        total, number = trainer.accelerator.gather(sums.reshape(1, 2)).sum(0)
        self._kl = (total / number).float()

    def _compute_kl_logps(self, model: Any, batch: Any) -> Any:
        trl: Any = super()
        if self._known_kl is None:
            return trl._compute_kl_logps(model, batch)
        return self._known_kl.expand(len(batch["label"]))

    @property
    def _known_kl(self) -> Tensor | None:
        """The estimate of the window; None in evaluation, where TRL makes its own."""
        trainer: Any = self
        return self._kl if trainer.model.training else None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss, with the reference of the pass before."""
        given = {} if self._known_kl is None else {"precompute_ref_logps": True}
        with replaced_attributes(self, **given):
            return super().compute_loss(model, inputs, *args, **kwargs)


class ExactPolicy(ExactTrainerMixin):
    """GRPO and RLOO: the completions of a window are drawn before its first forward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        kind = getattr(trainer, "loss_type", "rloo")
        if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
            why = "top_entropy_quantile compares the tokens of a batch"
        elif getattr(trainer, "use_adaptive_entropy", False):
            why = "adaptive entropy counts its windows itself"
        elif getattr(trainer, "_entropy_bonus_enabled", False) and kind not in _TOKEN_MEANS:
            why = (
                f"the entropy bonus is a mean over tokens and loss_type={kind!r} one over sequences"
            )
        else:
            return
        raise UnsupportedError(
            f"exact({type(self).__name__.removeprefix('Exact')}): {why}; leave it out, or write "
            "the loss with wb.losses.policy_loss and wb.Loss.terms"
        )

    def count_units(self, inputs: Mapping[str, Any]) -> Units:
        """Return the tokens or sequences that the loss_type is a mean over."""
        if self.units_of is not None:
            return super().count_units(inputs)
        by_token = getattr(self, "loss_type", None) in _TOKEN_MEANS
        return _completion_mask(inputs).sum() if by_token else len(inputs["completion_ids"])

    def prepare_window(self, batches: list[Any]) -> None:
        """Draw and score the completions of all batches of the window."""
        trainer: Any = self
        trainer.model_wrapped.train()
        first = trainer._step
        try:
            for at, inputs in enumerate(batches):
                trainer._step = first + at
                batches[at] = trainer._prepare_inputs(inputs)
        finally:
            trainer._step = first

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss as the mean over the tokens or sequences of these inputs."""
        trainer: Any = self
        if not trainer.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        # TRL divides a sum over tokens by count / processes × batches / steps_per_generation.
        count = _completion_mask(inputs).sum() * trainer.accelerator.num_processes
        inputs = {**inputs, "num_items_in_batch": count * trainer.args.steps_per_generation}
        with replaced_attributes(self, current_gradient_accumulation_steps=1):
            return super().compute_loss(model, inputs, *args, **kwargs)


def _completion_mask(inputs: Mapping[str, Any]) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _refuse_vision(trainer: Any) -> None:
    if getattr(trainer, "_is_vision_dataset", False):
        raise UnsupportedError(
            "exact(...) of TRL's preference trainers with images, whose tensors do not have one "
            "row per sample: train on text, or write the loss with wb.losses.dpo_loss"
        )


_OF_TRL: dict[str, type[ExactTrainerMixin]] = {
    "SFTTrainer": ExactSFT,
    "DPOTrainer": ExactPairs,
    "RewardTrainer": ExactPairs,
    "KTOTrainer": ExactKTO,
    "GRPOTrainer": ExactPolicy,
    "RLOOTrainer": ExactPolicy,
}


def exact(
    trainer: type[Any],
    *,
    units: UnitsFunction | None = None,
    loss: Coupled | None = None,
    execute: Execute = "auto",
    micro_batch: MicroBatch | Samples | None = None,
    memory: Memory | Budget | None = None,
    batchnorm: str = "exact",
    close: Close | None = None,
    audit: bool = True,
) -> type[Any]:
    """Return a subclass of `trainer` whose updates are those of the undivided global batch.

    The trainer's loss stays a mean. `units(inputs)` counts what it is a mean over, from the inputs
    of the loss; the default counts the labels that are not -100 (from the second one on, if the
    model's loss shifts them). For a loss that compares samples, pass `loss=wb.Coupled(encode,
    loss)`; in training it replaces `compute_loss`.

    The other options are those of `wb.WholeBatch`:

    - `execute="auto"` compiles and records micro-steps on a GPU when this saves time, "graph" (or
      `torch_compile=True`) at once, "eager" never.
    - `micro_batch` splits every batch of the loader further: a number of samples,
      `wb.tokens(4096)`, or "auto" for the most that fit into `memory` ("20GiB", a fraction, or the
      free memory). A batch that runs out of memory is split too. The update stays the same.
    - A loss or gradient that is not finite raises `NonFiniteError` before the step. With
      `close=wb.Close(nonfinite="skip")` such a window makes no update, but the scheduler steps.
    """
    if not isinstance(trainer, type) or not hasattr(trainer, "training_step"):
        raise OptionError(
            f"exact({trainer!r}): must be transformers.Trainer, or a class that descends from it"
        )
    if issubclass(trainer, ExactTrainerMixin):
        raise OptionError(
            f"exact({trainer.__name__}): it is exact already; give all options at once"
        )
    of_trl = [kind.__name__ for kind in trainer.__mro__ if kind.__module__.startswith("trl.")]
    if "GKDTrainer" in of_trl:
        raise UnsupportedError(
            "exact(GKDTrainer): it draws the answers of every batch inside its training_step, "
            "after the units of the window are counted; use GKDTrainer as it is with lmbda=0 and "
            "seq_kd=False, or write the loop with wb.losses.distillation_loss"
        )
    windows = _OF_TRL.get(of_trl[0] if of_trl else "", ExactTrainerMixin)
    if windows is ExactTrainerMixin:
        refuse_own_batches(trainer)
    if units is not None and not callable(units):
        raise OptionError(f"units={units!r}: must be a function of a batch's inputs")
    if loss is not None and (units is not None or not isinstance(loss, Coupled)):
        raise OptionError(
            f"loss={loss!r}: must be wb.Coupled(encode, loss), which has its own units; pass "
            "another loss as the trainer's compute_loss or compute_loss_func"
        )
    if micro_batch is not None:
        Samples.of(micro_batch)
    elif memory is not None:
        raise OptionError(
            f"memory={memory!r} without micro_batch=: it would not be used; pass "
            'micro_batch="auto" too'
        )
    options = {
        **({} if units is None else {"units_of": staticmethod(units)}),
        "coupled": loss,
        "execute": execute,
        "micro_batch": micro_batch,
        "memory": memory,
        "batchnorm": batchnorm,
        "window_close": close_with_only(close, "nonfinite", where="in exact(...)"),
        "audit": audit,
        # The module whose code is the user's own: what it reads is watched (compile/).
        "__module__": trainer.__module__,
    }
    return type(f"Exact{trainer.__name__}", (windows, trainer), options)
