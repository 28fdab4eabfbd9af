"""`wholebatch train --memory`: what is chosen, what is said, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import EXACT, assert_same_bits, metrics_of, newest_checkpoint
from wholebatch.cli import main

WIDE = EXACT.replace("nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)", "Net()").replace(
    "def model():",
    """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 16 * 32)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.last = nn.Linear(16, 3)
    def forward(self, x):
        return self.last(self.blocks(self.first(x).view(-1, 32, 16)).mean(1))

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def model():""",
)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "wide.py"
    path.write_text(WIDE, encoding="utf-8")
    return str(path)


def test_the_micro_batch_is_chosen_and_told_in_two_lines(
    recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the update is that of the recipe's own micro-batch."""
    options = ["--updates", "2", "--memory"]
    assert main(["train", recipe, "--out", str(tmp_path / "run"), *options, "6MiB"]) == 0
    lines = capfd.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("  memory "))
    assert "(budget 6.00 MiB)" in lines[place]
    assert "predicted peak " in lines[place + 1]
    assert "× 1 rank = 10 samples an update" in lines[place - 1]
    assert main(["train", recipe, "--out", str(tmp_path / "plain"), "--updates", "2"]) == 0
    for ours, theirs in zip(
        metrics_of(tmp_path / "run"), metrics_of(tmp_path / "plain"), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["micro_batches"] != theirs["micro_batches"]


def test_a_chosen_micro_batch_is_kept_when_the_run_goes_on(recipe: str, tmp_path: Path) -> None:
    straight, half = tmp_path / "straight", tmp_path / "half"
    assert main(["train", recipe, "--out", str(straight), "--memory", "6MiB"]) == 0
    assert main(["train", recipe, "--out", str(half), "--memory", "6MiB", "--updates", "2"]) == 0
    assert main(["train", "--resume", "--out", str(half), "--updates", "4"]) == 0
    one, other = newest_checkpoint(straight), newest_checkpoint(half)
    for part in ("model", "optimizer", "data"):
        assert_same_bits(one[part], other[part], part)


def test_what_does_not_fit_is_refused_with_what_would_help(
    recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", recipe, "--out", str(out), "--memory", "1MiB"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: memory=1.00 MiB: a micro-batch of one sample does not fit; ")
    assert "shorter samples, a larger device or a sharded model; wholebatch plan tells" in said
    assert 'wb.Memory(optimizer_state="host")' in said
    assert not out.exists()


@pytest.mark.parametrize("memory", ["much", "0", "-1GiB", "1.5", "20", ""])
def test_budgets_that_mean_nothing(memory: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"--memory={memory}"]) == 2
    assert "must be a size such as 20GiB" in capfd.readouterr().err
