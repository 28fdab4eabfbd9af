"""A batch walks straight through: how many of our files and frames one call passes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import wholebatch as wb
from tests.support import mlp, samples, sgd

SOURCES = str(Path(wb.__file__).parent)


def files_of(call: Callable[[], object]) -> set[str]:
    """The files of the package in which a function runs during the call."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            files.add(frame.f_code.co_filename.removeprefix(SOURCES))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def frames_above() -> list[str]:
    """Our frames above the caller, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCES):
            names.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else "")
        frame = frame.f_back
    return names


def test_a_step_passes_18_files_and_6_frames() -> None:
    calls: list[list[str]] = []

    def loss(model: nn.Module, micro: dict[str, torch.Tensor]) -> wb.Loss:
        calls.append(frames_above())
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    model = mlp()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4, clip_norm=1.0)
    batch = samples(10)
    for _ in range(2):
        train.step(batch)  # The second looks once more: the list that the loss function reads grew.
    calls.clear()
    files = files_of(lambda: train.step(batch))
    assert len(files) <= 18, sorted(files)
    assert calls
    assert all(len(frames) <= 6 for frames in calls), calls[0]


def test_a_backward_passes_11_files() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2, clip_norm=1.0)

    def backward() -> Any:
        batch = samples(10)
        total = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return acc.backward(total, units=10)

    for _ in range(4):  # The loop is tested in windows 1, 2, 4, 8, …
        backward()
    for closes in (False, True):
        files = files_of(partial(assert_is_step, backward, closes))
        assert len(files) <= 11, (closes, sorted(files))


def assert_is_step(backward: Callable[[], wb.Step | None], closes: bool) -> None:
    assert (backward() is not None) == closes


def test_the_entry_points_have_few_options() -> None:
    """Beside the model and the optimizer: 12 and 9 at most."""
    for entry, most in ((wb.WholeBatch, 12), (wb.Accumulator, 9)):
        options = [
            p for p in inspect.signature(entry).parameters if p not in ("model", "optimizer")
        ]
        assert len(options) <= most, options
