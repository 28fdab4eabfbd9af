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
    assert codes(source) == {"WB105"}


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


def test_a_counter_starts_anew_although_a_run_can_be_resumed() -> None:
    found = codes("""
        class Workspace:
            def __init__(self, model, optimizer):
                self.model, self.optimizer = model, optimizer
                self.global_step = 0

            def load(self, state):
                for key in state:
                    self.__dict__[key] = state[key]

            def run(self, loader, accum, epochs, state=None):
                if state is not None:
                    self.load(state)
                for epoch in range(epochs):
                    for batch in loader:
                        (self.model(batch).mean() / accum).backward()
                        if self.global_step % accum == 0:
                            self.optimizer.step()
                            self.optimizer.zero_grad()
                        self.global_step += 1
    """)
    assert "WB110" in found


@pytest.mark.parametrize("accum", ["gradient_accumulation_steps=k", ""])
def test_one_of_two_accelerators_is_told_its_number(accum: str) -> None:
    source = f"""
        def train(loader, model, optimizer, k):
            try:
                accelerator = Accelerator(deepspeed_plugin=plugin)
            except ImportError:
                accelerator = Accelerator({accum})
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(model(batch).mean())
                optimizer.step()
    """
    assert ("WB119" in codes(source)) is (accum != "")


@pytest.mark.parametrize(("name", "found"), [("acc_steps", True), ("words", False)])
def test_a_number_of_micro_batches_that_each_batch_decides(name: str, found: bool) -> None:
    source = f"""
        def train(model, optimizer, scaler, loader, epochs):
            for epoch in range(epochs):
                for i, (x, lengths) in enumerate(loader):
                    {name} = max(1, int(lengths.float().mean().item() / 64))
                    loss = model(x).mean() / {name}
                    scaler.scale(loss).backward()
                    if (i + 1) % {name} == 0:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
    """
    reported = codes(source)
    assert ("WB106" in reported) is found
    assert ("WB109" in reported) is found


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
