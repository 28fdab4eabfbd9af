"""How far off the update of well-known public scripts is: the table of docs/gallery.md.

    python benchmarks/gallery.py           # print the table
    python benchmarks/gallery.py --page    # write it into the page

Each case repeats in our own words how a script adds up its gradients, on a tiny model in float64
(Trainer, Accelerate and TRL run themselves, in float32). Its update, the one through wholebatch and
the one of the undivided batch start from the same weights and see the same samples. SGD with a
learning rate of 1: the update is the gradient.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from which_mean import written  # noqa: E402

import wholebatch as wb  # noqa: E402

PAGE = ROOT / "docs" / "gallery.md"
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
    part: str = "",
) -> Errors:
    """Run the three loops from the same weights; `part` names the module to compare."""
    start = build()
    moved = []
    for loop in (whole, theirs, ours):
        torch.manual_seed(3)
        model = copy.deepcopy(start)
        loop(model)
        moved.append(flat(model.get_submodule(part)) - flat(start.get_submodule(part)))
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


def run_clm() -> Errors:
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


# --------------------------------------------------------------------- trainers of other libraries


def run_glue() -> Errors:
    """Trainer on a classifier whose forward takes **kwargs: 4 equal micro-batches."""
    import transformers

    from tests.integrations.test_trainer_sums_means import gradient_of
    from wholebatch.integrations.transformers import exact

    with tempfile.TemporaryDirectory() as folder:
        whole, usual, ours = (
            gradient_of(kind, "bert", Path(folder), sizes)
            for kind, sizes in (
                (transformers.Trainer, (16,)),
                (transformers.Trainer, (4,) * 4),
                (exact(transformers.Trainer), (4,) * 4),
            )
        )
    return tuple(float((one - whole).norm() / whole.norm()) for one in (usual, ours))  # type: ignore[return-value]


def trl(name: str) -> Errors:
    import datasets

    from tests.integrations.trl_training import TRAINERS, off, trained
    from wholebatch.integrations.transformers import exact

    datasets.disable_progress_bars()
    whole = trained(TRAINERS[name](lambda kind: kind, 1))
    usual = trained(TRAINERS[name](lambda kind: kind, 4))
    return off(usual, whole), off(trained(TRAINERS[name](exact, 4)), whole)


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


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4)).double()
        self.judge = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1)).double()


def biggan() -> Errors:
    """Two discriminator steps per batch; zero_grad() is called once, before the first."""
    draw = torch.Generator().manual_seed(1)
    real = torch.randn(2, 16, 4, generator=draw, dtype=torch.float64) + 1
    noise = torch.randn(2, 16, 8, generator=draw, dtype=torch.float64)

    def judged(gan: Any, x: Tensor, z: Tensor) -> Tensor:
        fake = gan.make(z).detach()
        return F.relu(1 - gan.judge(x)) + F.relu(1 + gan.judge(fake))

    def loop(gan: Any, size: int, *, clears: bool) -> None:
        optimizer = torch.optim.SGD(gan.judge.parameters(), lr=0.1)
        for x, z in zip(real, noise, strict=True):
            parts = list(zip(x.split(size), z.split(size), strict=True))
            for micro in parts:
                (judged(gan, *micro).mean() / len(parts)).backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()

    def ours(gan: Any) -> None:
        acc = wb.Accumulator(gan.judge, torch.optim.SGD(gan.judge.parameters(), lr=0.1), steps=4)
        parts = [
            micro
            for x, z in zip(real, noise, strict=True)
            for micro in zip(x.split(4), z.split(4), strict=True)
        ]
        for micro in acc.over(parts):
            acc.backward(judged(gan, *micro).sum(), units=len(micro[0]))

    return compared(
        Gan,
        whole=lambda gan: loop(gan, 16, clears=True),
        theirs=lambda gan: loop(gan, 4, clears=False),
        ours=ours,
        part="judge",
    )


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


@dataclass(frozen=True)
class Case:
    script: str
    why: str
    errors: Callable[[], Errors]


CASES = [
    Case("transformers, run_glue.py (Trainer)", "means are added, not averaged", run_glue),
    Case("TRL, DPOTrainer", "mean of means over pairs", lambda: trl("DPO")),
    Case("TRL, RewardTrainer", "mean of means over pairs", lambda: trl("Reward")),
    Case("timm, train.py", "BatchNorm sees one micro-batch", timm),
    Case("BigGAN-PyTorch before b70f16c", "old gradients stay in the second step", biggan),
    Case("transformers, run_clm_no_trainer.py", "a short last window, divided by K", run_clm),
    Case("nanochat, chat_sft.py", "mean of means over answer tokens; Muon", nanochat),
    Case("nanoGPT, train.py, with masked targets", "mean of means over tokens", nanogpt),
    Case("torchvision detection with loss / K", "mean of means over boxes", detection),
    Case("open_clip, train.py --accum-freq", "the temperature counts K times", open_clip),
    Case("denoising-diffusion-pytorch", "a smaller last batch counts as much", denoising_diffusion),
]


def table() -> list[str]:
    lines = [
        "| script | what goes wrong | its update is off by | with wholebatch |",
        "|---|---|---:|---:|",
    ]
    for case in CASES:
        usual, ours = case.errors()
        lines.append(f"| {case.script} | {case.why} | {usual:.1%} | {ours:.0e} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page", action="store_true", help="write the table into the page")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = table()
    print("\n".join(lines))
    if given.page:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(page, "gallery", lines), encoding="utf-8")


if __name__ == "__main__":
    main()
