"""Which engine a model is wrapped in: what one process can see of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import sgd, summed
from wholebatch.distributed import choose
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.integrations import host_window
from wholebatch.integrations.host_window import HostWindows


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
    with pytest.raises(OptionError, match='sync=\'alone\': must be "hold", "every", "none" or'):
        choose(nn.Linear(3, 1), sync="alone")


class TwoRanks:
    """As the first of two processes would count."""

    ranks, rank = 2, 0

    def sum(self, values: Sequence[float]) -> list[float]:
        return [2 * value for value in values]

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return 2 * tensor

    def largest(self, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize("owns_forward", [True, False])
def test_a_host_that_was_given_a_plain_model_on_several_ranks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, owns_forward: bool
) -> None:
    """A trainer wraps the model itself and gives us the one inside: nothing to warn of."""
    model = nn.Linear(3, 1)
    monkeypatch.setattr(host_window, "world_size", lambda: 2)
    monkeypatch.setattr(host_window, "Group", lambda *_, **__: TwoRanks())
    monkeypatch.setattr(host_window.dist, "get_rank", lambda: 0)
    HostWindows([model], [sgd(model)], device=torch.device("cpu"), owns_forward=owns_forward)
    warned = "a plain model in a job of 2 ranks: nothing reduces its gradients" in caplog.text
    assert warned is not owns_forward
    assert ("Pass the model that accelerator.prepare()" in caplog.text) is not owns_forward
