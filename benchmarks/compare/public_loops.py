"""How public scripts add up their gradients, repeated in our own words on tiny models in float64.

The update of the script, the one through wholebatch and the one of the undivided batch start from
the same weights and see the same samples. SGD with a learning rate of 1: the update is the
gradient. diffusers' script runs in Accelerate itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from compare.row import Row

Batch = dict[str, Tensor]
Errors = tuple[float, float]
"""How far off the script's update is, and ours."""


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def compared(
    build: Callable[[], Any],
    *,
    whole: Callable[[Any], None],
    theirs: Any,
    ours: Any,
) -> Errors:
    """Run the three loops from the same weights."""
    start = build()
    moved = []
    for loop in (whole, theirs, ours):
        torch.manual_seed(3)
        model = copy.deepcopy(start)
        loop(model)
        moved.append(flat(model) - flat(start))
    right, usual, exact = moved
    return tuple(float((one - right).norm() / right.norm()) for one in (usual, exact))  # type: ignore[return-value]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def pieces(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    parts = {name: leaf.split(list(sizes)) for name, leaf in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


def mean_of_means(
    model: nn.Module,
    mean: Callable[[Any, Batch], Tensor],
    parts: list[Batch],
    optimizers: Callable[[Any], list[torch.optim.Optimizer]] = lambda model: [sgd(model)],
) -> None:
    """Make the update of the usual loop: each mean divided by the number of micro-batches."""
    chosen = optimizers(model)
    for micro in parts:
        (mean(model, micro) / len(parts)).backward()
    for optimizer in chosen:
        optimizer.step()


def usual_loop(
    build: Callable[[], Any],
    mean: Callable[[Any, Batch], Tensor],
    units: Callable[[Batch], Any],
    batch: Batch,
    sizes: Sequence[int],
    optimizers: Callable[[Any], list[torch.optim.Optimizer]] = lambda model: [sgd(model)],
) -> Errors:
    """Compare the usual loop over micro-batches of these sizes with the undivided batch."""
    micros = pieces(batch, sizes)

    def ours(model: nn.Module) -> None:
        acc = wb.Accumulator(model, optimizers(model), steps=len(micros))
        for micro in micros:
            acc.backward(mean=mean(model, micro), units=units(micro))

    return compared(
        build,
        whole=lambda model: mean_of_means(model, mean, [batch], optimizers),
        theirs=lambda model: mean_of_means(model, mean, micros, optimizers),
        ours=ours,
    )


# ------------------------------------------------------------------- language models, masked tokens


class Language(nn.Module):
    def __init__(self, words: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden = nn.Embedding(words, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, words)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(1, ids.shape[1] + 1)[:, None]
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embed(ids).cumsum(1) / places)))
        return logits


def texts(number: int = 16, *, least: int = 2) -> Batch:
    """Sequences of 24 tokens of which the answer alone counts; its length differs."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (number, 24), generator=draw)
    kept = torch.randint(least, 24, (number, 1), generator=draw)
    labels = ((5 * ids + 1) % 32).masked_fill(torch.arange(24) >= kept, -1)
    return {"ids": ids, "labels": labels}


def mean_of_tokens(model: nn.Module, micro: Batch) -> Tensor:
    logits = model(micro["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, micro["labels"].flatten(), ignore_index=-1)


def answer_tokens(micro: Batch) -> Tensor:
    return (micro["labels"] != -1).sum()


def nanogpt() -> Errors:
    return usual_loop(Language, mean_of_tokens, answer_tokens, texts(), (4, 4, 4, 4))


def nanochat() -> Errors:
    def muon_and_sgd(model: Any) -> list[torch.optim.Optimizer]:
        rest = [*model.embed.parameters(), *model.head.parameters(), model.hidden.bias]
        muon = torch.optim.Muon([model.hidden.weight], lr=0.02)
        return [muon, torch.optim.SGD(rest, lr=1.0)]

    return usual_loop(Language, mean_of_tokens, answer_tokens, texts(), (4, 4, 4, 4), muon_and_sgd)


def diffusers() -> Errors:
    """Accelerate divides the last window of an epoch, of 2 batches, by 4 as well."""
    from accelerate import Accelerator

    batch = texts(4, least=23)  # as many tokens in each
    micros = pieces(batch, (2, 2))

    def theirs(model: nn.Module) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
        rows = [{name: leaf[i] for name, leaf in batch.items()} for i in range(4)]
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        wrapped, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
        for micro in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(mean_of_tokens(wrapped, micro))
                optimizer.step()
                optimizer.zero_grad()

    def ours(model: nn.Module) -> None:
        acc = wb.Accumulator(model, sgd(model), steps=4)
        for micro in acc.over(micros):
            acc.backward(mean=mean_of_tokens(model, micro), units=answer_tokens(micro))

    return compared(
        Language,
        whole=lambda model: step(sgd(model), mean_of_tokens(model, batch)),
        theirs=theirs,
        ours=ours,
    )


# ------------------------------------------------------------------------------------------- images


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 16, 5),
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def timm() -> Errors:
    """BatchNorm sees 4 images of 32 at a time."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (32,), generator=draw)
    images = torch.randn(32, 3, 8, 8, generator=draw, dtype=torch.float64)
    batch = {"x": images + labels[:, None, None, None], "y": labels}
    micros = pieces(batch, [4] * 8)

    def mean(model: nn.Module, micro: Batch) -> Tensor:
        return F.cross_entropy(model(micro["x"]), micro["y"])

    def ours(model: nn.Module) -> None:
        def loss(model: nn.Module, micro: Batch) -> wb.Loss:
            return wb.cross_entropy(model(micro["x"]), micro["y"])

        wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4, batchnorm="exact").step(batch)

    return compared(
        Images,
        whole=lambda model: step(sgd(model), mean(model, batch)),
        theirs=lambda model: mean_of_means(model, mean, micros),
        ours=ours,
    )


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(12, 16), nn.Linear(9, 16)
        self.text.weight.data.copy_(self.image.weight[:, :9])  # as after some training
        self.scale = nn.Parameter(torch.tensor(2.659))  # ln(1 / 0.07), as in CLIP
        self.double()


def open_clip() -> Errors:
    """Each chunk is computed again beside the kept features, so that the scale counts K times."""
    draw = torch.Generator().manual_seed(1)
    batch = {"image": torch.randn(32, 12, generator=draw, dtype=torch.float64)}
    batch["text"] = batch["image"][:, :9] + 0.1 * torch.randn(32, 9, generator=draw)
    micros = pieces(batch, [4] * 8)

    def encode(model: Any, micro: Batch) -> tuple[Tensor, Tensor]:
        return F.normalize(model.image(micro["image"]), dim=-1), F.normalize(
            model.text(micro["text"]), dim=-1
        )

    def mean(model: Any, image: Tensor, text: Tensor) -> Tensor:
        logits = model.scale.exp() * image @ text.T
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    def theirs(model: Any) -> None:
        optimizer = sgd(model)
        with torch.no_grad():
            kept = [encode(model, micro) for micro in micros]
        for place, micro in enumerate(micros):
            now = [*kept[:place], encode(model, micro), *kept[place + 1 :]]
            mean(model, *(torch.cat(side) for side in zip(*now, strict=True))).backward()
        optimizer.step()

    def ours(model: Any) -> None:
        loss = wb.Coupled(encode, lambda all: wb.losses.clip_loss(*all, scale=model.scale.exp()))
        wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4).step(batch)

    return compared(
        Clip,
        whole=lambda model: step(sgd(model), mean(model, *encode(model, batch))),
        theirs=theirs,
        ours=ours,
    )


def denoising_diffusion() -> Errors:
    """The loader's last batch is smaller, and every batch counts alike."""
    draw = torch.Generator().manual_seed(1)
    x, noise = torch.randn(2, 26, 12, generator=draw, dtype=torch.float64)
    batch = {"x": x, "noise": noise}

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 12)).double()

    def mean(model: Any, micro: Batch) -> Tensor:
        noised = 0.6 * micro["x"] + 0.8 * micro["noise"]
        return F.mse_loss(model(noised), micro["noise"])

    return usual_loop(build, mean, lambda micro: micro["x"].numel(), batch, (8, 8, 8, 2))


def detection() -> Errors:
    """Box losses are a mean over the matched anchors, and images have 1 to 40 of them."""
    draw = torch.Generator().manual_seed(1)
    anchors = torch.randn(8, 60, 6, generator=draw, dtype=torch.float64)
    boxes = torch.randn(8, 60, 4, generator=draw, dtype=torch.float64)
    counts = torch.randint(1, 41, (8, 1), generator=draw)
    batch = {"x": anchors, "boxes": boxes, "matched": torch.arange(60) < counts}

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()

    def mean(model: nn.Module, micro: Batch) -> Tensor:
        kept = micro["matched"]
        total = F.smooth_l1_loss(model(micro["x"])[kept], micro["boxes"][kept], reduction="sum")
        return total / kept.sum()

    return usual_loop(build, mean, lambda micro: micro["matched"].sum(), batch, [2] * 4)


LOOPS: dict[str, tuple[str, Callable[[], Errors]]] = {
    "timm, train.py": ("equal", timm),
    "diffusers, train_unconditional.py": ("short tail", diffusers),
    "nanoGPT, train.py, masked targets": ("masked tokens", nanogpt),
    "nanochat, chat_sft.py": ("masked tokens", nanochat),
    "torchvision detection, loss / K": ("masked tokens", detection),
    "open_clip, train.py --accum-freq": ("equal", open_clip),
    "denoising-diffusion-pytorch": ("uneven", denoising_diffusion),
}
"""The case that each loop shows, and its errors."""


def rows() -> list[Row]:
    return [Row(name, "", case, *errors()) for name, (case, errors) in LOOPS.items()]
