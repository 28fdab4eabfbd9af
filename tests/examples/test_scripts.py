"""The scripts to copy: the first update is that of the undivided batch; a resumed run goes on."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from tests.distributed.launch import torchrun
from tests.examples.first_update import (
    FOLDER,
    first_update,
    float64,
    joined,
    run_script,
    stopped_after,
)
from tests.support import EXACT, distance

pytest.importorskip("tqdm")
# The six templates; train_grpo.py is a demonstration, with a test of its own.
SCRIPTS = sorted(
    path.stem for path in FOLDER.glob("*.py") if re.match("train_(?!grpo)|fine", path.stem)
)


@pytest.fixture(autouse=True)
def without_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def usual(model: nn.Module, losses: list[Tensor]) -> list[Tensor]:
    """Return the gradient of the usual loop: every micro-batch's mean, divided by their number."""
    parts = [gradients(model, loss / len(losses)) for loss in losses]
    return [torch.stack(part).sum(0) for part in zip(*parts, strict=True)]


def test_they_are_complete_programs() -> None:
    assert SCRIPTS == [
        "finetune_lora",
        "train_classifier",
        "train_clip",
        "train_ddp",
        "train_gan",
        "train_lm",
    ]
    for name in SCRIPTS:
        source = (FOLDER / f"{name}.py").read_text()
        assert 60 <= len(source.splitlines()) <= 120, name
        for part in ("--resume", "argparse", "evaluate" if name != "train_gan" else "no_grad"):
            assert part in source, (name, part)
        assert f"[{name}.py]({name}.py)" in (FOLDER / "README.md").read_text()


def test_classifier(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    # The epoch is one window, which is short, and its last micro-batch is smaller.
    arguments = ["--steps", "100", "--save", str(tmp_path / "c.pt")]
    run = first_update("train_classifier", *arguments)
    micros = run.batches
    assert len(micros) == 90
    assert len(micros[-1][1]) == 13

    def loss(model: nn.Module) -> Tensor:
        x, y = joined(micros)
        return F.cross_entropy(model(x), y)

    with float64():
        model = run.names["make_model"]()
        [update] = run.updates
        assert max(update.errors(model, loss, clip_norm=1.0)) <= EXACT
        right = gradients(model, loss(model))
        wrong = usual(model, [F.cross_entropy(model(x), y) for x, y in micros])
    assert distance(wrong, right) > 1e-3


def test_lm(tmp_path: Path) -> None:
    arguments = ["--batch-size", "30", "--micro-batch", "7", "--save", str(tmp_path / "lm.pt")]
    run = first_update("train_lm", *arguments)
    batch = run.batches[0]

    def mean(model: nn.Module, first: int = 0, last: int | None = None) -> Tensor:
        logits = model(batch["inputs"][first:last]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"][first:last].flatten())

    with float64():
        model = run.names["GPT"]()
        [update] = run.updates
        assert max(update.errors(model, mean, clip_norm=1.0)) <= EXACT
        wrong = usual(model, [mean(model, first, first + 7) for first in range(0, 30, 7)])
        assert distance(wrong, gradients(model, mean(model))) > 0.1


@contextmanager
def without_float32() -> Iterator[None]:
    """Let Llama's norms and loss, which ask for float32, compute in float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def test_lora(tmp_path: Path) -> None:
    """Its first step has the rate 0, so only the gradient says something."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    arguments = ["--micro-batch", "6", "--steps", "4", "--out", str(tmp_path / "lora")]
    with without_float32():
        run = first_update("finetune_lora", *arguments)
    micros = run.batches[:4]
    tokens = [(micro["labels"][:, 1:] != -100).sum() for micro in micros]

    def total(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=micro["input_ids"]).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, micro["labels"][:, 1:].flatten(), reduction="sum")

    def loss(model: nn.Module) -> Tensor:
        return torch.stack([total(model, micro) for micro in micros]).sum() / sum(tokens)

    with float64(), without_float32():
        torch.manual_seed(0)  # the frozen weights
        options = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
        lora = peft.LoraConfig(**options, task_type="CAUSAL_LM")
        model = peft.get_peft_model(run.names["tiny_llama"](), lora)
        [update] = run.updates
        assert update.errors(model, loss, clip_norm=1.0)[0] <= EXACT
        means = [total(model, micro) / n for micro, n in zip(micros, tokens, strict=True)]
        assert distance(usual(model, means), gradients(model, loss(model))) > 1e-3


def test_gan(tmp_path: Path) -> None:
    arguments = ["--steps", "90", "--save", str(tmp_path / "gan.pt")]
    run = first_update("train_gan", *arguments, optimizers=2)
    real = torch.cat(run.batches)
    assert len(real) == 2500
    assert len(run.batches[-1]) == 4
    generator, discriminator = run.updates
    assert [value.shape[1] for value in (generator.before[0], discriminator.before[0])] == [8, 2]

    def network(update: Any) -> nn.Module:
        hidden = update.before[2].shape[0]
        inputs, outputs = update.before[0].shape[1], update.before[4].shape[0]
        layers = nn.Linear(inputs, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden)
        drawn = nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Linear(hidden, outputs))
        for parameter, value in zip(drawn.parameters(), update.before, strict=True):
            parameter.data.copy_(value)
        return drawn

    noise: list[Tensor] = []
    draw = torch.randn

    def recorded(*sizes: Any, **options: Any) -> Tensor:
        drawn = draw(*sizes, **options)
        if sizes[1:] == (8,):
            noise.append(drawn.clone())
        return drawn

    with float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", recorded)
        with stopped_after(2):  # the same numbers again, for the noise
            run_script("train_gan", *arguments)
        patch.undo()
        make, judge = network(generator), network(discriminator)
        fixed = network(discriminator).requires_grad_(False)
        fake = make(torch.cat(noise)).detach()

        def judged(model: nn.Module) -> Tensor:
            return (F.softplus(-model(real)) + F.softplus(model(fake))).mean()

        def fooled(model: nn.Module) -> Tensor:
            return F.softplus(-fixed(model(torch.cat(noise)))).mean()

        assert max(generator.errors(make, fooled)) <= EXACT
        assert max(discriminator.errors(judge, judged)) <= EXACT
        # The usual loop leaves the generator's gradient in the discriminator.
        judge, make = network(discriminator), network(generator)
        leaked = F.softplus(-judge(make(torch.cat(noise)))).mean()
        right = gradients(judge, judged(judge))
        assert distance(gradients(judge, judged(judge) + leaked), right) > 0.5


def test_clip(tmp_path: Path) -> None:
    arguments = ["--batch-size", "50", "--micro-batch", "8", "--save", str(tmp_path / "clip.pt")]
    run = first_update("train_clip", *arguments)
    images, texts = run.batches[0]

    def mean(model: Any, which: slice = slice(None)) -> Tensor:
        image, text = (F.normalize(z, dim=-1) for z in model.encode(images[which], texts[which]))
        logits = model.log_scale.exp() * image @ text.T
        target = torch.arange(len(logits))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    with float64():
        model = run.names["Clip"]()
        [update] = run.updates
        assert max(update.errors(model, mean, clip_norm=1.0)) <= EXACT
        pieces = [mean(model, slice(first, first + 8)) for first in range(0, 50, 8)]
        assert distance(usual(model, pieces), gradients(model, mean(model))) > 0.1


@pytest.mark.distributed
def test_ddp() -> None:
    printed = torchrun(Path(__file__).with_name("ddp_worker.py"), 2).stdout
    printed_errors = re.findall(r"gradient (\S+) update (\S+) usual (\S+)", printed)
    assert len(printed_errors) == 1, printed
    gradient, update, wrong = map(float, printed_errors[0])
    assert gradient <= EXACT
    assert update <= EXACT
    assert wrong > 0.01


def test_ddp_alone_says_how_to_start_it() -> None:
    with pytest.raises(SystemExit, match="run me with torchrun: torchrun --standalone"):
        run_script("train_ddp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "steps", "epoch"),
    [
        # Steps of optimizers: the stop is in the middle of the second epoch, after a checkpoint.
        ("train_classifier", ["--save-every", "10", "--micro-batch", "32"], 17, 12),
        ("train_lm", ["--batch-size", "35", "--micro-batch", "20"], 4, 3),
        ("train_gan", ["--micro-batch", "250", "--steps", "3"], 12, 4),
        ("train_clip", ["--batch-size", "35", "--micro-batch", "20"], 4, 3),
    ],
)
def test_a_resumed_run_goes_on(
    name: str,
    arguments: list[str],
    steps: int,
    epoch: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name in ("train_lm", "train_clip"):
        make = DataLoader.__init__

        def of_the_first_hundred(loader: Any, data: Any, *given: Any, **options: Any) -> None:
            make(loader, Subset(data, range(min(100, len(data)))), *given, **options)

        monkeypatch.setattr(DataLoader, "__init__", of_the_first_hundred)
        # The first pickled tensor gives torch.Tensor a name more, of which train_lm.py reads the
        # docstring: a run of its own reads them before that.
        pickle.dumps(torch.ones(1))
    stopped = tmp_path / "stopped.pt"
    assert steps > epoch * (2 if name == "train_gan" else 1)
    arguments = [*arguments, "--epochs", "2"]
    run_script(name, *arguments, "--save", str(tmp_path / "whole.pt"))
    with stopped_after(steps):
        run_script(name, *arguments, "--save", str(stopped))
    with pytest.raises(SystemExit):  # the saved schedule ends after two epochs
        run_script(name, *arguments, "--epochs", "3", "--save", str(stopped), "--resume")
    assert ": a run of" in capsys.readouterr().err
    run_script(name, *arguments, "--save", str(stopped), "--resume")
    whole, resumed = (
        torch.load(tmp_path / f"{which}.pt", weights_only=True) for which in ("whole", "stopped")
    )
    for part in whole.keys() & {"model", "ema", "generator", "discriminator"}:
        for key, value in whole[part].items():
            assert torch.equal(value, resumed[part][key]), (part, key)


@pytest.mark.distributed
@pytest.mark.slow
def test_ddp_runs_and_resumes(tmp_path: Path) -> None:
    script = FOLDER / "train_ddp.py"
    options = ["--save", str(tmp_path / "ddp.pt"), "--micro-batch", "32", "--epochs", "2"]
    stopping = tmp_path / "stopping.py"
    stopping.write_text(
        "import runpy\n"
        "from tests.examples.first_update import stopped_after\n"
        "with stopped_after(6):\n"
        f"    runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    assert "epoch 1:" in torchrun(stopping, 2, *options).stdout
    other = torchrun(script, 2, *options[:-1], "3", "--resume", check=False)
    assert ": a run of" in other.stderr
    resumed = torchrun(script, 2, *options, "--resume").stdout
    assert "epoch 1:" not in resumed
    assert re.search(r"epoch 2: loss [\d.]+, test accuracy", resumed)
