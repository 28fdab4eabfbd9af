"""What the set AG taught: losses, schedules and options that are made elsewhere."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from wholebatch.lint import lint_paths, lint_source


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source))}


def codes_of(folder: Path, **modules: str) -> set[str]:
    """Write modules into a folder and return the codes that are found in `train.py`."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return {f.code for f in lint_paths([str(folder / "train.py")])}


@pytest.mark.parametrize(
    ("length", "found"), [("num_training_steps", True), ("num_training_steps // accum", False)]
)
def test_a_function_returns_optimizer_and_schedule(length: str, found: bool) -> None:
    source = f"""
        def setup(model, accum, num_training_steps):
            length = {length}

            def rate(step):
                return 1 - step / length

            optimizer = torch.optim.AdamW(model.parameters())
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
            return optimizer, scheduler

        def train(model, loader, K, epochs):
            num_training_steps = len(loader) * epochs
            optimizer, scheduler = setup(model, K, num_training_steps)
            for epoch in range(epochs):
                for i, x in enumerate(loader):
                    (model(x).mean() / K).backward()
                    if (i + 1) % K == 0 or i + 1 == len(loader):
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
    """
    if found:
        source = source.replace("accum, num", "k, num")
    assert ("WB116" in codes(source)) is found


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("mode = getattr(config, 'compile_mode', 'reduce-overhead')", True),
        ("mode = config.get('compile_mode', 'max-autotune')", True),
        ("mode = getattr(config, 'compile_mode', 'default')", False),
    ],
)
def test_a_compile_mode_that_is_the_default_of_an_option(option: str, found: bool) -> None:
    reported = codes(f"""
        def train(model, optimizer, loader, config):
            {option}
            model.compile(mode=mode)
            for i, batch in enumerate(loader):
                (model(batch).mean() / config.accum).backward()
                if (i + 1) % config.accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """)
    assert ("WB120" in reported) is found


@pytest.mark.parametrize("where", ["forward", "apart"])
def test_a_mask_of_the_diagonal_counts_beside_the_loss_only(tmp_path: Path, where: str) -> None:
    train = """
        from language import Model

        def train(optimizer, loader, accum):
            model = Model()
            for i, (x, y) in enumerate(loader):
                loss = model(x, y) / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    language = f"""
        class Model(nn.Module):
            def forward(self, x, y):
                logits = self.head(self.body(x))
                return F.cross_entropy(logits, y)

            def {where}(self, y):
                similarity = torch.matmul(self.neurons, self.neurons.T)
                off = ~torch.eye(similarity.size(0), dtype=torch.bool)
                return LOSS
    """
    loss = "F.cross_entropy(similarity[off], y)" if where == "forward" else "similarity[off].mean()"
    found = codes_of(tmp_path, train=train, language=language.replace("LOSS", loss))
    assert ("WB114" in found) is (where == "forward")


@pytest.mark.parametrize("labels", ["torch.randint(0, 99, (2, 64))", "next(batches)"])
def test_random_labels_leave_nothing_out(tmp_path: Path, labels: str) -> None:
    train = f"""
        from losses import distill_loss

        def train(model, optimizer, batches, accum, steps):
            for step in range(steps):
                for _ in range(accum):
                    targets = {labels}
                    loss = distill_loss(model(next(batches)), targets) / accum
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    losses = """
        IGNORE = -100

        def distill_loss(logits, targets):
            return F.cross_entropy(logits, targets, ignore_index=IGNORE)
    """
    found = codes_of(tmp_path, train=train, losses=losses)
    assert ("WB103" in found) is ("randint" not in labels)


TRAINER = """
    class Trainer:
        def training_step(self, batch):
            loss, metrics = self.model.losses(batch)
            SLOT
            (loss / self.accum).backward()
            return metrics

        def train(self):
            for i, batch in enumerate(self.loader):
                metrics = self.training_step(batch)
                self.tracker.update(metrics)
                if (i + 1) % self.accum == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    LOG

        def show(self, values, step):
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
"""


@pytest.mark.parametrize(
    ("slot", "log", "found"),
    [
        ("metrics['loss'] = loss.item()", "self.show(metrics, i)", True),
        ("metrics['rate'] = self.optimizer.rate", "self.show(metrics, i)", False),
        ("metrics['loss'] = loss.item()", "self.show(self.tracker.averages(), i)", False),
        ("pass", "loss_value = metrics['loss'].item(); print(loss_value)", True),
        ("pass", "accuracy = metrics['accuracy'].item(); print(accuracy)", False),
    ],
)
def test_metrics_that_a_helper_returns_are_of_one_micro_batch(
    slot: str, log: str, found: bool
) -> None:
    assert ("WB115" in codes(TRAINER.replace("SLOT", slot).replace("LOG", log))) is found


@pytest.mark.parametrize(
    ("picked", "found"), [("x[loss_mask]", True), ("x[:, -1]", False), ("x", False)]
)
def test_a_forward_that_selects_by_a_mask(tmp_path: Path, picked: str, found: bool) -> None:
    train = """
        from chess import Player

        class Trainer:
            def __init__(self, optimizer, loader, accum):
                self._model = Player()
                self.optimizer, self.loader, self.accum = optimizer, loader, accum

            def eager(self) -> Player:
                return self._model

            def train(self):
                for i, (x, mask, y) in enumerate(self.loader):
                    model = self.eager()
                    loss, metrics = model.forward_train(x, mask, y)
                    (loss / self.accum).backward()
                    if (i + 1) % self.accum == 0:
                        self.optimizer.step()
                        self.optimizer.zero_grad()
    """
    chess = f"""
        class Player(nn.Module):
            def forward_train(self, x, loss_mask, targets):
                picked = {picked}
                logits = self.head(picked)
                wanted = {picked.replace("x", "targets", 1)}
                loss = F.cross_entropy(logits, wanted)
                return loss, {{"loss": loss.detach()}}
    """
    assert ("WB103" in codes_of(tmp_path, train=train, chess=chess)) is found


@pytest.mark.parametrize(
    ("divisor", "after", "found"),
    [
        ("accum", "optimizer.step()", True),
        ("accum", "pass", False),
        ("accum", "model(next(batches)).mean().backward(); optimizer.step()", False),
        ("min(accum, steps - i)", "optimizer.step()", False),
    ],
)
def test_a_step_after_a_loop_shows_that_it_ends(divisor: str, after: str, found: bool) -> None:
    reported = codes(f"""
        def train(model, optimizer, batches, steps, accum):
            count = 0
            for i in range(steps):
                (model(next(batches)).mean() / {divisor}).backward()
                count += 1
                if count % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if count % accum != 0:
                {after}
    """)
    assert ("WB109" in reported) is found


def test_random_labels_elsewhere_do_not_hide_a_mask_of_this_file() -> None:
    reported = codes("""
        def pictures():
            labels = torch.randint(0, 5, (32,))
            return labels

        def texts(ids, kept):
            return ids.masked_fill(torch.arange(24) >= kept, -1)

        def train(model, optimizer, loader, accum):
            for i, (x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x), y, ignore_index=-1) / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """)
    assert "WB103" in reported
