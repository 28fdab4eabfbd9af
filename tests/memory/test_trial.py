"""Trial steps under a limit, on a device that is made up: which sizes run, and what is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import adamw, mlp, samples, summed
from wholebatch.memory import try_out
from wholebatch.memory.choose_micro_batch import Choice
from wholebatch.memory.predict import Prediction
from wholebatch.memory.trial_step import _Trial, measure_step

LIMIT = 6000


def chosen(size: int, *, whole: bool = False) -> Choice:
    """Ten bytes a sample on top of a thousand; what was tried is a bit more than the peak."""
    tried = {number: int(1.04 * (1000 + 10 * number)) for number in (1, 4, size // 2, size)}
    prediction = Prediction(1000 + 10 * size, {"optimizer state": 600, "activations": 1}, 0.0)
    return Choice(size, prediction, LIMIT, whole, tried)


def tried_out(
    monkeypatch: pytest.MonkeyPatch,
    choice: Choice,
    reserved: Callable[[int], float],
    *,
    most: int = 10**6,
) -> tuple[Choice, list[int]]:
    """Try a choice out where so many bytes are taken for a size, up to the limit."""
    sizes: list[int] = []

    def run(self: _Trial, size: int, *, micro_batches: int) -> int | None:
        sizes.append(size)
        self.reserved = min(LIMIT, int(reserved(size)))
        return None if reserved(size) > LIMIT else 10 * size

    def made(self: _Trial, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.on_cuda = True

    begin = _Trial.__init__
    with monkeypatch.context() as patched:
        patched.setattr(_Trial, "run", run)
        patched.setattr(_Trial, "__init__", made)
        patched.setattr(_Trial, "end", lambda self: None)
        model = mlp()
        result = try_out(model, summed, samples(4), choice, optimizer=adamw(model), most=most)
    return result, sizes


@pytest.mark.parametrize("pieces", [1.0, 1.04, 1.1, 1.12])
def test_no_step_runs_out_where_memory_is_in_pieces(
    monkeypatch: pytest.MonkeyPatch, pieces: float
) -> None:
    def reserved(size: int) -> float:
        return pieces * (1000 + 10 * size)

    choice, _ = tried_out(monkeypatch, chosen(476), reserved)
    largest = max(size for size in range(1, 600) if reserved(size) <= LIMIT)
    assert not choice.failed
    assert 0.9 * largest <= choice.micro_batch <= largest


def test_what_the_allocator_caches_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, sizes = tried_out(monkeypatch, chosen(400), lambda size: LIMIT)
    assert sizes == [350, 400]
    assert choice.micro_batch == 400
    assert not choice.failed


def test_a_step_that_runs_out_makes_it_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, sizes = tried_out(monkeypatch, chosen(400), lambda size: 30 * size)
    assert sizes == [350, 306, 267, 233, 203, 177]
    assert choice.micro_batch == 177
    assert choice.failed == tuple(sizes[:-1])
    assert "203 ran out of memory" in choice.summary()
    nothing, _ = tried_out(monkeypatch, chosen(400), lambda size: 2.0 * LIMIT)
    assert nothing.measured is None


def test_the_whole_batch_is_tried_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, sizes = tried_out(
        monkeypatch, chosen(400, whole=True), lambda size: 10 * size, most=400
    )
    assert sizes == [400]
    assert choice.is_whole_batch


def test_state_is_taken_in_as_many_pieces_as_an_optimizer_has() -> None:
    model = mlp()
    bytes_of = [parameter.nbytes for parameter in model.parameters()]
    kept = 2 * sum(bytes_of)
    trial = _Trial(model, measure_step, samples, kept=kept, limit=0)
    trial._take_state()
    assert [piece.numel() for piece in trial._state] == [n for n in bytes_of for _ in range(2)]
    trial.kept = kept * 3 // 4
    trial._state.clear()
    trial._take_state()
    assert abs(sum(piece.numel() for piece in trial._state) - trial.kept) <= len(bytes_of)
    trial.end()
    assert not trial._state
