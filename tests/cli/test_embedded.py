"""The embedded recipes train, and what is special about each of them holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import Ran, metrics_of, newest_checkpoint
from wholebatch.cli.recipe_files import find_recipe

Command = Callable[..., Ran]


@pytest.mark.slow
def test_bytes_gpt_learns_with_a_short_last_micro_batch(command: Command, tmp_path: Path) -> None:
    ran = command("train", "--updates", 12, "--batch-size", 22, "--micro-batch", 8, "--out", "here")
    assert ran.status == 0, ran.err
    assert "(8 × 2 + 6) × 1 rank = 22 samples" in ran.out
    assert "bytes/s" in ran.out
    losses = [record["loss"] for record in metrics_of(tmp_path / "here")]
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 256: it knows nothing yet
    assert losses[-1] < 4.2


def test_digits_cnn_makes_the_update_of_the_whole_batch_through_batchnorm(
    command: Command, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    exact = (
        find_recipe("digits-cnn")
        .read_text(encoding="utf-8")
        .replace("torch.float32", "torch.float64")
    )
    exact = exact.replace("nn.Linear(4 * 64, 10),\n    )", "nn.Linear(4 * 64, 10),\n    ).double()")
    assert exact.count("double()") == exact.count("float64") == 1
    path = tmp_path / "digits.py"
    path.write_text(exact, encoding="utf-8")
    for micro in (64, 24):  # 24, 24 and 16: uneven
        ran = command(
            "train", path, "--batch-size", 64, "--micro-batch", micro, "--updates", 2,
            "--out", f"by-{micro}", "--clip-norm", 0.5,
        )  # fmt: skip
        assert ran.status == 0, ran.err
    whole = newest_checkpoint(tmp_path / "by-64")["model"]
    split = newest_checkpoint(tmp_path / "by-24")["model"]
    assert any("running_mean" in name for name in whole)
    for name, tensor in whole.items():
        if tensor.is_floating_point():
            # Adam divides by the root of tiny second moments: single weights of the convolutions
            # before a BatchNorm lose digits, for the whole batch in another order as well.
            assert (split[name] - tensor).norm() <= 1e-9 * tensor.norm(), name
    one, other = metrics_of(tmp_path / "by-64"), metrics_of(tmp_path / "by-24")
    assert one[0]["grad_norm"] == pytest.approx(other[0]["grad_norm"], rel=1e-12)
    assert one[0]["loss"] == pytest.approx(other[0]["loss"], rel=1e-12)
