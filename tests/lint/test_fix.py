"""What `--fix` writes trains right: the update is that of the whole batch, to 1e-12 in float64."""

from __future__ import annotations

import textwrap
from pathlib import Path

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
                p.grad /= self.factor
        self.unscaled = True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.unscaled:
            self.unscale_(optimizer)
        optimizer.step()

    def update(self) -> None:
        self.factor *= 2.0
        self.unscaled = False


LOOPS = {
    "WB101": """
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "WB104": """
        for i, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
    """,
    "WB105": """
        for i, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / accum).backward()
            # One limit for the whole window.
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "WB106": """
        for i, (x, y) in enumerate(batches):
            scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
            if (i + 1) % accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    """,
    "WB108": """
        for i, (x, y) in enumerate(batches):
            scaler.scale(F.cross_entropy(model(x), y) / accum).backward()
            if (i + 1) % accum == 0:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    """,
    "WB110": """
        for i, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / accum).backward()
            if i % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "WB117": """
        for i, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / accum).backward()
            if (i + 1) % accum == 0:
                optimizer.zero_grad()
                optimizer.step()
    """,
}


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
    exec(source, {**names, "scaler": Scaler(), "F": F, "nn": nn, "torch": torch})
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _whole(*, clip: bool) -> torch.Tensor:
    model, batches = _setup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, len(batches), ACCUM):
        window = batches[start : start + ACCUM]
        x = torch.cat([b[0] for b in window])
        y = torch.cat([b[1] for b in window])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("code", LOOPS)
def test_fixed_loop_makes_the_update_of_the_whole_batch(code: str) -> None:
    source = textwrap.dedent(LOOPS[code])
    fixed, count = fix_text(source, Settings(select=(code,)))
    assert count == 1
    right = _whole(clip="clip" in source)
    wrong = _trained(source)
    assert torch.linalg.vector_norm(wrong - right) / torch.linalg.vector_norm(right) > 1e-6
    got = _trained(fixed)
    assert torch.linalg.vector_norm(got - right) / torch.linalg.vector_norm(right) <= 1e-12


@pytest.mark.parametrize("code", LOOPS)
def test_fix_is_idempotent_and_keeps_the_rest(code: str) -> None:
    source = "# kept  comment\n" + textwrap.dedent(LOOPS[code])
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
    source = textwrap.dedent(LOOPS["WB110"]).replace("\n", "\r\n")
    file.write_bytes(source.encode())
    main([str(file), "--fix"])
    written = file.read_bytes().decode()
    assert "(i + 1) % accum" in written
    assert "\n" not in written.replace("\r\n", "")


def test_encoding_is_kept(tmp_path: Path) -> None:
    """A file in latin-1 says so in its first line: UTF-8 under that line would be other text."""
    script = tmp_path / "train.py"
    head = "# -*- coding: latin-1 -*-\n# größer\n"
    script.write_bytes((head + textwrap.dedent(LOOPS["WB110"])).encode("latin-1"))
    main([str(script), "--fix", "--select", "WB110"])
    fixed = script.read_bytes().decode("latin-1")
    assert fixed.startswith(head)
    assert "(i + 1) %" in fixed
