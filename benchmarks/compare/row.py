"""One line of the table, what every trainer is asked for, and what is said of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ABOUT", "CASES", "LIBRARIES", "LIMITS", "About", "Row"]

CASES = ("equal", "uneven", "short tail", "masked tokens", "clipped", "two processes")
"""The cases, in the order of the table.

equal: micro-batches of one size, full windows. uneven: micro-batches of different sizes. short
tail: an epoch whose last window has fewer micro-batches than the others. masked tokens: a loss
that is a mean over tokens, of which each micro-batch has another number. clipped: masked tokens,
with clipping by norm at a norm that always binds. two processes: masked tokens on two data-parallel
processes (or two devices of one process) with different numbers of tokens.
"""

LIMITS = {"float64": 1e-12, "float32": 1e-6}
"""What wholebatch's error may be, by precision."""

LIBRARIES: Mapping[str, Mapping[str, str]] = {
    "transformers": {},
    "trl": {},
    "accelerate": {},
    "lightning": {},
    "fabric": {},
    "sentence_transformers": {},
    "deepspeed": {"DS_ACCELERATOR": "cpu"},
    "keras_tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "keras_torch": {"KERAS_BACKEND": "torch"},
    "jax": {},
    "public_loops": {},
}
"""The modules of this package that have rows, each with the environment of its process."""


@dataclass(frozen=True)
class Row:
    """One case of one trainer: the errors of its own accumulation and of wholebatch in it."""

    trainer: str
    """As a reader knows it: "Lightning"."""
    version: str
    case: str
    """One of CASES."""
    own: float | None
    """Error of the trainer's own accumulation; None: it has none."""
    ours: float | None
    """Error of wholebatch in it; None: it is used in another way, which `About` names."""
    precision: str = "float64"
    """A key of LIMITS: what the model, the data and the gradients were in."""

    @property
    def keeps(self) -> bool:
        """True if wholebatch is within its limit."""
        return self.ours is None or self.ours <= LIMITS[self.precision]

    def __post_init__(self) -> None:
        if self.case not in CASES:
            raise ValueError(f"case={self.case!r}: must be one of {', '.join(CASES)}")
        if self.precision not in LIMITS:
            raise ValueError(f"precision={self.precision!r}: must be one of {', '.join(LIMITS)}")


@dataclass(frozen=True)
class About:
    """Why a trainer's update depends on the split, and what its own users can do."""

    cause: str
    workaround: str = ""
    """What the library itself offers, and what that leaves."""
    report: str = ""
    """The discussion upstream, as owner/name#number."""


_MEANS = "each micro-batch's mean counts alike"
ABOUT: Mapping[str, About] = {
    "Trainer, Llama": About("none: divides by the window's `num_items_in_batch`"),
    "Trainer, BERT": About(
        "the model ignores `num_items_in_batch`: means are added",
        "`model.accepts_loss_kwargs = False`: the row below",
        "huggingface/transformers#47688",
    ),
    "Trainer, BERT, accepts_loss_kwargs=False": About(
        _MEANS, "right for micro-batches of equal size and full windows"
    ),
    "Trainer, T5": About(
        "the model ignores `num_items_in_batch`: means are added",
        "`model.accepts_loss_kwargs = False` leaves a mean of token means",
        "huggingface/transformers#47688",
    ),
    "Trainer, a model of one's own": About(
        _MEANS, "`compute_loss_func=` that divides by `num_items_in_batch`"
    ),
    "SFTTrainer, Llama": About("none: divides by the window's `num_items_in_batch`"),
    "DPOTrainer": About(_MEANS, "batches of equal size are right", "huggingface/trl#5710"),
    "KTOTrainer": About(
        "each micro-batch has its own KL estimate", "none: the estimate couples its samples"
    ),
    "RewardTrainer": About(_MEANS, "batches of equal size are right", "huggingface/trl#5710"),
    "GRPOTrainer": About(
        "none with its default loss: divides by the window's tokens",
        '`loss_type="grpo"` and "bnpo" divide per micro-batch',
        "huggingface/trl#5619",
    ),
    "Accelerate": About(
        _MEANS,
        'its guide "samples of variable size" shows a loop of 20 lines that counts tokens: right',
    ),
    "Lightning": About(
        _MEANS, "manual optimization, with one's own count", "Lightning-AI/pytorch-lightning#2199"
    ),
    "Fabric": About(_MEANS, "the loop is the user's: divide by the count of the window"),
    "SentenceTransformerTrainer, MultipleNegativesRankingLoss": About(
        "negatives of one micro-batch only",
        "`CachedMultipleNegativesRankingLoss` with the whole batch: two passes",
        "huggingface/sentence-transformers#3862",
    ),
    "DeepSpeed ZeRO-1": About(_MEANS, "divide by the global count before `backward`"),
    "DeepSpeed ZeRO-2": About(_MEANS, "as ZeRO-1"),
    "DeepSpeed ZeRO-3": About(_MEANS, "as ZeRO-1"),
    "Keras, TensorFlow": About(
        "micro-batches count alike; the tail waits", "", "keras-team/keras#20241"
    ),
    "Keras, torch": About(
        "micro-batches count alike; the tail waits", "", "keras-team/keras#20241"
    ),
    "optax.MultiSteps": About(
        "micro-batches count alike; the tail waits", "sum losses, and divide by the count"
    ),
    "optax.microbatch": About(
        "micro-batches count alike", "`AccumulationType.SUM`, and divide by the count"
    ),
    "timm, train.py": About("BatchNorm sees one micro-batch", "a model with GroupNorm"),
    "diffusers, train_unconditional.py": About(
        "the short last window is divided by K", "`drop_last=True` and a length that K divides"
    ),
    "nanoGPT, train.py, masked targets": About(_MEANS, "targets without a mask are right"),
    "nanochat, chat_sft.py": About(_MEANS, "", "karpathy/nanochat#59"),
    "torchvision detection, loss / K": About("each micro-batch's mean over boxes counts alike"),
    "open_clip, train.py --accum-freq": About("the temperature counts K times"),
    "denoising-diffusion-pytorch": About("a smaller last batch counts alike"),
}
"""What the page says of each trainer. A report is a discussion, open or closed."""
