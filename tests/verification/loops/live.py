"""Loops that run: one mistake planted in plain torch and inside trainers, on kinds of models.

A mistake is a weight of the micro-batches, or a line that stands in the loop. The entry point says
who runs the loop; every entry point has the same places for those lines.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import wholebatch as wb
from wholebatch.verification import ZOO, LoopVerdict

Micro = dict[str, Any]
Weigh = Callable[[Tensor, float, float, int], Tensor]
STEPS = 4

# ------------------------------------------------------------------------ kinds of models


@dataclass(frozen=True)
class Kind:
    """A model, its micro-batches, and the terms of its loss: a mean and the units of each."""

    name: str
    model: Callable[[], nn.Module]
    micros: Callable[[int], list[Micro]]
    terms: Callable[[nn.Module, Micro], list[tuple[Tensor, float]]]
    scales: tuple[float, ...] = (1.0,)


def _classified(model: nn.Module, micro: Micro) -> list[tuple[Tensor, float]]:
    logits = model(micro["x"]).flatten(0, -2).float()
    labels = micro["y"].flatten()
    return [(F.cross_entropy(logits, labels), float((labels != -100).sum()))]


class Detector(nn.Module):
    """Takes lists of images and of their boxes, and returns its losses by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.look = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.kind, self.box = nn.Conv2d(6, 3, 1), nn.Conv2d(6, 4, 1)

    def forward(self, images: list[Tensor], targets: list[Micro]) -> dict[str, Tensor]:
        kinds, boxes, labels, wanted = [], [], [], []
        for image, target in zip(images, targets, strict=True):
            seen = self.look(image[None])
            kinds.append(self.kind(seen)[0].flatten(1).T)
            boxes.append(self.box(seen)[0].flatten(1).T[target["places"]])
            labels.append(target["labels"])
            wanted.append(target["boxes"])
        found, right = torch.cat(boxes), torch.cat(wanted)
        box = F.smooth_l1_loss(found, right, reduction="sum") / len(right)
        return {"kind": F.cross_entropy(torch.cat(kinds), torch.cat(labels)), "box": box}


def _images(number: int) -> list[Micro]:
    draw = torch.Generator().manual_seed(number)
    micros = []
    for place in range(number):
        images, targets = [], []
        for _ in range(1 + place % 3):
            images.append(torch.randn(3, 4, 4, generator=draw))
            places = torch.randperm(16, generator=draw)[: 1 + (place * 2) % 5]
            labels = torch.zeros(16, dtype=torch.long)
            labels[places] = torch.randint(1, 3, (len(places),), generator=draw)
            boxes = torch.randn(len(places), 4, generator=draw)
            targets.append({"places": places, "labels": labels, "boxes": boxes})
        micros.append({"images": images, "targets": targets})
    return micros


def _detected(model: nn.Module, micro: Micro) -> list[tuple[Tensor, float]]:
    losses = model(micro["images"], micro["targets"])
    boxes = sum(len(target["boxes"]) for target in micro["targets"])
    return [(losses["kind"], 16.0 * len(micro["images"])), (losses["box"], float(boxes))]


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.Sequential(nn.Linear(9, 24), nn.SiLU(), nn.Linear(24, 8))

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        out: Tensor = self.layers(torch.cat([noisy, time], 1))
        return out


def _noises(number: int) -> list[Micro]:
    draw = torch.Generator().manual_seed(number)
    return [{"x": torch.randn(1 + (3 * i) % 5, 8, generator=draw)} for i in range(number)]


def _denoised(model: nn.Module, micro: Micro) -> list[tuple[Tensor, float]]:
    x = micro["x"]
    noise, time = torch.randn_like(x), torch.rand(len(x), 1).to(x.dtype)
    found = model(x * (1 - time) + noise * time, time)
    return [(F.mse_loss(found.float(), noise.float()), float(len(x)))]


def _of_the_zoo(name: str) -> Callable[[int], list[Micro]]:
    def micros(number: int) -> list[Micro]:
        return [
            m for rank in range(-(-number // STEPS)) for m in ZOO[name].window(STEPS, False, rank)
        ]

    return micros


KINDS = {
    kind.name: kind
    for kind in (
        Kind("classifier", ZOO["mlp"].model, _of_the_zoo("mlp"), _classified),
        Kind("language model", ZOO["lm"].model, _of_the_zoo("lm"), _classified),
        Kind("detector", Detector, _images, _detected, scales=(1.0, 0.5)),
        Kind("diffusion", Denoiser, _noises, _denoised),
    )
}

# ------------------------------------------------------------------------ mistakes


@dataclass
class Moment:
    """A place in a loop: after which micro-batch of its window, and what the loop holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    place: int = 0
    count: int = STEPS
    units: float = 1.0
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        return self.place + 1 == self.count

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


Line = Callable[[Moment], None]


def nothing(moment: Moment) -> None:
    pass


def right(mean: Tensor, units: float, total: float, count: int) -> Tensor:
    return mean * units / total


def shares_of_a_full_window(mean: Tensor, units: float, total: float, count: int) -> Tensor:
    return mean * units / total * (count / STEPS)


@dataclass(frozen=True)
class Plant:
    """One mistake, or a right loop of an unusual style (`key` is "right")."""

    key: str
    weigh: Weigh = right
    start: Line = nothing
    after_backward: Line = nothing
    before_step: Line = nothing
    after_step: Line = nothing
    clears: bool = True
    loss_scale: float = 0.0
    scaled_step: bool = True
    windows: tuple[int, ...] = (4, 4, 3)
    steps_at: Callable[[int, int, int], bool] | None = None
    """Of the place in the stream, the place in the window, and its count: only loops by hand."""
    again: int | None = None
    """The micro-batch of the first window that comes twice."""
    half: bool = False

    @property
    def by_hand(self) -> bool:
        """True if only a loop that is written by hand can make it."""
        return bool(self.steps_at or self.again is not None or self.loss_scale or self.half)


def _clear(moment: Moment) -> None:
    for parameter in moment.parameters:
        parameter.grad = None


def _clip(moment: Moment) -> None:
    nn.utils.clip_grad_norm_(moment.model.parameters(), 0.01)


def _measure(moment: Moment) -> None:
    nn.utils.clip_grad_norm_(moment.model.parameters(), float("inf"))


def _clip_value(moment: Moment) -> None:
    nn.utils.clip_grad_value_(moment.model.parameters(), 0.001)


def _clip_then_divide(moment: Moment) -> None:
    _clip(moment)
    for parameter in moment.parameters:
        if parameter.grad is not None:
            parameter.grad /= 64


def _schedule(moment: Moment) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notices the first of these itself
        moment.held["schedule"].step()


def _with_schedule(moment: Moment) -> None:
    moment.held["schedule"] = torch.optim.lr_scheduler.ExponentialLR(moment.optimizer, 0.9)


@torch.no_grad()
def _decay(moment: Moment) -> None:
    for parameter in moment.parameters:
        parameter.mul_(0.999)


@torch.no_grad()
def _with_average(moment: Moment) -> None:
    moment.held["average"] = [p.detach().clone() + 1e-3 for p in moment.parameters]


@torch.no_grad()
def _average(moment: Moment) -> None:
    for average, parameter in zip(moment.held["average"], moment.parameters, strict=True):
        average.lerp_(parameter, 0.1)


def _with_averaged_model(moment: Moment) -> None:
    moment.held["averaged"] = AveragedModel(moment.model)


def _average_model(moment: Moment) -> None:
    moment.held["averaged"].update_parameters(moment.model)


def _second_step(moment: Moment) -> None:
    if "second" not in moment.held:
        moment.held["second"] = torch.optim.SGD(moment.model.parameters(), lr=0.01)
    moment.held["second"].step()


def _resumed(moment: Moment) -> None:
    for parameter in moment.parameters:
        moment.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _only(line: Line, when: Callable[[Moment], bool]) -> Line:
    return lambda moment: line(moment) if when(moment) else None


def _not_last(moment: Moment) -> bool:
    return not moment.is_last


MISTAKES = {
    "not divided": Plant("not-divided", lambda mean, u, all_, k: mean),
    "divided twice": Plant("divided-twice", lambda mean, u, all_, k: mean * u / all_ / k),
    "means divided twice": Plant("divided-twice", lambda mean, u, all_, k: mean / k / k),
    "mean of means": Plant("mean-of-means", lambda mean, u, all_, k: mean / k),
    "nominal count": Plant("nominal-count", shares_of_a_full_window),
    "tail dropped": Plant("no-update", steps_at=lambda i, place, k: place == STEPS - 1),
    "cleared every time": Plant("only-the-last", after_backward=_only(_clear, _not_last)),
    "cleared twice": Plant(
        "cleared-in-the-window", after_backward=_only(_clear, lambda m: m.place == 1)
    ),
    "never cleared": Plant("never-cleared", clears=False),
    "clipped every time": Plant("clipped-per-micro-batch", after_backward=_clip),
    "values clipped every time": Plant("clipped-per-micro-batch", after_backward=_clip_value),
    "clipped before the last": Plant(
        "clipped-too-early", after_backward=_only(_clip, lambda m: m.place == m.count - 2)
    ),
    "clipped before dividing": Plant(
        "clipped-too-early",
        lambda mean, u, all_, k: mean * u / all_ * 64,
        before_step=_clip_then_divide,
    ),
    "clipped while scaled": Plant("clipped-while-scaled", before_step=_clip, loss_scale=1024.0),
    "loss scale left in": Plant("loss-scale", loss_scale=1024.0, scaled_step=False),
    "loss scale changed": Plant(
        "loss-scale",
        after_backward=_only(lambda m: m.held["scaler"].update(512.0), lambda m: m.place == 1),
        loss_scale=1024.0,
    ),
    "scheduled every time": Plant(
        "scheduled-per-micro-batch", start=_with_schedule, after_backward=_schedule
    ),
    "decayed every time": Plant("moved-in-the-window", after_backward=_decay),
    "off by one": Plant(
        "only-the-first",
        lambda mean, u, all_, k: mean / STEPS,
        steps_at=lambda i, place, k: i % STEPS == 0,
    ),
    "last left out": Plant("cleared-in-the-window", steps_at=lambda i, place, k: place == k - 2),
    "first counted twice": Plant("counted-twice", again=0),
    "two optimizers": Plant("two-owners", after_step=_second_step),
    "added in 16 bits": Plant("16-bit-accumulation", windows=(24,), half=True),
    "averaged every time": Plant(
        "averaged-per-micro-batch", start=_with_averaged_model, after_backward=_average_model
    ),
    "stepped every time": Plant(
        "stepped-every-micro-batch",
        lambda mean, u, all_, k: mean / STEPS,
        steps_at=lambda i, place, k: True,
    ),
    "a list averaged every time": Plant(
        "averaged-per-micro-batch", start=_with_average, after_backward=_average
    ),
}
"""Mistakes by name; each with the key by which it must be told."""

STYLES = {
    "shares of the units": Plant("right"),
    "clipped once": Plant("right", before_step=_clip),
    "values clipped once": Plant("right", before_step=_clip_value),
    "scheduled once": Plant("right", start=_with_schedule, after_step=_schedule),
    "averaged once": Plant("right", start=_with_average, after_step=_average),
    "model averaged once": Plant("right", start=_with_averaged_model, after_step=_average_model),
    "decayed once": Plant("not judged", after_step=_decay),
    "resumed": Plant("right", start=_resumed),
    "scaled": Plant("right", loss_scale=1024.0),
    "norm measured every time": Plant(
        "right",
        after_backward=_measure,
    ),
    "no short window": Plant("right", windows=(4, 4)),
    "long window": Plant("right", windows=(9,)),
    "two micro-batches": Plant("right", windows=(2, 2)),
}
"""Right loops, with their verdicts, for every kind of model and every entry point."""

# ------------------------------------------------------------------------ entry points


@dataclass(frozen=True)
class Run:
    """One kind of model trained with one plant."""

    kind: Kind
    plant: Plant

    def windows(self) -> list[list[Micro]]:
        """Return the micro-batches by window, each with its place and the window's totals."""
        micros = iter(self.kind.micros(sum(self.plant.windows) + STEPS))
        found = []
        for number, size in enumerate(self.plant.windows):
            window = [next(micros) for _ in range(size)]
            if self.plant.half:
                window = [_halved(micro) for micro in window]
            probe = self.model()
            units = [[u for _, u in self.kind.terms(probe, micro)] for micro in window]
            totals = [sum(column) for column in zip(*units, strict=True)]
            if number == 0 and self.plant.again is not None:
                window.insert(0, window[self.plant.again])
            about = {"totals": totals, "count": size}
            found.append([{**m, **about, "place": i} for i, m in enumerate(window)])
        return found

    def model(self) -> nn.Module:
        model = self.kind.model()
        return model.to(torch.bfloat16) if self.plant.half else model

    def loss(self, model: nn.Module, micro: Micro) -> Tensor:
        terms = zip(self.kind.terms(model, micro), micro["totals"], self.kind.scales, strict=True)
        weigh, count = self.plant.weigh, micro["count"]
        parts = [weigh(mean * s, u, total, count) for (mean, u), total, s in terms]
        return sum(parts[1:], start=parts[0])


def _halved(micro: Micro) -> Micro:
    def half(value: Any) -> Any:
        if isinstance(value, list):
            return [half(one) for one in value]
        if isinstance(value, dict):
            return _halved(value)
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if is_float else value

    return {name: half(value) for name, value in micro.items()}


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def by_hand(run: Run, wrap: Callable[..., Any] | None = None) -> LoopVerdict:
    """Run a loop that is written by hand; `wrap(model, optimizer)` gives the engine's."""
    plant, inner = run.plant, run.model()
    windows, optimizer = run.windows(), _sgd(inner)
    moment = Moment(inner, optimizer)
    plant.start(moment)
    model, backward, steps = inner, Tensor.backward, optimizer
    if wrap is not None:
        model, steps, backward = wrap(inner, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=plant.loss_scale or 1.0)
    moment.held["scaler"] = scaler
    with wb.watch(inner, optimizer) as watched:
        index = 0
        for window in windows:
            moment.count, moment.units = len(window), window[0]["totals"][0]
            for micro in window:
                moment.place = micro["place"]
                loss = run.loss(model, micro)
                backward(scaler.scale(loss) if plant.loss_scale else loss)  # type: ignore[no-untyped-call]
                plant.after_backward(moment)
                at = plant.steps_at
                if moment.is_last if at is None else at(index, micro["place"], len(window)):
                    plant.before_step(moment)
                    if plant.loss_scale and plant.scaled_step:
                        scaler.step(steps)
                        scaler.update()
                    else:
                        steps.step()
                    plant.after_step(moment)
                    if plant.clears:
                        steps.zero_grad()
                index += 1
            if at is not None and plant.key == "cleared-in-the-window":
                steps.zero_grad()
    return watched.verdict


def accelerate(run: Run) -> LoopVerdict:
    def wrap(model: Any, optimizer: Any) -> Any:
        from accelerate import Accelerator

        engine = Accelerator(cpu=True)
        return (*engine.prepare(model, optimizer), engine.backward)

    return by_hand(run, wrap)


def fabric(run: Run) -> LoopVerdict:
    def wrap(model: Any, optimizer: Any) -> Any:
        from lightning.fabric import Fabric

        engine = Fabric(accelerator="cpu", devices=1)
        return (*engine.setup(model, optimizer), engine.backward)

    return by_hand(run, wrap)


def lightning(run: Run) -> LoopVerdict:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.model()
            self.moment: Moment | None = None

        def training_step(self, micro: Micro, index: int) -> Tensor:
            assert self.moment is not None
            self.moment.place, self.moment.count = micro["place"], micro["count"]
            self.moment.units = micro["totals"][0]
            return run.loss(self.net, micro) * STEPS  # Lightning divides by them

        def on_after_backward(self) -> None:
            assert self.moment is not None
            run.plant.after_backward(self.moment)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.moment is not None
            run.plant.before_step(self.moment)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.moment is not None and self.moment.is_last:
                run.plant.after_step(self.moment)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = _sgd(self.net)
            self.moment = Moment(self.net, optimizer)
            run.plant.start(self.moment)
            return optimizer

        def optimizer_zero_grad(self, *_: Any) -> None:
            if run.plant.clears:
                self.net.zero_grad()

    trainer = L.Trainer(
        max_epochs=1,
        accumulate_grad_batches=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    micros = [micro for window in run.windows() for micro in window]
    with wb.watch(module) as watched:
        trainer.fit(module, torch.utils.data.DataLoader(micros, batch_size=None))  # type: ignore[arg-type]
    return watched.verdict


def _lines(plant: Plant, moment: Moment) -> Any:
    """Return a callback of HF Trainer that runs the lines of a plant at their places."""
    from transformers import TrainerCallback

    class Lines(TrainerCallback):
        def on_step_begin(self, *_: Any, **more: Any) -> None:
            moment.place = 0

        def on_substep_end(self, *_: Any, **more: Any) -> None:
            plant.after_backward(moment)
            moment.place += 1

        def on_pre_optimizer_step(self, *_: Any, **more: Any) -> None:
            plant.after_backward(moment)
            plant.before_step(moment)

        def on_optimizer_step(self, *_: Any, **more: Any) -> None:  # before gradients are cleared
            plant.after_step(moment)

    return Lines()


def hf_trainer(run: Run, folder: Path = Path("build/watch")) -> LoopVerdict:
    from transformers import Trainer, TrainingArguments

    model = run.model()
    micros = [micro for window in run.windows() for micro in window]
    optimizer = _sgd(model)
    moment = Moment(model, optimizer)
    run.plant.start(moment)

    class Planted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Tensor:
            moment.place, moment.count = inputs["place"], inputs["count"]
            moment.units = inputs["totals"][0]
            loss: Tensor = run.loss(model, inputs) * inputs["count"]  # the trainer divides by them
            return loss

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=STEPS,
        num_train_epochs=1,
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    if not run.plant.clears:
        model.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Planted(
        model,
        arguments,
        train_dataset=micros,
        data_collator=lambda rows: rows[0],
        optimizers=(optimizer, constant),
        callbacks=[_lines(run.plant, moment)],
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(micros)  # type: ignore[method-assign]
    with wb.watch(model, optimizer) as watched:
        trainer.train()
    return watched.verdict


def trl_sft(run: Run) -> LoopVerdict:
    """Run TRL's SFTTrainer, with a model, data and a loss of its own, and the lines of a plant."""
    from tests.integrations import trl_training

    trainer = trl_training.sft(lambda kind: kind, STEPS, num_train_epochs=2)
    moment = Moment(trainer.model, trainer.create_optimizer())
    run.plant.start(moment)
    trainer.add_callback(_lines(run.plant, moment))
    if not run.plant.clears:
        trainer.model.zero_grad = lambda *_, **__: None
    with wb.watch(trainer.model, trainer.optimizer) as watched:
        trl_training.trained(trainer, 2)
    return watched.verdict


ENTRY_POINTS: dict[str, Callable[[Run], LoopVerdict]] = {
    "plain torch": by_hand,
    "Accelerate": accelerate,
    "Fabric": fabric,
    "Lightning": lightning,
    "HF Trainer": hf_trainer,
    "TRL": trl_sft,
}
BY_HAND = ("plain torch", "Accelerate", "Fabric")


def can_run(entry_point: str, plant: Plant) -> bool:
    """True if this entry point has a place for this plant."""
    if entry_point in BY_HAND:
        return True
    if entry_point == "TRL" and plant.weigh is not right:
        return False
    return not plant.by_hand and plant.windows in ((4, 4, 3), (4, 4))


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what trainers say while they are set up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def verdict_of(entry_point: str, kind: str, plant: Plant) -> LoopVerdict:
    """Return the verdict of a watch on this loop."""
    torch.manual_seed(0)
    with quiet():
        return ENTRY_POINTS[entry_point](Run(KINDS[kind], plant))


def found_in(verdict: LoopVerdict) -> str:
    """Return the key of what was found first."""
    if verdict.same:
        return "right"
    return "not judged" if not verdict.judged else (*verdict.mistakes, "unknown")[0]
