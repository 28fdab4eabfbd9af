"""FSDP2 in `wholebatch train`: the first values of a model that is built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wholebatch.cli.sharded_start import build_sharded
from wholebatch.errors import RecipeError

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def first_values(build: Callable[[], nn.Module], seed: int = 3) -> dict[str, Tensor]:
    model, initialise = build_sharded(build, seed=seed, device=torch.device("cpu"), ranks=1)
    before = dict(model.named_parameters())
    initialise()
    after = dict(model.named_parameters())
    assert all(after[name] is tensor for name, tensor in before.items())  # FSDP2 knows them
    values = {**after, **dict(model.named_buffers())}
    return {
        name: tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor
        for name, tensor in values.items()
    }


class Own(nn.Module):
    """Tensors of its own, and modules of torch; one weight is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=2)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 6))
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("mask", torch.empty(3, 3), persistent=False)
        self.register_buffer("places", torch.empty(5, dtype=torch.long))
        self.reset_parameters()
        self.layers[2].weight = self.embedding.weight
        self.double()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.copy_(torch.arange(4) / 2)
            self.mask.copy_(torch.ones(3, 3).tril())
            self.places.copy_(torch.arange(5))


class Tuned(Own):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.constant_(module.bias, 0.25)


def test_modules_give_their_first_values() -> None:
    values = first_values(Own)
    assert all(tensor.dtype in (torch.float64, torch.long) for tensor in values.values())
    assert values["scale"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert torch.equal(values["mask"], torch.ones(3, 3).tril().double())
    assert values["places"].tolist() == [0, 1, 2, 3, 4]
    assert values["layers.1.num_batches_tracked"].item() == 0
    assert values["layers.1.running_var"].tolist() == [1.0] * 4
    assert values["embedding.weight"][2].abs().sum() == 0  # the row of the padding
    assert float(values["embedding.weight"].std()) > 0.3
    assert "layers.2.weight" not in values  # it is tied
    bound = 0.5  # of nn.Linear(4, ...): 1 / sqrt(4)
    assert 0 < float(values["layers.0.weight"].abs().max()) <= bound
    again = first_values(Own)
    assert all(torch.equal(values[name], again[name]) for name in values)
    other = first_values(Own, seed=4)
    assert not torch.equal(values["layers.0.weight"], other["layers.0.weight"])


def test_the_model_initialises_modules_as_those_of_hugging_face_do() -> None:
    values = first_values(Tuned)
    assert values["layers.0.bias"].tolist() == [0.25] * 4
    assert 0 < float(values["layers.0.weight"].std()) < 0.05
    assert values["layers.1.weight"].tolist() == [1.0] * 4  # BatchNorm's own


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.token = nn.Parameter(torch.zeros(2))


class Forgets(NoReset):
    def reset_parameters(self) -> None:
        pass


class ForgetsPlaces(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("places", torch.arange(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.Sequential(NoReset()),
            r"gives 0\.token its first values.*give 0 a reset",
        ),
        (Forgets, r"gives token its first values.*give it a reset_parameters"),
        (ForgetsPlaces, r"gives places its first values"),
        (lambda: nn.Linear(int(torch.ones(1)), 2), "cannot be built on the meta device"),
    ],
)
def test_what_has_no_first_values_is_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        first_values(build)
