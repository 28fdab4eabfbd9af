"""Batches of another size keep their structure, their samples and their memory format."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from wholebatch.errors import OptionError
from wholebatch.memory import resize_batch
from wholebatch.memory.fake_tensors import map_tensors


def test_cuts_and_repeats() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0)}
    small = resize_batch(batch, 2)
    assert small["x"].tolist() == [[0, 1], [2, 3]]
    assert small["names"] == ["a", "b"]
    large = resize_batch(batch, 7)
    assert large["x"][:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert large["names"] == ["a", "b", "c", "a", "b", "c", "a"]
    assert large["scale"] is batch["scale"]
    assert resize_batch(batch, 3) is batch


def test_a_batch_is_gone_when_nobody_holds_it() -> None:
    """Not only when garbage is collected: a micro-batch on a device is memory."""
    gc.disable()
    try:
        batch = {"x": torch.zeros(4, 3), "more": [torch.zeros(4)]}
        held = [weakref.ref(batch["x"]), weakref.ref(batch["more"][0])]
        made = resize_batch(batch, 6)
        del batch
        assert [one() for one in held] == [None, None]
        held = [weakref.ref(made["x"])]
        map_tensors(made, torch.clone)
        del made
        assert held[0]() is None
    finally:
        gc.enable()


def test_refuses_no_samples() -> None:
    with pytest.raises(OptionError, match="samples=0: must be at least 1"):
        resize_batch(torch.zeros(2), 0)
