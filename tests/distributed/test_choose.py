"""Which engine a model is wrapped in: what one process can see of it."""

from __future__ import annotations

import pytest
from torch import nn

import wholebatch as wb
from tests.support import sgd, summed
from wholebatch.distributed import choose
from wholebatch.errors import OptionError, UnsupportedError


def test_parameters_of_zero_3_outside_their_engine_are_refused() -> None:
    """The module of an engine holds empty parameters: a plain loop over it would train nothing."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    assert choose(model).ranks == 1
    model[1].weight.ds_id = 7  # type: ignore[assignment]  # what deepspeed.zero.Init sets
    for make in (
        lambda: wb.Accumulator(model, sgd(model), steps=2),
        lambda: wb.WholeBatch(model, sgd(model), loss=summed, micro_batch=2),
        lambda: choose(model, sync="none"),
    ):
        with pytest.raises(UnsupportedError) as refused:
            make()
        assert str(refused.value) == (
            "model wrapped in DeepSpeed (Sequential with parameters of ZeRO 3, not its engine): "
            "supported are plain modules, DistributedDataParallel, FSDP2's fully_shard and the "
            "engine that deepspeed.initialize returns; wrap the model in one of these"
        )


def test_one_process_may_say_that_it_trains_by_itself() -> None:
    assert choose(nn.Linear(3, 1), sync="none").ranks == 1
    with pytest.raises(OptionError, match='sync=\'alone\': must be "hold", "every", "gathered"'):
        choose(nn.Linear(3, 1), sync="alone")
