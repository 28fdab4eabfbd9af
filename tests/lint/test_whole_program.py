"""Values are followed through helpers, objects, dictionaries and other modules of the package."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from wholebatch.lint import Settings, lint_paths, lint_source

RULES_ONLY = Settings(select=("WB1",))


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source), settings=RULES_ONLY)}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder of modules, with the parts of a step in another module."""
    (tmp_path / "parts.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn

            class SpanLoss(nn.Module):
                def forward(self, out, mask):
                    count = torch.sum(mask)
                    return (self.token_loss(out) * mask).sum() / count

            class Summed(nn.Module):
                def forward(self, x, y):
                    return nn.CrossEntropyLoss(reduction="sum")(self.head(x), y)

            def scaled_backward(loss, accum):
                (loss / accum).backward()

            def update(optimizer, state, accum):
                optimizer.zero_grad()
                if (state["index"] + 1) % accum == 0:
                    optimizer.step()

            def whole_loop(model, optimizer, loader, accum):
                for i, x in enumerate(loader):
                    model(x).mean().backward()
                    if (i + 1) % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """)
    )
    return tmp_path


def checked(folder: Path, source: str) -> set[str]:
    (folder / "train.py").write_text(textwrap.dedent(source))
    return {f.code for f in lint_paths([str(folder / "train.py")], settings=Settings())}


def test_a_whole_loop_of_another_module_is_read_there(package: Path) -> None:
    source = """
        from parts import whole_loop
        for epoch in range(3):
            whole_loop(model, optimizer, loader, 4)
            loss.backward(); optimizer.zero_grad()
    """
    assert checked(package, source) == set()
    assert {f.code for f in lint_paths([str(package / "parts.py")])} == {"WB101", "WB109"}


def test_clearing_at_the_start_of_a_window_loses_the_tail() -> None:
    source = """
        def train(model, optimizer, loader, accum):
            for i, x in enumerate(loader):
                if i % accum == 0:
                    optimizer.zero_grad()
                (model(x).mean() / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
    """
    assert codes(source) == {"WB109"}


def test_two_optimizers_in_turn_are_no_window() -> None:
    source = """
        for step, x in enumerate(loader):
            losses = criterion(model(x))
            if step % 2 == 0:
                opt_ae.zero_grad()
                losses["ae"].backward()
                opt_ae.step()
            else:
                opt_disc.zero_grad()
                losses["disc"].backward()
                opt_disc.step()
    """
    assert codes(source) == set()


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("mask.sum() / whole", set()),  # its share of the batch's tokens
        ("0.5", {"WB101", "WB103"}),
    ],
)
def test_a_mean_that_is_weighed_by_its_tokens(weight: str, expected: set[str]) -> None:
    source = f"""
        def masked(losses, mask):
            return (losses * mask).sum() / mask.sum().clamp_min(1.0)
        for batch in loader:
            optimizer.zero_grad()
            for lo in range(0, len(batch), micro_batch_size):
                losses, mask = forward(model, batch[lo : lo + micro_batch_size])
                share = {weight}
                (masked(losses, mask) * share).backward()
            optimizer.step()
    """
    assert codes(source) == expected


def test_nothing_and_a_loss() -> None:
    """A helper that returns None and 0.0 for an empty batch still returns the loss."""
    source = """
        def loss_of(model, x):
            if x is None:
                return None, 0.0
            loss = model(x).mean()
            return loss, loss.item()
        def train(model, optimizer, batches, accum):
            for i in range(total):
                loss, shown = loss_of(model, next(batches))
                if loss is not None:
                    (loss / accum).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    print(shown)
    """
    assert codes(source) == {"WB105", "WB115"}


def test_a_flush_after_the_outer_loop() -> None:
    source = """
        def train(model, optimizer, groups, accum):
            done = 0
            for group in groups:
                for x in group:
                    (model(x).mean() / accum).backward()
                    done += 1
                    if done % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
            if done % accum != 0:
                optimizer.step()
    """
    assert codes(source) == {"WB109"}
    assert (
        codes(source.replace("if done % accum != 0:\n                optimizer.step()", ""))
        == set()
    )


@pytest.mark.parametrize("labels", ["torch.arange(x.size(0))", "y"])
def test_the_samples_of_a_batch_as_classes(labels: str) -> None:
    source = f"""
        def train(model, optimizer, batches, accum):
            for i in range(total):
                x, y = next(batches)
                rows, columns = model(x)
                labels = {labels}
                loss = nn.CrossEntropyLoss()(rows, labels)
                loss = (loss + F.cross_entropy(columns, labels)) / 2
                (loss / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert codes(source) == ({"WB114"} if "arange" in labels else set())
