"""A second process loads the graph of the first, and the outcome of its test of the loss.

A process is a new model here, with the same disk cache. Pieces run as traced in place of compiled.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import Micro, Tagger, loss, mean_of_tokens, mode_of, tagged
from tests.support import Whole, sgd
from wholebatch.compile import compile_workers, joint_graph, kept_steps, micro_step
from wholebatch.compile.code_digest import CodeDigest, Unknown
from wholebatch.compile.kept_steps import KEEP, entry_of
from wholebatch.coupled import audit
from wholebatch.errors import LossError

CPU = torch.device("cpu")


class Counted:
    """How often the work was done that a second process need not do."""

    traces = looks = 0


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(KEEP, "1")
    found, trace, check = Counted(), micro_step.trace, audit.check_adds_up

    def traced(*given: Any, **options: Any) -> Any:
        found.traces += 1
        return trace(*given, **options)

    def checked(*given: Any, **options: Any) -> Any:
        found.looks += 1
        return check(*given, **options)

    monkeypatch.setattr(micro_step, "trace", traced)
    monkeypatch.setattr(audit, "check_adds_up", checked)
    monkeypatch.setattr(joint_graph, "compiled_by_inductor", lambda graph, *_, **__: graph)
    return found


def run_once(model: nn.Module | None = None, batch: Micro | None = None, **options: Any) -> None:
    """Train as a new process would, in uneven micro-batches; compare with undivided batches."""
    model = model or Tagger().double()
    whole = Whole(model, loss=mean_of_tokens)
    options |= {"micro_batch": 3, "execute": "compile"}
    train = wb.WholeBatch(model, sgd(model), loss=loss, **options)
    for number in (8, 7):
        given = tagged(number) if batch is None else batch
        train.step(given)
        whole.step(given)
    assert mode_of(train) in ("compile", "eager")
    assert train._runner.executor._compiled()
    whole.assert_same(model)


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "wholebatch").glob("*-*"))


def test_a_second_process_neither_traces_nor_tests(counted: Counted, tmp_path: Path) -> None:
    run_once()
    assert (counted.traces, counted.looks) == (1, 1)
    assert [entry.name.partition("-")[0] for entry in entries(tmp_path)] == ["look", "step"]
    run_once()
    assert (counted.traces, counted.looks) == (1, 1)
    run_once(batch=tagged(6))  # Other samples of the same kind: only the test is made again.
    assert (counted.traces, counted.looks) == (1, 2)
    weighty = Tagger().double()
    with torch.no_grad():
        weighty.norm.weight.mul_(2.0)  # Other weights, too: a test may find other things with them.
    run_once(weighty)
    assert (counted.traces, counted.looks) == (1, 3)
    other = Tagger().double()
    other.norm.eps = 1e-3
    run_once(other)
    assert (counted.traces, counted.looks) == (2, 4)


def test_it_can_be_switched_off(
    counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEEP, "0")
    run_once()
    assert not entries(tmp_path)


@pytest.mark.parametrize("kind", ["truncated", "foreign", "noise", "removed"])
def test_five_restarts_with_a_damaged_entry(
    counted: Counted, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    choose = random.Random(kind)
    other = Tagger().double()
    other.norm.eps = 1e-3
    run_once(other)
    [_, foreign] = entries(tmp_path)
    contents = foreign.read_bytes()
    foreign.unlink()
    run_once()
    counted.traces = 1
    for restart in range(5):
        [*_, entry] = entries(tmp_path)
        if kind == "truncated":
            entry.write_bytes(entry.read_bytes()[: choose.randrange(len(contents) // 2)])
        elif kind == "foreign":
            entry.write_bytes(contents)
        elif kind == "noise":
            entry.write_bytes(choose.randbytes(len(contents)))
        else:
            entry.unlink()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="wholebatch.compile"):
            run_once()
        assert counted.traces == 2 + restart
        assert len(caplog.records) == (kind != "removed")


class Hostile:
    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


def test_no_code_of_an_entry_is_run(
    counted: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_once()
    [*_, entry] = entries(tmp_path)
    of_torch = Hostile(compile_workers._of_torch, ("load",))
    for hostile in (Hostile(os.mkdir, (str(tmp_path / "made"),)), of_torch):
        content = pickle.dumps(hostile)
        entry.write_bytes(kept_steps._checksum(entry, content) + content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="wholebatch.compile"):
            assert kept_steps.load(entry) is None
        assert "is dropped" in caplog.text
        assert not (tmp_path / "made").exists()
        assert not entry.exists()


def test_a_step_that_computes_something_else_is_dropped(
    counted: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Should a key ever miss a small difference, the comparison with eager code finds it."""
    run_once()
    other = Tagger().double()
    other.norm.eps = 1.00001e-5
    run_once(other)
    one, two = (entry for entry in entries(tmp_path) if entry.name.startswith("step"))
    found = [kept_steps.load(entry) for entry in (one, two)]
    assert found[0] is not None
    assert found[1] is not None
    kept_steps.save(one, found[1])
    kept_steps.save(two, found[0])
    with caplog.at_level(logging.WARNING, logger="wholebatch.compile"):
        run_once()
    assert counted.traces == 3
    assert "is farther from that of eager code than it was" in caplog.text


@pytest.mark.parametrize("reason", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written(
    counted: Counted, tmp_path: Path, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(reason, "cannot be written")

    monkeypatch.setattr(kept_steps.tempfile, "mkstemp", fails)
    monkeypatch.setattr(Path, "touch", fails)
    run_once()
    run_once()
    assert (counted.traces, counted.looks) == (2, 2)
    assert not entries(tmp_path)


def test_random_numbers_and_gradients_of_zero_are_traced_again(
    counted: Counted, tmp_path: Path
) -> None:
    model = Tagger(dropout=0.5).double()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4, execute="compile")
    train.step(tagged(8))
    assert not [entry for entry in entries(tmp_path) if entry.name.startswith("step")]
    run_once()
    assert counted.traces == 2
    masked = tagged(6)
    masked["y"][:3] = -100  # The first micro-batch has nothing to compare.
    run_once(batch=masked)
    assert counted.traces == 3


def test_a_loss_that_was_refused_is_refused_again(counted: Counted) -> None:
    def mean(model: nn.Module, micro: Micro) -> wb.Loss:
        return wb.Loss(mean_of_tokens(model, micro), 1)

    for _ in range(2):
        model = Tagger().double()
        train = wb.WholeBatch(model, sgd(model), loss=mean, micro_batch=4, execute="compile")
        with pytest.raises(LossError):
            train.step(tagged(8))
    assert counted.looks == 2


# ----------------------------------------------------------------------------------- the digest

FACTOR = 1.0


class Options:
    def __init__(self) -> None:
        self.weight = 0.5
        self._seen = 3

    def weigh(self, x: Tensor) -> Tensor:
        return x * self.weight


def digest_of(*values: Any) -> str:
    digest = CodeDigest()
    for value in values:
        digest.add(value, "a value")
    return digest.hexdigest()


def loss_with(weight: float, options: Options) -> Callable[..., Tensor]:
    def weighed(model: nn.Module, x: Tensor) -> Tensor:
        return options.weigh(model(x)).sum() * weight * FACTOR

    return weighed


def test_the_digest_is_that_of_code_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def now(weight: float = 2.0, name: str = "weight", value: float = 0.5) -> str:
        options = Options()
        setattr(options, name, value)
        return digest_of(Tagger(), loss_with(weight, options))

    same = now()
    assert now() == same
    assert now(weight=3.0) != same  # in a closure
    assert now(value=0.6) != same  # an attribute of an object
    assert now(name="_seen", value=4) == same  # one that nobody names
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert now() != same
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    assert now() == same
    monkeypatch.setattr(Options, "weigh", lambda self, x: x / self.weight)
    assert now() != same


def test_the_digest_of_models() -> None:
    changes: list[Callable[[Tagger], object]] = [
        Tagger.eval,
        Tagger.half,
        lambda model: setattr(model.norm, "eps", 1e-3),
        lambda model: model.spare.requires_grad_(False),
        lambda model: setattr(model.read, "weight", nn.Parameter(model.embed.weight.clone())),
        lambda model: model.register_forward_hook(lambda *_: None),
        lambda model: setattr(model, "forward", model.spare.forward),
    ]
    found = [digest_of(Tagger())]
    for change in changes:
        model = Tagger()
        change(model)
        found.append(digest_of(model))
    assert len(set(found)) == len(found)
    with torch.no_grad():
        model = Tagger()
        model.read.weight.add_(1.0)  # Values of weights are inputs of a graph.
    assert digest_of(model) == found[0]


def test_what_cannot_be_compared_between_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(KEEP, "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(Unknown, match=r"a value\.source is a torch\._C\.Generator"):
        digest_of({"source": torch.Generator()})
    source = iter([1.0, 2.0])
    assert entry_of("step", Tagger(), lambda model, x: model(x) * next(source), CPU) is None
    assert entry_of("step", Tagger(), loss, CPU) is not None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert entry_of("step", Tagger(), loss, CPU) is None
    handle.remove()
    monkeypatch.setattr("wholebatch.compile.code_digest._STARTED", 0.0)
    assert entry_of("step", Tagger(), loss, CPU) is None  # Its files are newer than the process.
