"""Losses, schedules and optimizers as training scripts write them, each with a right twin."""

from __future__ import annotations

import textwrap

import pytest

from wholebatch.lint import Settings, lint_source

RULES_ONLY = Settings(select=("WB1",))


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source), settings=RULES_ONLY)}


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


def test_an_error_is_no_boundary() -> None:
    source = """
        accelerator = Accelerator(gradient_accumulation_steps=args.accum)
        for batch in loader:
            if kind == "epsilon":
                target = noise
            else:
                raise ValueError(kind)
            loss = F.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    """
    assert codes(source) == {"WB119"}


def test_a_tail_by_a_limit_is_a_tail() -> None:
    source = """
        def train(model, optimizer, loader, accum, per_epoch):
            for i, x in enumerate(loader):
                loss = model(x).mean() / accum
                loss.backward()
                if (i + 1) % accum == 0 or i >= per_epoch - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    (finding,) = lint_source(textwrap.dedent(source), settings=RULES_ONLY)
    assert finding.code == "WB109"
    assert "divided by the nominal" in finding.message


def test_a_detached_value_for_a_log_is_no_divided_loss() -> None:
    source = """
        class MyTrainer(Trainer):
            def compute_loss(self, model, inputs):
                loss = model(**inputs).loss
                self.kept += loss.detach() / self.args.gradient_accumulation_steps
                return loss
    """
    assert "WB102" not in codes(source)
    assert "WB102" in codes(source.replace("loss.detach() /", "0; loss = loss /"))


@pytest.mark.parametrize(("default", "level"), [("1", "note"), ("2", "error")])
def test_a_number_that_may_be_one_makes_notes(default: str, level: str) -> None:
    (finding,) = lint_source(
        textwrap.dedent(f"""
        accum = {default}
        if plugin is not None:
            accum = plugin.config["accum"]
        for i in range(total):
            loss = F.mse_loss(model(next(batches)), y) / accum
            loss.backward()
            if i % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
    """)
    )
    assert (finding.code, finding.level) == ("WB110", level)
