"""What plain training loops of new repositories taught: the sets AA and AB."""

from __future__ import annotations

import textwrap

import pytest

from wholebatch.lint import Settings, lint_source

RULES_ONLY = Settings(select=("WB1",))


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source), settings=RULES_ONLY)}


@pytest.mark.parametrize("length", ["len(loader) * epochs", "len(loader) // accum * epochs"])
def test_a_schedule_of_what_had_its_name_before(length: str) -> None:
    found = codes(f"""
        def train(model, optimizer, loader, accum, epochs, warm):
            scheduler = CosineAnnealingLR(optimizer, T_max={length})
            if warm:
                first = LinearLR(optimizer, total_iters=100)
                scheduler = SequentialLR(optimizer, schedulers=[first, scheduler], milestones=[100])
            for i, batch in enumerate(loader):
                (model(batch).mean() / accum).backward()
                if (i + 1) % accum == 0 or i + 1 == len(loader):
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    """)
    assert ("WB116" in found) is ("//" not in length)


def test_an_attribute_is_made_from_the_names_of_its_method() -> None:
    source = """
        class Trainer:
            def __init__(self, model, loader, optimizer, epochs, accum):
                self.model, self.loader, self.optimizer = model, loader, optimizer
                self.accum = accum
                total = LENGTH
                self.scheduler = CosineAnnealingLR(optimizer, T_max=total)

            def train(self):
                for i, batch in enumerate(self.loader):
                    (self.model(batch).mean() / self.accum).backward()
                    if (i + 1) % self.accum == 0:
                        self.optimizer.step()
                        self.scheduler.step()
                        self.optimizer.zero_grad()
    """
    assert "WB116" in codes(source.replace("LENGTH", "len(loader) * epochs"))
    assert "WB116" not in codes(source.replace("LENGTH", "len(loader) * epochs // accum"))


@pytest.mark.parametrize("index", ["mask", "~mask", "target > 0", "0", "order"])
def test_a_mean_over_selected_elements_is_a_masked_mean(index: str) -> None:
    found = codes(f"""
        def train(model, optimizer, loader, accum):
            for i, (x, target, mask, order) in enumerate(loader):
                each = F.mse_loss(model(x), target, reduction="none")
                (each[{index}].mean() / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """)
    assert ("WB103" in found) is (index in {"mask", "~mask", "target > 0"})


@pytest.mark.parametrize(("name", "found"), [("sample", False), ("chunk", True)])
def test_the_mean_of_one_sample_is_its_own(name: str, found: bool) -> None:
    source = f"""
        def train(model, optimizer, loader, accum):
            for batch in loader:
                for {name} in batch:
                    each, mask = model({name})
                    loss = (each * mask).sum() / mask.sum() / accum
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert ("WB103" in codes(source)) is found


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
