"""Private names of other libraries that the adapters use: where each is, and what it buys.

`missing("keras")` reads the installed sources without importing them. A test runs it for every
library, so that a new version fails with a sentence instead of a wrong update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class Internal(NamedTuple):
    """A private name of a library, the file that it must be in, and what the adapter gets by it."""

    name: str
    file: str
    buys: str


_KERAS_LOSS, _KERAS_UTILS = "keras/src/losses/loss.py", "keras/src/trainers/compile_utils.py"
_KERAS_TRAINER, _KERAS_LAYER = "keras/src/trainers/trainer.py", "keras/src/layers/layer.py"
_KERAS_OPTIMIZER = "keras/src/optimizers/base_optimizer.py"
_KERAS_TENSORFLOW = "keras/src/backend/tensorflow/optimizer.py"
_TRAINER, _KTO = "transformers/trainer.py", "trl/trainer/kto_trainer.py"
_GRPO, _DPO = "trl/trainer/grpo_trainer.py", "trl/trainer/dpo_trainer.py"

INTERNALS: dict[str, tuple[Internal, ...]] = {
    "keras": (
        Internal("get_keras_mask", "keras/src/backend/__init__.py", "the units of a masked loss"),
        Internal("squeeze_or_expand_to_same_rank", _KERAS_LOSS, "weights × mask as Keras does it"),
        Internal("CompileLoss", _KERAS_UTILS, "compiled losses that record their units"),
        Internal("_flat_losses", _KERAS_UTILS, "every single loss of a compiled model"),
        Internal(
            "functional_from_config", "keras/src/models/functional.py", "models that load again"
        ),
        Internal(
            "no_automatic_dependency_tracking",
            "keras/src/utils/tracking.py",
            "window variables that are tracked once",
        ),
        Internal("_compile_loss", _KERAS_TRAINER, "the place of the compiled losses"),
        Internal("_compute_loss", _KERAS_TRAINER, "a loss with or without a `training` argument"),
        Internal("_call_has_training_arg", _KERAS_LAYER, "calls as Keras makes them"),
        Internal("_flatten_layers", _KERAS_LAYER, "every BatchNormalization, also in submodels"),
        Internal("_get_regularization_losses", _KERAS_LAYER, "regularisers, which have no units"),
        Internal("_track_variable", _KERAS_OPTIMIZER, "window variables that are saved"),
        Internal("_variables", _KERAS_OPTIMIZER, "window variables before the inner optimizer's"),
        Internal("_trainable_variables", _KERAS_OPTIMIZER, "the weights that gradients belong to"),
        Internal("_all_reduce_sum_gradients", _KERAS_TENSORFLOW, "one reduction per window"),
        Internal("_distribution_strategy", _KERAS_TENSORFLOW, "the flush on replicas"),
        Internal("_layout", "keras/src/backend/common/variables.py", "sums sharded as weights are"),
    ),
    "transformers": (
        Internal("_get_num_items_in_batch", _TRAINER, "units before a window's first forward"),
        Internal("_finalize_training", _TRAINER, "graphs that leave the device after training"),
        Internal("_prepare_inputs", _TRAINER, "units of what the loss is given"),
        Internal("LOSS_MAPPING", "transformers/loss/loss_utils.py", "if a loss shifts its labels"),
    ),
    "trl": (
        Internal("_compute_kl_logps", _KTO, "KTO's KL estimate of the whole window"),
        Internal("_prepare_dataset", _KTO, "mismatched answers from the whole window"),
        Internal("_is_vision_dataset", _DPO, "images are refused"),
        Internal("_step", _GRPO, "completions of a window before its first forward"),
        Internal("_entropy_bonus_enabled", _GRPO, "an entropy bonus over other units is refused"),
    ),
    "accelerate": (  # attributes without an underscore that no page describes
        Internal(
            "active_dataloader", "accelerate/state.py", "samples that it repeats are left out"
        ),
        Internal("even_batches", "accelerate/data_loader.py", "the same"),
        Internal("slice_fn", "accelerate/data_loader.py", "the same, of iterable datasets"),
        Internal("is_fsdp2", "accelerate/accelerator.py", "FSDP1 is refused"),
        Internal("end_of_dataloader", "accelerate/state.py", "loops without accumulate() fail"),
        Internal("parallelism_config", "accelerate/accelerator.py", "shared batches are refused"),
    ),
    "lightning": (
        Internal(
            "_in_fabric_backward",
            "lightning/fabric/wrappers.py",
            "backwards of ours under precisions that want Fabric's",
        ),
        Internal("_forward_module", "lightning/fabric/wrappers.py", "the DDP inside of a model"),
        Internal(
            "_tensor_parallel_size",
            "lightning/fabric/strategies/model_parallel.py",
            "ranks that share a batch are refused",
        ),
    ),
}


def missing(library: str) -> Iterator[str]:
    """Yield a sentence for every private name that the installed library no longer has."""
    installed = metadata.distribution(library)
    for name, file, buys in INTERNALS[library]:
        path = Path(str(installed.locate_file(file)))
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            text = ""
        if not re.search(rf"\b{name}\b", text):
            yield (
                f"{library} {installed.version} has no {name} in {file}, by which "
                f"wholebatch.integrations gets: {buys}. Keep the version below this one, or adapt"
            )
