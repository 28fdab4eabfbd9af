"""What `--fix` writes trains right: the update is that of the whole batch, to 1e-12 in float64."""

from __future__ import annotations

import contextlib
import importlib
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wholebatch.lint.command_line import main
from wholebatch.lint.fix import fix_text
from wholebatch.lint.lint_settings import Settings

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*/bad_*.py"))
MICRO, ACCUM = 4, 3


class Scaler:
    """GradScaler's contract on the CPU: scale, unscale once, step, update."""

    def __init__(self) -> None:
        self.factor = 1024.0
        self.unscaled = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        assert not self.unscaled, "unscale_() twice in one window"
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= self.factor
        self.unscaled = True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.unscaled:
            self.unscale_(optimizer)
        optimizer.step()

    def update(self) -> None:
        self.factor *= 2.0
        self.unscaled = False


class Accelerator:
    """Accelerate's contract: divide every loss, step and clear at the end of a window."""

    def __init__(self, gradient_accumulation_steps: int) -> None:
        self.steps = gradient_accumulation_steps
        self.count = 0

    def accumulate(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        self.count += 1
        return contextlib.nullcontext()

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.steps

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.steps).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.count % self.steps == 0:
            optimizer.step()
            optimizer.zero_grad()


# Each kind of fix, on loops that are written differently.
LOOPS = {
    "WB101": (
        """
                for i, (x, y) in enumerate(batches):
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    if (i + 1) % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """
                seen = 0
                for x, y in batches:
                    out = model(x)
                    loss = F.cross_entropy(out, y)
                    seen += 1
                    loss.backward()
                    if not seen % accum:
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)
        """,
        """
                def train(model, optimizer, loader, accum_steps):
                    for step, (x, y) in enumerate(loader, start=1):
                        loss = F.cross_entropy(model(x), y)
                        loss.backward()
                        if step % accum_steps != 0:
                            continue
                        optimizer.step()
                        optimizer.zero_grad()
                train(model, optimizer, batches, accum)
        """,
    ),
    "WB102": (
        """
                accelerator = Accelerator(gradient_accumulation_steps=accum)
                for x, y in batches:
                    with accelerator.accumulate(model):
                        loss = F.cross_entropy(model(x), y)
                        accelerator.backward(loss / accum)
                        accelerator.step(optimizer)
        """,
        """
                accelerator = Accelerator(gradient_accumulation_steps=accum)
                for x, y in batches:
                    with accelerator.accumulate(model):
                        accelerator.backward(F.cross_entropy(model(x), y) / accum)
                        accelerator.step(optimizer)
        """,
        """
                accelerator = Accelerator(gradient_accumulation_steps=accum)
                for x, y in batches:
                    with accelerator.accumulate(model):
                        out = {"loss": F.cross_entropy(model(x), y)}
                        accelerator.backward(out["loss"] / accelerator.gradient_accumulation_steps)
                        accelerator.step(optimizer)
        """,
    ),
    "WB104": (
        # Gradients of an earlier use, and micro-batches that the end of an epoch leaves over.
        """
                net(batches[0]).backward()
                for epoch in (batches[: accum + 1], batches[accum:]):
                    for i, (x, y) in enumerate(epoch):
                        optimizer.zero_grad()
                        loss = F.cross_entropy(model(x), y) / accum
                        loss.backward()
                        if (i + 1) % accum == 0:
                            optimizer.step()
        """,
        """
                for i, (x, y) in enumerate(batches):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y) / accum
                    loss.backward()
                    if (i + 1) % accum == 0:
                        optimizer.step()
        """,
        """
                for i, (x, y) in enumerate(batches):
                    model.zero_grad()
                    (F.cross_entropy(model(x), y) / accum).backward()
                    if (i + 1) % accum == 0:
                        optimizer.step()
                        model.zero_grad()
        """,
        """
                for i, (x, y) in enumerate(batches):
                    optimizer.zero_grad()
                    scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
                    if (i + 1) % accum == 0:
                        scaler.step(optimizer)
                        scaler.update()
        """,
    ),
    "WB105": (
        """
                for i, (x, y) in enumerate(batches):
                    (F.cross_entropy(model(x), y) / accum).backward()
                    # One limit for the whole window.
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    if (i + 1) % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """
                for i, (x, y) in enumerate(batches):
                    loss = F.cross_entropy(model(x), y)
                    loss = loss / accum
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    if (i + 1) % accum != 0:
                        continue
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        """
                def update(model, optimizer, loader, accum_steps):
                    for n, (x, y) in enumerate(loader):
                        loss = F.cross_entropy(model(x), y).div(accum_steps)
                        loss.backward()
                        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.05)
                        last = (n + 1) % accum_steps == 0
                        if last:
                            optimizer.step()
                            optimizer.zero_grad()
                update(model, optimizer, batches, accum)
        """,
    ),
    "WB106": (
        """
                for i, (x, y) in enumerate(batches):
                    scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
                    if (i + 1) % accum == 0:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
        """,
        """
                for start in range(0, len(batches), accum):
                    for x, y in batches[start : start + accum]:
                        scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
        """
                for i, (x, y) in enumerate(batches):
                    scaled = scaler.scale(F.cross_entropy(model(x), y) / accum)
                    scaled.backward()
                    if (i + 1) % accum:
                        continue
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
    ),
    "WB107": (
        """
                for i, (x, y) in enumerate(batches):
                    (F.cross_entropy(model(x), y) / accum).backward()
                    if (i + 1) % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    scheduler.step()
        """,
        """
                for i, (x, y) in enumerate(batches):
                    (F.cross_entropy(model(x), y) / accum).backward()
                    scheduler.step()
                    if i % accum == accum - 1:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """
                count = 0
                for x, y in batches:
                    (F.cross_entropy(model(x), y) / accum).backward()
                    count += 1
                    if count == accum:
                        optimizer.step()
                        optimizer.zero_grad()
                        count = 0
                    scheduler.step()
        """,
    ),
    "WB108": (
        """
                for i, (x, y) in enumerate(batches):
                    scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
                    if (i + 1) % accum == 0:
                        scaler.step(optimizer)
                        optimizer.zero_grad()
                    scaler.update()
        """,
        """
                for i, (x, y) in enumerate(batches):
                    loss = F.cross_entropy(model(x), y) / accum
                    scaler.scale(loss).backward()
                    last = (i + 1) % accum == 0
                    if last:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                        scaler.step(optimizer)
                        optimizer.zero_grad()
                    scaler.update()
        """,
        """
                for n, (x, y) in enumerate(batches, 1):
                    scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
                    if not n % accum:
                        scaler.step(optimizer)
                        optimizer.zero_grad()
                    scaler.update()
        """,
    ),
    "WB110": (
        """
                for i, (x, y) in enumerate(batches):
                    (F.cross_entropy(model(x), y) / accum).backward()
                    if i % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """
                for step, (x, y) in enumerate(batches):
                    scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
                    if step % accum == 0:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
        """,
        """
                def finetune(model, optimizer, loader, accum_steps):
                    for step, batch in enumerate(loader):
                        x, y = batch
                        loss = F.cross_entropy(model(x), y) / accum_steps
                        loss.backward()
                        if step % accum_steps == 0:
                            optimizer.step()
                            scheduler.step()
                            model.zero_grad()
                finetune(model, optimizer, batches, accum)
        """,
    ),
    "WB117": (
        """
                for i, (x, y) in enumerate(batches):
                    (F.cross_entropy(model(x), y) / accum).backward()
                    if (i + 1) % accum == 0:
                        optimizer.zero_grad()
                        optimizer.step()
        """,
        """
                for start in range(0, len(batches), accum):
                    for micro in batches[start : start + accum]:
                        (F.cross_entropy(model(micro[0]), micro[1]) / accum).backward()
                    optimizer.zero_grad()
                    optimizer.step()
        """,
        """
                for i, (x, y) in enumerate(batches):
                    scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
                    if (i + 1) % accum == 0:
                        optimizer.zero_grad()
                        scaler.step(optimizer)
                        scaler.update()
        """,
    ),
}
CASES = [(code, at) for code, written in LOOPS.items() for at in range(len(written))]


def _setup() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    batches = [
        (torch.randn(MICRO, 5, dtype=torch.float64), torch.randint(3, (MICRO,)))
        for _ in range(2 * ACCUM)
    ]
    return model, batches


def _trained(source: str) -> torch.Tensor:
    model, batches = _setup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    names = {"model": model, "batches": batches, "optimizer": optimizer, "accum": ACCUM}
    names["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    names |= {"scaler": Scaler(), "Accelerator": Accelerator}
    # A model of another file that returns its loss: the linter cannot know that it is a mean.
    names["net"] = lambda batch: F.cross_entropy(model(batch[0]), batch[1])
    names["amp"] = SimpleNamespace(
        scale_loss=lambda loss, _: contextlib.nullcontext(loss),
        master_params=lambda given: [p for g in given.param_groups for p in g["params"]],
    )
    exec(source, {**names, "F": F, "nn": nn, "torch": torch})
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _whole(*, clip: bool, schedule: bool) -> torch.Tensor:
    model, batches = _setup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for start in range(0, len(batches), ACCUM):
        window = batches[start : start + ACCUM]
        x = torch.cat([b[0] for b in window])
        y = torch.cat([b[1] for b in window])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if schedule:
            scheduler.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _distance(got: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(got - right) / torch.linalg.vector_norm(right))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # The mistake itself.
@pytest.mark.parametrize(("code", "at"), CASES)
def test_fixed_loop_makes_the_update_of_the_whole_batch(code: str, at: int) -> None:
    source = textwrap.dedent(LOOPS[code][at])
    fixed, count = fix_text(source, Settings(select=(code,)), unsafe=code == "WB107")
    assert count == 1
    right = _whole(clip="clip" in source, schedule="scheduler" in source)
    assert _distance(_trained(source), right) > 1e-6
    assert _distance(_trained(fixed), right) <= 1e-12


# The forms of the labelled public loops that `--fix` mends, in our own words. Each name tells where
# the form is from; `benchmarks/lint_fixes.py` counts the findings of each form.
PUBLIC = {
    # lucidrains: reformer, PaLM, performer, MEGABYTE, titans, routing, local-attention and others.
    "WB101 inner loop, a model that returns its loss": """
        loader = iter(batches)
        for i in range(2):
            for __ in range(accum):
                loss = net(next(loader))
                loss.backward()
            print(f"training loss: {loss.item()}")
            optimizer.step()
            optimizer.zero_grad()
    """,
    # nanoChatGPT, MARS, mini-nanoGPT.
    "WB101 inner loop with a scaler": """
        class Trainer:
            def __init__(self, gradient_accumulation_steps):
                self.gradient_accumulation_steps = gradient_accumulation_steps

            def fit(self, loader):
                batch = next(loader)
                for step in range(2):
                    for micro_step in range(self.gradient_accumulation_steps):
                        loss = net(batch)
                        batch = next(loader, None)
                        scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad(set_to_none=True)
        Trainer(accum).fit(iter(batches))
    """,
    # naacl_transfer_learning_tutorial, twice.
    "WB105 clip after the backward of an engine's step": """
        def update(step, batch, args):
            x, y = batch
            loss = F.cross_entropy(model(x), y)
            loss = loss / args.accumulation
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if step % args.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()
        class Settings:
            accumulation = accum
        for step, batch in enumerate(batches, start=1):
            update(step, batch, Settings)
    """,
    # ATLOP, RE_improved_baseline, DeepKE, KD-DocRE, BERT-Relation-Extraction, FARM.
    "WB110 the first window has one micro-batch": """
        num_steps = 0
        optimizer.zero_grad()
        for step, batch in enumerate(batches):
            loss = net(batch)
            loss = loss / accum
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            if step % accum == 0:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.05)
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
    """,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_forms_of_public_loops_are_mended_exactly(name: str) -> None:
    source = textwrap.dedent(PUBLIC[name])
    fixed, count = fix_text(source, Settings(select=(name[:5],)), unsafe=True)
    assert count == 1
    right = _whole(clip="clip" in source, schedule=False)
    assert _distance(_trained(source), right) > 1e-6
    assert _distance(_trained(fixed), right) <= 1e-12


# Loops with two mistakes: mending one of them alone would do harm.
TANGLED = {
    "cleared and not divided": """
        for i, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
    """,
    "two conditions of one boundary": """
        for i, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / accum).backward()
            if i % accum == 0:
                optimizer.step()
            if i % accum == 0:
                optimizer.zero_grad()
    """,
    "a boundary off by one and a loss of unknown reduction": """
        criterion = nn.CrossEntropyLoss(reduction="sum")
        for i, (x, y) in enumerate(batches):
            criterion(model(x), y).backward()
            if i % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "a scaler that may not be there": """
        scaler = None
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y) / accum
            (scaler.scale(loss) if scaler else loss).backward()
            if (i + 1) % accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                if scaler:
                    scaler.step(optimizer)
                else:
                    optimizer.step()
                optimizer.zero_grad()
    """,
    "a divided loss that is logged": """
        accelerator = Accelerator(gradient_accumulation_steps=accum)
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y) / accum
                accelerator.backward(loss)
                accelerator.step(optimizer)
            print(loss.item() * accum)
    """,
}


@pytest.mark.parametrize("name", TANGLED)
def test_a_fix_that_would_do_harm_alone_is_not_made(name: str) -> None:
    source = textwrap.dedent(TANGLED[name])
    fixed, count = fix_text(source, Settings())
    before = _distance(_trained(source), _whole(clip=False, schedule=False))
    after = _distance(_trained(fixed), _whole(clip=False, schedule=False))
    assert (count, fixed) == (0, source) or after <= min(before, 1e-12)


def test_an_unsafe_fix_needs_to_be_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    source = textwrap.dedent(LOOPS["WB107"][0])
    file.write_text(source)
    main([str(file), "--fix"])
    assert file.read_text() == source
    main([str(file), "--fix", "--unsafe-fixes"])
    assert file.read_text() != source


def test_clearing_in_a_helper_is_not_moved_safely() -> None:
    loop = """
        def update(i, x, y):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / accum).backward()
            if (i + 1) % accum == 0:
                optimizer.step()
        for i, (x, y) in enumerate(batches):
            update(i, x, y)
    """
    source, settings = textwrap.dedent(loop), Settings(select=("WB104",))
    assert fix_text(source, settings) == (source, 0)  # It may have other callers.
    fixed, count = fix_text(source, settings, unsafe=True)
    assert count == 1
    assert _distance(_trained(fixed), _whole(clip=False, schedule=False)) <= 1e-12


def test_a_diff_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    source = textwrap.dedent(LOOPS["WB110"][0])
    file.write_text(source)
    assert main([str(file), "--diff"]) == 1
    assert "+    if (i + 1) % accum == 0:" in capsys.readouterr().out
    assert file.read_text() == source
    assert main([str(file), "--diff", "--exit-zero"]) == 0


@pytest.mark.parametrize(("code", "at"), CASES)
def test_fix_is_idempotent_and_keeps_the_rest(code: str, at: int) -> None:
    source = "# kept  comment\n" + textwrap.dedent(LOOPS[code][at])
    fixed, _ = fix_text(source, Settings())
    again, count = fix_text(fixed, Settings())
    assert (again, count) == (fixed, 0)
    assert fixed.startswith("# kept  comment\n")


@pytest.mark.parametrize("file", FIXTURES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_fixtures_stay_python_and_settle(file: Path) -> None:
    fixed, count = fix_text(file.read_text(), Settings())
    compile(fixed, str(file), "exec")
    assert fix_text(fixed, Settings()) == (fixed, 0)
    assert (fixed != file.read_text()) == (count > 0)


def test_accelerate_division_is_taken_out() -> None:
    source = textwrap.dedent("""
        accelerator = Accelerator(gradient_accumulation_steps=accum_steps)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss / accum_steps)
                optimizer.step()
                optimizer.zero_grad()
    """)
    fixed, count = fix_text(source, Settings(select=("WB102",)))
    assert count == 1
    assert fixed == source.replace("loss / accum_steps", "loss")


def test_an_uncertain_case_is_left_alone() -> None:
    source = textwrap.dedent("""
        for i, (x, y) in enumerate(batches):
            loss = criterion(model(x), y)
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
    """)
    # A criterion of unknown reduction may be a sum, which must not be divided.
    assert fix_text(source, Settings()) == (source, 0)


def test_line_endings_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    source = textwrap.dedent(LOOPS["WB110"][0]).replace("\n", "\r\n")
    file.write_bytes(source.encode())
    main([str(file), "--fix"])
    written = file.read_bytes().decode()
    assert "(i + 1) % accum" in written
    assert "\n" not in written.replace("\r\n", "")


def test_encoding_is_kept(tmp_path: Path) -> None:
    """A file in latin-1 says so in its first line: UTF-8 under that line would be other text."""
    script = tmp_path / "train.py"
    head = "# -*- coding: latin-1 -*-\n# größer\n"
    script.write_bytes((head + textwrap.dedent(LOOPS["WB110"][0])).encode("latin-1"))
    main([str(script), "--fix", "--select", "WB110"])
    fixed = script.read_bytes().decode("latin-1")
    assert fixed.startswith(head)
    assert "(i + 1) %" in fixed


def test_a_loop_in_miniature_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    run_at = importlib.import_module("lint_fixes").run_at
    loop = textwrap.dedent(LOOPS["WB110"][0])
    fixed, _ = fix_text(loop, Settings(), unsafe=True)
    line = 2 + loop[: loop.index("backward")].count("\n") - 1
    assert run_at(line, fixed) == "exact"
    assert run_at(line, loop).endswith("off")
    assert run_at(line, loop.replace("backward()", "item()")).startswith("not run")
