"""The shapes of loop that people write are understood, and others are left alone."""

from __future__ import annotations

import textwrap

import pytest

from wholebatch.lint import Settings, lint_source
from wholebatch.lint.normalise.syntax import shown
from wholebatch.lint.windows import read

RULES_ONLY = Settings(select=("WB1",))


def codes(source: str) -> list[str]:
    return [f.code for f in lint_source(textwrap.dedent(source), settings=RULES_ONLY)]


def windows(source: str) -> list[tuple[str, str]]:
    return [(w.shape, shown(w.every)) for w in read(textwrap.dedent(source)).windows]


BODY = """
    def train(model, optimizer, loader, args, cfg):
        {before}
        for {target} in {iterable}:
            {top}
            loss = model(batch).mean() / {count}
            loss.backward()
            {middle}
            if {condition}:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "parts",
    [
        {"condition": "not (i + 1) % args.accum"},
        {"condition": "(i + 1) % max(1, args.accum) == 0"},
        {"condition": "not waiting", "middle": "waiting = (i + 1) % args.accum != 0"},
        {"condition": "args.go and (i + 1) % args.accum == 0"},
        {
            "condition": "n % args.accum == 0",
            "before": "n = 0",
            "target": "batch",
            "iterable": "loader",
            "top": "n += 1",
        },
        {
            "condition": "n == args.accum",
            "before": "n = 0",
            "target": "batch",
            "iterable": "loader",
            "middle": "n = n + 1",
        },
    ],
    ids=lambda p: p["condition"],
)
def test_boundaries_that_are_right(parts: dict[str, str]) -> None:
    defaults = {
        "before": "pass",
        "target": "i, batch",
        "iterable": "enumerate(loader)",
        "top": "pass",
        "middle": "pass",
        "count": "args.accum",
    }
    source = textwrap.dedent(BODY).format(**{**defaults, **parts})
    if "n == " in parts["condition"]:
        source += "            n = 0\n"
    assert windows(source) == [("boundary", "args.accum")]
    assert "WB110" not in codes(source)
    assert "WB101" not in codes(source)


@pytest.mark.parametrize(
    "source",
    [
        # A closure for LBFGS.
        """
        for i, (x, y) in enumerate(loader):
            def closure():
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss
            optimizer.step(closure)
        """,
        # Meta-learning over tasks: how tasks are weighted is a choice.
        """
        for tasks in loader:
            optimizer.zero_grad()
            for task in tasks:
                model(task).mean().backward()
            optimizer.step()
        """,
        # Reinforcement learning: backward and step under one interval.
        """
        for step in range(total):
            env.step(action)
            if step % update_every == 0:
                loss = criterion(model(memory.sample()), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        """,
        # Two optimizers on different clocks.
        """
        for i, batch in enumerate(loader):
            loss = model(batch).mean()
            loss.backward()
            fast.step_optimizer()
            opt_fast.step()
            opt_fast.zero_grad()
            if i % 10 == 0:
                opt_slow.step()
                opt_slow.zero_grad()
        """,
    ],
    ids=["closure", "tasks", "replay", "clocks"],
)
def test_what_is_not_understood_is_left_alone(source: str) -> None:
    assert codes(source) == []


# Spellings that were missed in public loops: each with the rules that it breaks.
SPELLINGS = {
    "a helper whose parameter has the name of what it is handed": (
        """
import torch.nn.functional as F
class Runner:
    def optimize(self, loss, step):
        loss.backward()
        if (step + 1) % self.accum == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
    def train(self, endless):
        for step, (x, y) in enumerate(cycle(endless)):
            loss = F.cross_entropy(self.model(x), y)
            self.optimize(loss, step)
""",
        "WB101",
    ),
    "a division on another branch than the engine's backward": (
        """
def train(self, model, endless, accum):
    for step, batch in enumerate(cycle(endless)):
        loss = self.compute_loss(model, batch)
        if accum > 1 and not self.deepspeed:
            loss = loss / accum
        if self.deepspeed:
            self.deepspeed.backward(loss)
        else:
            loss.backward()
        if (step + 1) % accum == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
""",
        "",
    ),
    "a loss that is weighed in place": (
        """
def train(model, endless, optimizer, micro_batches, size):
    for micro_batch in micro_batches:
        loss = model(micro_batch).mean()
        loss.mul_(len(micro_batch) / size)
        loss.backward()
    optimizer.step()
""",
        "",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_public_loops(name: str) -> None:
    source, codes = SPELLINGS[name]
    assert sorted({f.code for f in lint_source(source, settings=RULES_ONLY)}) == codes.split()


MASKED = """
    import torch.nn.functional as F
    class Tokens(Dataset):
        def __getitem__(self, i):
            return {labels}
    def train(model, optimizer, args):
        loader = DataLoader(Tokens())
        for step in range(args.steps):
            for x, y in take(loader, args.accum):
                loss = F.cross_entropy(model(x), y, ignore_index=-100) / args.accum
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("labels", "is_reported"), [("self.ids, [-100] * self.n", True), ("self.ids, self.ids", False)]
)
def test_an_ignored_label_counts_if_the_data_at_hand_have_it(
    labels: str, is_reported: bool
) -> None:
    assert ("WB103" in codes(MASKED.replace("{labels}", labels))) is is_reported
