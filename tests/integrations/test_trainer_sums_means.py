"""Trainer adds the means of models that ignore the number of items; `exact(Trainer)` does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")

from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24,
         "num_attention_heads": 2}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class OwnStep(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A training_step of the user's own: the Trainer makes the backwards."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


def bert(**more: Any) -> nn.Module:
    config = transformers.BertConfig(**SMALL, **STILL, num_labels=3, **more)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_ff=24, d_kv=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def batch(number: int, labels: tuple[int, ...]) -> dict[str, Tensor]:
    """So many samples with labels of this shape each; those of tokens are many or few."""
    made = torch.randint(3, 40 if labels else 6, (number, *labels)) - (0 if labels else 3)
    for row in range(number if labels else 0):
        made[row, 2 + row * 3 % 6 :] = -100
    return {"input_ids": torch.randint(3, 40, (number, 8)), "labels": made}


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bert": (bert, ()),
    "t5": (t5, (7,)),
}


def gradient_of(
    kind: Any, name: str, folder: Path, sizes: tuple[int, ...], *, seed: float = 1.0, **given: Any
) -> torch.Tensor:
    """The update by plain SGD of one window of these micro-batches, which is the gradient.

    The backward begins at `seed` times the loss. The update is divided by it again.
    """
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    samples = batch(sum(sizes), MODELS[name][1])
    cut = {key: leaf.split(list(sizes)) for key, leaf in samples.items()}
    parts = [{key: pieces[i] for key, pieces in cut.items()} for i in range(len(sizes))]

    class OfParts(kind):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(parts, batch_size=None)  # type: ignore[arg-type]

    class Seeded(OfParts):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * seed

    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), gradient_accumulation_steps=len(sizes), max_steps=1,
        max_grad_norm=0.0, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        lr_scheduler_type="constant", remove_unused_columns=False, **given,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / seed)
    trainer = OfParts if seed == 1.0 else Seeded
    trainer(model=model, args=arguments, train_dataset=[0], optimizers=(optimizer, None)).train()
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


EXACT = 1e-12


def undivided(kind: Any, name: str, folder: Path, **given: Any) -> torch.Tensor:
    """The gradient of the undivided batch, by a backward from the same seed per unit as ours.

    T5's layer norm and Transformers' smoothing compute in float32 inside a float64 model. A window
    begins at a power of two, which float32 does not round. A Trainer with a step of its own begins
    at the mean, whose seed, 1 / units, it does.
    """
    if kind is not transformers.Trainer:
        return gradient_of(transformers.Trainer, name, folder, (11,), **given)
    torch.manual_seed(0)
    MODELS[name][0]()  # the random numbers go on as in `gradient_of`
    labels = batch(11, MODELS[name][1])["labels"]
    units = int((labels[:, 1:] if name == "llama" else labels).ne(-100).sum())
    return gradient_of(kind, name, folder, (11,), seed=units / 64, **given)


def error(found: torch.Tensor, whole: torch.Tensor) -> float:
    return float((found - whole).norm() / whole.norm())


@pytest.mark.parametrize("kind", [transformers.Trainer, OwnStep], ids=["Trainer", "own step"])
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_models_whose_loss_takes_no_number_of_items(name: str, kind: Any, tmp_path: Path) -> None:
    whole = undivided(kind, name, tmp_path)
    assert error(gradient_of(exact(kind), name, tmp_path, (5, 2, 4)), whole) < EXACT
    if kind is transformers.Trainer:  # theirs is the sum of three means
        assert error(gradient_of(kind, name, tmp_path, (5, 2, 4)), whole) > 1.5
