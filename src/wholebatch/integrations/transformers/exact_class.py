"""`exact`: make the class of a trainer exact, for Transformers' Trainer or one of TRL's.

| trainer | mean over | what its windows need |
|---|---|---|
| SFTTrainer | tokens | a loss that can be one graph, metrics on the device until they are logged |
| DPOTrainer, RewardTrainer | pairs | pairs that stay together when a batch is cut |
| KTOTrainer | samples | the KL estimate of the whole window, from a pass before it |
| GRPOTrainer, RLOOTrainer | tokens or sequences | all completions, before the first forward |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from wholebatch.compile import Execute
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.integrations.transformers.exact_preference import ExactDPO, ExactKTO, ExactPairs
from wholebatch.integrations.transformers.exact_sft import ExactSFT
from wholebatch.integrations.transformers.exact_trainer import (
    ExactTrainerMixin,
    UnitsFunction,
    refuse_own_batches,
)
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import Units
from wholebatch.memory.budget import Budget
from wholebatch.options import Close, Memory, Samples, close_with_only, known_options
from wholebatch.whole_batch import MicroBatch
from wholebatch.window.replaced_attributes import replaced_attributes

T = TypeVar("T")
_TOKEN_MEANS = ("bnpo", "dapo", "cispo", "vespo")


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


_OF_TRL: dict[str, type[ExactTrainerMixin]] = {
    "SFTTrainer": ExactSFT,
    "DPOTrainer": ExactDPO,
    "RewardTrainer": ExactPairs,
    "KTOTrainer": ExactKTO,
    "GRPOTrainer": ExactPolicy,
    "RLOOTrainer": ExactPolicy,
}


@known_options(
    steps="set gradient_accumulation_steps in the TrainingArguments",
    clip_norm="set max_grad_norm in the TrainingArguments",
    precision="set bf16=True or fp16=True in the TrainingArguments",
)
def exact(
    trainer: type[T],
    *,
    units: UnitsFunction | None = None,
    loss: Coupled | None = None,
    execute: Execute = "auto",
    micro_batch: MicroBatch | Samples | None = None,
    memory: Memory | Budget | None = None,
    batchnorm: str = "exact",
    close: Close | None = None,
    audit: bool = True,
) -> type[T]:
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
            "seq_kd=False, or write the loop with wb.Accumulator"
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
    made: Any = type(f"Exact{trainer.__name__}", (windows, trainer), options)
    return made  # type: ignore[no-any-return]
