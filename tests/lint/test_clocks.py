"""Each optimizer has its own window, and a condition is read by what it evaluates to over a run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from wholebatch.lint import lint_source
from wholebatch.lint.check_files import lint_files
from wholebatch.lint.lint_settings import Settings
from wholebatch.lint.model import read


def codes(source: str) -> list[str]:
    return sorted({f.code for f in lint_source(textwrap.dedent(source))})


TWO_OPTIMIZERS = """
    def train(G, D, g_opt, d_opt, loader, accum):
        for i, x in enumerate(loader):
            g_loss = G(x).mean(){divided}
            g_loss.backward()
            if (i + 1) % accum == 0:
                g_opt.step()
                g_opt.zero_grad()
            d_opt.zero_grad()
            d_loss = D(x).mean()
            d_loss.backward()
            d_opt.step()
        g_opt.step()
"""


@pytest.mark.parametrize(
    ("divided", "found"), [("", ["WB101"]), (" / accum", ["WB109"])], ids=["undivided", "divided"]
)
def test_each_optimizer_has_a_window_of_its_own(divided: str, found: list[str]) -> None:
    source = textwrap.dedent(TWO_OPTIMIZERS.format(divided=divided))
    windows = read(source).accumulating
    assert [[e.line for e in w.backwards] for w in windows] == [[5]]
    assert [[e.receiver_text for e in w.of("step")] for w in windows] == [["g_opt"]]
    assert codes(source) == found
    # What two optimizers share is not moved for one of them.
    assert not any(f.fix for f in lint_source(source))


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


COUNT_DOWN = """
    def train(model, optimizer, loader, accum):
        for epoch in range(3):
            left = {start}
            for x in loader:
                {top}
                loss = model(x).mean() / accum
                loss.backward()
                left -= 1
                {bottom}
"""
CLOSE = "if {0}: optimizer.step(); optimizer.zero_grad(); left = {1}"


@pytest.mark.parametrize(
    ("start", "top", "bottom", "found"),
    [
        ("accum", "pass", CLOSE.format("left == 0", "accum"), ["WB109"]),
        ("accum", "pass", CLOSE.format("not left", "accum"), ["WB109"]),
        ("accum", "pass", CLOSE.format("left <= 0", "accum"), ["WB109"]),
        ("accum - 1", "pass", CLOSE.format("left < 1", "accum"), ["WB109", "WB110"]),
        ("accum", "pass", CLOSE.format("left == 0", "accum - 1"), ["WB109", "WB110"]),
        ("0", CLOSE.format("left == 0", "accum"), "pass", ["WB109"]),
    ],
)
def test_a_counter_that_goes_down_ends_windows(
    start: str, top: str, bottom: str, found: list[str]
) -> None:
    assert codes(COUNT_DOWN.format(start=start, top=top, bottom=bottom)) == found


def test_a_counter_of_samples_ends_windows() -> None:
    source = """
        def train(model, optimizer, loader, size):
            seen = 0
            for x in loader:
                model(x).mean().backward()
                seen += len(x)
                if seen >= size:
                    optimizer.step()
                    optimizer.zero_grad()
                    seen = 0
    """
    (window,) = read(textwrap.dedent(source)).accumulating
    assert window.boundary is not None
    assert window.boundary.kind == "dynamic"
    assert codes(source) == ["WB109"]


def test_a_position_in_slices_is_a_position() -> None:
    source = """
        def train(model, optimizer, data, size, accum):
            for i in range(0, len(data), size):
                loss = model(data[i : i + size]).mean() / accum
                loss.backward()
                if (i // size + {0}) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert codes(source.format(1)) == ["WB109"]
    assert codes(source.format(0)) == ["WB109", "WB110"]


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


FLAG = """
    def train(model, optimizer, loader, accum):
        model = DistributedDataParallel(model)
        for i, x in enumerate(loader):
            model.require_backward_grad_sync = {0}
            loss = model(x).mean() / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("i == accum - 1", True),
        ("(i + 1) % accum != 0", True),
        ("(i + 1) % accum == 0", False),
        ("i % accum == accum - 1", False),
    ],
)
def test_ddp_must_reduce_at_the_end_of_each_window(flag: str, wrong: bool) -> None:
    assert ("WB111" in codes(FLAG.format(flag))) == wrong


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
    (finding,) = lint_source(textwrap.dedent(source))
    assert finding.code == "WB109"
    assert "divided by the nominal" in finding.message


SUMS = """
    def train(model, optimizer, loader, accum):
        total = 0.0
        for i, x in enumerate(loader):
            loss = model(x).mean() / accum
            loss.backward()
            total += loss.item()
            if (i + 1) % accum == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                print("loss", {0})
                total = 0.0
"""


@pytest.mark.parametrize(
    ("shown", "found"),
    [("total * accum", True), ("total / accum", True), ("total", False)],
)
def test_the_sum_of_a_window_s_divided_losses_is_its_mean(shown: str, found: bool) -> None:
    assert ("WB115" in codes(SUMS.format(shown))) == found


@pytest.mark.parametrize(
    ("index", "found"),
    [("lm.to(x.device)", True), ("torch.randperm(8)", False), ("3", False)],
)
def test_a_mask_by_any_name_selects(index: str, found: bool) -> None:
    source = f"""
        import torch.nn.functional as F
        def train(model, optimizer, loader, accum):
            for i, (x, y, lm) in enumerate(loader):
                m = {index}
                loss = F.cross_entropy(model(x)[m], y[m]) / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert ("WB103" in codes(source)) == found


def test_a_schedule_of_a_method_is_as_long_as_its_names_say() -> None:
    source = """
        class Trainer:
            def __init__(self, loader, optimizer, accum):
                self.loader, self.optimizer, self.accum = loader, optimizer, accum
                self.scheduler = self.make_schedule()
            def make_schedule(self):
                decay_steps = len(self.loader) * 3{0}
                def shape(step):
                    return 1 - step / decay_steps
                return LambdaLR(self.optimizer, shape)
            def train(self):
                for i, x in enumerate(self.loader):
                    loss = self.model(x).mean() / self.accum
                    loss.backward()
                    if (i + 1) % self.accum == 0:
                        self.optimizer.step()
                        self.scheduler.step()
                        self.optimizer.zero_grad()
    """
    assert "WB116" in codes(source.format(""))
    assert "WB116" not in codes(source.format(" // self.accum"))


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


def test_a_method_of_an_imported_accumulator_is_followed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "helpers.py").write_text(
        textwrap.dedent("""
            class Accumulator:
                def __init__(self, steps):
                    self.accumulation_steps = steps

                def scale_loss(self, loss):
                    return loss / self.accumulation_steps
        """)
    )
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            from helpers import Accumulator
            def train(model, optimizer, loader):
                grad_accumulator = Accumulator(4)
                for x in loader:
                    optimizer.zero_grad()
                    loss = grad_accumulator.scale_loss(model(x).mean())
                    loss.backward()
                    optimizer.step()
        """)
    )
    assert [f.code for f in lint_files([str(script)], Settings())] == ["WB119"]


def test_a_factory_of_several_losses_is_coupled_only_if_all_are(tmp_path: Path) -> None:
    coupled = """
class Pairs(nn.Module):
    def forward(self, a, b):
        logits = a @ b.t()
        labels = torch.arange(len(a))
        return F.cross_entropy(logits, labels)
"""
    plain = (
        "\nclass Plain(nn.Module):\n    def forward(self, a, b):\n        return (a - b).mean()\n"
    )
    factory = "\ndef make_loss(kind):\n    if kind:\n        return {0}()\n    return Pairs()\n"
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            from losses import make_loss
            def train(model, optimizer, loader, kind, accum):
                criterion = make_loss(kind)
                for i, (a, b) in enumerate(loader):
                    loss = criterion(model(a), model(b)) / accum
                    loss.backward()
                    if (i + 1) % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """)
    )
    for other, found in (("Plain", False), ("Pairs", True)):
        (tmp_path / f"{other}").mkdir()
        (tmp_path / other / "losses.py").write_text(coupled + plain + factory.format(other))
        (tmp_path / other / "train.py").write_text(script.read_text())
        findings = lint_files([str(tmp_path / other / "train.py")], Settings())
        assert ("WB114" in [f.code for f in findings]) == found
