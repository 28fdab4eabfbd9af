"""Each optimizer has its own window, and a condition is read by what it evaluates to over a run."""

from __future__ import annotations

import textwrap

from wholebatch.lint import Settings, lint_source
from wholebatch.lint.model import read

RULES_ONLY = Settings(select=("WB1",))


def codes(source: str) -> list[str]:
    return sorted({f.code for f in lint_source(textwrap.dedent(source), settings=RULES_ONLY)})


def test_two_optimizers_that_both_step_always_accumulate_nothing() -> None:
    source = """
        def train(G, D, g_opt, d_opt, loader):
            for x in loader:
                g_opt.zero_grad()
                G(x).mean().backward()
                g_opt.step()
                d_opt.zero_grad()
                D(x).mean().backward()
                d_opt.step()
    """
    assert read(textwrap.dedent(source)).accumulating == []


def test_a_number_of_steps_that_the_loop_changes_ends_windows() -> None:
    source = """
        def train(model, optimizer, loader, every):
            for i, x in enumerate(loader):
                model(x).mean().backward()
                if i % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                every = max(1, i // 32)
    """
    assert "WB110" in codes(source)


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
