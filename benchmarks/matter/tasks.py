"""The settings of the study: data, a small model, its loss as a mean and as a sum, a score."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import BertConfig, BertForSequenceClassification

import wholebatch as wb

Micro = dict[str, Tensor]
IGNORE = -100


@dataclass
class Task:
    """One run's problem: everything but the way in which the gradients are accumulated."""

    model: nn.Module
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    count: int
    """Samples of the training data."""
    take: Callable[[list[int]], Micro]
    """The samples of these indices, as the batch that a loader would give."""
    mean: Callable[[nn.Module, Micro], Tensor]
    """The mean that a user writes."""
    loss: Any
    """The same as a sum and its units, or `wb.Coupled`."""
    score: Callable[[nn.Module], tuple[float, float]]
    """The loss over held-out data and the metric."""
    micro: int
    steps: int
    epochs: int
    units: float = 1.0
    """Units per sample, on average: for the x axis."""
    clip: float | None = None
    hugging_face: bool = False
    """The model returns its own loss, as those of Transformers do."""

    @property
    def updates(self) -> int:
        """Updates of the whole run."""
        return self.epochs * -(-self.count // (self.micro * self.steps))


class Order(BatchSampler):
    """The indices of micro-batches: each epoch in its own order, which only the seed decides."""

    def __init__(self, task: Task, seed: int) -> None:
        super().__init__(SequentialSampler(range(task.count)), task.micro, drop_last=False)
        self._count, self._seed, self._epoch = task.count, seed, 0

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(1000 * self._seed + self._epoch)
        self._epoch += 1
        mixed = torch.randperm(self._count, generator=draw)
        yield from (part.tolist() for part in mixed.split(self.batch_size))


def sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def adamw(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)


def digits() -> tuple[Tensor, Tensor]:
    """The 1797 pictures of scikit-learn's digits, in an order that is always the same."""
    data = load_digits()
    mixed = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.images, dtype=torch.float32)[mixed] / 16
    return x.unsqueeze(1), torch.tensor(data.target)[mixed]


def mean_of_labels(model: nn.Module, micro: Micro) -> Tensor:
    return F.cross_entropy(model(micro["x"]), micro["y"])


def sum_of_labels(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def classifier(
    model: nn.Module, train: int, test: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Task:
    """Return the task of naming digits with this model."""
    x, y = digits()
    x = x.to(dtype)
    held_out = {"x": x[-test:], "y": y[-test:]}

    def score(model: nn.Module) -> tuple[float, float]:
        logits = model(held_out["x"]).float()
        right = (logits.argmax(-1) == held_out["y"]).float().mean()
        return F.cross_entropy(logits, held_out["y"]).item(), right.item()

    def take(rows: list[int]) -> Micro:
        return {"x": x[rows], "y": y[rows]}

    return Task(
        model.to(dtype),
        count=train,
        take=take,
        mean=mean_of_labels,
        loss=sum_of_labels,
        score=score,
        **options,
    )


def short_window(seed: int, rate: float) -> Task:
    """9 micro-batches an epoch, 8 a window: every second window has one micro-batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return classifier(model, train=72, test=1200, optimizer=sgd(rate), micro=8, steps=8, epochs=100)


def batchnorm(seed: int, rate: float) -> Task:
    """A small convolutional net with BatchNorm, micro-batches of 2."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return classifier(model, train=512, test=1024, optimizer=sgd(rate), micro=2, steps=16, epochs=5)


def bf16_sums(seed: int, rate: float) -> Task:
    """Parameters and gradients in bf16, 256 micro-batches of one sample an update."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return classifier(
        model,
        train=1280,
        test=517,
        dtype=torch.bfloat16,
        optimizer=sgd(rate),
        micro=1,
        steps=256,
        epochs=5,
    )


DIGITS, BOS, EQUALS, END, PAD = 10, 10, 11, 12, 13


def answers(number: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of digits, and completions that repeat them, each digit one higher."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.empty(number).log_normal_(1.8, 0.8, generator=draw).clamp(1, 24).int()
    samples = []
    for length in lengths.tolist():
        word = torch.randint(0, DIGITS, (length,), generator=draw).tolist()
        samples.append(([BOS, *word, EQUALS], [(digit + 1) % DIGITS for digit in word] + [END]))
    return samples


def masked(samples: Sequence[tuple[list[int], list[int]]]) -> Micro:
    """Return tokens, labels and mask, padded on the right; only completions have labels."""
    longest = max(len(prompt) + len(answer) for prompt, answer in samples)
    shape = len(samples), longest
    micro = {
        "input_ids": torch.full(shape, PAD),
        "labels": torch.full(shape, IGNORE),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
    }
    for row, (prompt, answer) in enumerate(samples):
        end = len(prompt) + len(answer)
        micro["input_ids"][row, :end] = torch.tensor(prompt + answer)
        micro["labels"][row, len(prompt) : end] = torch.tensor(answer)
        micro["attention_mask"][row, :end] = 1
    return micro


def own_loss(model: nn.Module, micro: Micro) -> Tensor:
    """The loss that a model of Transformers returns."""
    mean: Tensor = model(**micro).loss
    return mean


def token_loss(model: nn.Module, micro: Micro) -> wb.Loss:
    logits = model(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]).logits
    return wb.cross_entropy(logits[:, :-1], micro["labels"][:, 1:])


def sft(seed: int, rate: float) -> Task:
    """A Llama learns completions of 2 to 25 tokens, 4 samples in a micro-batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=14,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=PAD,
    )
    train, held_out = answers(1600, seed=1), masked(answers(400, seed=2))

    def score(model: nn.Module) -> tuple[float, float]:
        logits = model(
            input_ids=held_out["input_ids"], attention_mask=held_out["attention_mask"]
        ).logits[:, :-1]
        labels = held_out["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        right = (logits.argmax(-1) == labels) | (labels == IGNORE)
        return loss.item(), right.all(1).float().mean().item()

    return Task(
        LlamaForCausalLM(config),
        adamw(rate),
        count=len(train),
        take=lambda rows: masked([train[row] for row in rows]),
        mean=own_loss,
        loss=token_loss,
        score=score,
        micro=4,
        steps=4,
        epochs=1,
        units=sum(len(answer) for _, answer in train) / len(train),
        clip=1.0,
        hugging_face=True,
    )


@functools.cache
def pretrained_bert() -> dict[str, Tensor]:
    """The weights of a small BERT that has learned to count each of its 8 tokens."""
    torch.manual_seed(1)
    model = BertForSequenceClassification(bert_config(num_labels=8, problem_type="regression"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(1800):
        ids = torch.randint(0, 8, (64, 20))
        counts = F.one_hot(ids, 8).sum(1).float()
        optimizer.zero_grad()
        F.mse_loss(model(input_ids=ids).logits, counts).backward()
        optimizer.step()
    return {k: v for k, v in model.state_dict().items() if not k.startswith("classifier.")}


def bert_config(**settings: Any) -> Any:
    return BertConfig(
        vocab_size=8,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **settings,
    )


def bert(seed: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Task:
    """A pretrained BERT with a new classification head: which of two tokens is more frequent?"""
    body = pretrained_bert()
    torch.manual_seed(seed)
    model = BertForSequenceClassification(bert_config())
    model.load_state_dict(body, strict=False)
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 8, (2600, 20), generator=draw)
    labels = ((ids == 1).sum(1) > (ids == 2).sum(1)).long()

    def score(model: nn.Module) -> tuple[float, float]:
        logits = model(input_ids=ids[-1000:]).logits
        right = (logits.argmax(-1) == labels[-1000:]).float().mean()
        return F.cross_entropy(logits, labels[-1000:]).item(), right.item()

    def loss(model: nn.Module, micro: Micro) -> wb.Loss:
        return wb.cross_entropy(model(input_ids=micro["input_ids"]).logits, micro["labels"])

    return Task(
        model,
        optimizer,
        count=1600,
        take=lambda rows: {"input_ids": ids[rows], "labels": labels[rows]},
        mean=own_loss,
        loss=loss,
        score=score,
        micro=4,
        steps=4,
        epochs=1,
        clip=1.0,
        hugging_face=True,
    )


def bert_adamw(seed: int, rate: float) -> Task:
    """HF Trainer's own optimizer and clipping."""
    return bert(seed, adamw(rate))


def bert_sgd(seed: int, rate: float) -> Task:
    """The same with SGD, and without clipping."""
    task = bert(seed, sgd(rate))
    task.clip = None
    return task


class TwoTowers(nn.Module):
    """One encoder for the upper half of a picture, and one for the lower half."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Sequential(nn.Flatten(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
        self.lower = nn.Sequential(nn.Flatten(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.upper(x[:, :, :4]), self.lower(x[:, :, 4:])


def contrastive(seed: int, rate: float) -> Task:
    """Which lower half belongs to this upper half? 128 pairs are compared, 8 in a micro-batch."""
    torch.manual_seed(seed)
    x, _ = digits()
    held_out = x[-256:]

    def clip_loss(both: tuple[Tensor, Tensor]) -> wb.Loss:
        return wb.losses.clip_loss(*both, scale=10.0)

    def mean(model: nn.Module, micro: Micro) -> Tensor:
        loss = clip_loss(model(micro["x"]))
        return loss.total / loss.units

    def encode(model: nn.Module, micro: Micro) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = model(micro["x"])
        return both

    def score(model: nn.Module) -> tuple[float, float]:
        upper, lower = (F.normalize(z, dim=-1) for z in model(held_out))
        nearest = (upper @ lower.T).topk(5).indices
        right = (nearest == torch.arange(len(held_out))[:, None]).any(1).float().mean()
        loss = clip_loss((upper, lower))
        return float(loss.total / loss.units), right.item()

    return Task(
        TwoTowers(),
        adamw(rate),
        count=1536,
        take=lambda rows: {"x": x[rows]},
        mean=mean,
        loss=wb.Coupled(encode, clip_loss),
        score=score,
        micro=8,
        steps=16,
        epochs=10,
    )


SGD_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ADAMW_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Setting:
    """A task by name, and the words of its row."""

    title: str
    task: Callable[[int, float], Task]
    """Makes the task of a seed and a learning rate."""
    rates: tuple[float, ...]
    """Learning rates that the undivided batch is tried with."""
    metric: str
    units: str = "samples"


SETTINGS = {
    "sft": Setting(
        "SFT with completion masks",
        sft,
        ADAMW_RATES,
        "completions without an error",
        "labelled tokens",
    ),
    "short": Setting("Classifier, short last window", short_window, SGD_RATES, "test accuracy"),
    "bert": Setting(
        "BERT classification head, AdamW, clipped", bert_adamw, ADAMW_RATES, "test accuracy"
    ),
    "bert-sgd": Setting("BERT classification head, SGD", bert_sgd, SGD_RATES, "test accuracy"),
    "batchnorm": Setting("BatchNorm, micro-batches of 2", batchnorm, SGD_RATES, "test accuracy"),
    "contrastive": Setting(
        "Contrastive, in-batch negatives", contrastive, ADAMW_RATES, "right pair in top 5"
    ),
    "bf16": Setting("bf16 sums of 256 micro-batches", bf16_sums, SGD_RATES, "test accuracy"),
}
