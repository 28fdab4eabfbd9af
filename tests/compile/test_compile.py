"""The compiler's own micro-steps: few and tiny, because each takes many seconds to make."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

import wholebatch as wb
from tests.compile.nets import Tagger, loss, mean_of_tokens, mode_of, steps_of, tagged
from tests.support import Seen, Whole, sgd
from wholebatch.compile import ExecuteWarning

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _warnings_of_the_compiler_are_its_own() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.simplefilter("error", ExecuteWarning)
        yield


def test_compiled_joint_graphs_of_many_sizes_make_the_update_of_the_undivided_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wholebatch.compile import joint_graph as joint

    compilations = []
    plain = joint.compiled_by_inductor

    def counted(*arguments: Any, **options: Any) -> Any:
        compilations.append(arguments)
        return plain(*arguments, **options)

    monkeypatch.setattr(joint, "compiled_by_inductor", counted)
    # Small: what takes the time is compiling its kernels.
    model = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)).double()
    whole = Whole(model, loss=mean_of_tokens, clip_norm=0.2)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=3, clip_norm=0.2, execute="compile"
    )
    # Texts of one length in threes, with a short last micro-batch; then of others.
    for number, length in ((8, 6), (6, 6), (8, 9), (8, 6), (5, 7), (8, 4), (6, 31), (5, 9)):
        whole.step(tagged(number, length))
        train.step(tagged(number, length))
    assert mode_of(train) == "compile"
    steps = list(steps_of(train).values())
    assert [step.mode for step in steps] == ["compile"] * len(steps)
    assert [step.joint.sizes is not None for step in steps] == [False] + [True] * 8
    assert len(compilations) == 2
    train.step(tagged(7, 6))  # a tail of one is another kind still, and runs eagerly
    whole.step(tagged(7, 6))
    assert mode_of(train) == "eager"
    assert "compiled a micro-step" in train._runner.executor.notes.history[0]
    whole.assert_same(model, seen)


def test_a_compiler_that_fails_leaves_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholebatch.compile import joint_graph as joint

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler here\nand a long story")

    monkeypatch.setattr(joint, "compiled_by_inductor", broken)
    model = Tagger().double()
    whole = Whole(model, loss=mean_of_tokens)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4, execute="compile")
    with pytest.warns(ExecuteWarning) as said:
        train.step(tagged(8))
    whole.step(tagged(8))
    assert "cannot be compiled (RuntimeError: no compiler here)" in str(said[0].message)
    train.step(tagged(8))
    whole.step(tagged(8))
    assert mode_of(train) == "eager"
    whole.assert_same(model)
