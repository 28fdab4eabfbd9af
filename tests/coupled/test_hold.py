"""What lock-step keeps on the device changes its memory, never its result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.coupled.networks import NETWORKS, densenet, resnet, unet
from tests.coupled.windows import Dropped, batch, error, result, split, total, whole
from wholebatch.coupled.batchnorm.activation_offload import ActivationPages, HostPool, LearnedUse
from wholebatch.coupled.batchnorm.lock_step import Hold, LockStep, blocks_of
from wholebatch.errors import OptionError

BLOCKLESS = ("inputs", "reused")


def held(model: nn.Module, hold: Hold) -> LockStep:
    return LockStep(
        model,
        hold=hold,
        least_page=512,  # more than a channel's statistics, less than any activation
    )


def run(step: LockStep, model: nn.Module, micros: list[tuple[Tensor, Tensor]]) -> list[float]:
    def backward(value: Tensor) -> float:
        value.backward()
        return value.item()

    return step.run(micros, forward=lambda micro: total(model, micro), backward=backward)


@pytest.mark.parametrize("sizes", [[7, 5], [4, 1, 3, 1, 3]])
@pytest.mark.parametrize(
    "hold, name",
    [(hold, name) for hold in ("inputs", "host") for name in NETWORKS if (hold, name) != BLOCKLESS],
)
def test_equals_the_undivided_batch(hold: Hold, name: str, sizes: list[int]) -> None:
    model = NETWORKS[name]().double()
    data = batch(12)
    want = whole(model, data)
    losses = run(held(model, hold), model, split(data, sizes))
    assert sum(losses) == pytest.approx(total(model.train(), data).item(), rel=1e-12)
    assert error(result(model)[0], want[0]) <= 1e-12


@pytest.mark.parametrize("hold", ["inputs", "host"])
def test_bit_equal_to_holding_everything_with_dropout_and_a_second_window(hold: Hold) -> None:
    models = [Dropped("kept").double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [held(models[0], "graphs"), held(models[1], hold)]
    for seed in range(2):  # in the second window, what to fetch ahead has been learnt
        for model, step in zip(models, steps, strict=True):
            torch.manual_seed(seed)
            run(step, model, split(batch(9, seed=seed), [4, 1, 4]))
    want, got = result(models[0]), result(models[1])
    assert all(torch.equal(got[0][n], want[0][n]) for n in want[0])
    assert all(torch.equal(got[1][n], want[1][n]) for n in want[1])


def test_blocks() -> None:
    assert [name for name, _ in blocks_of(resnet())] == ["0.0", "0.1", "0.2"]
    assert [name for name, _ in blocks_of(densenet())] == [f"0.1.layers.{k}" for k in range(3)]
    assert [name for name, _ in blocks_of(unet())] == ["0.down", "0.deep", "0.join"]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) == []
    assert blocks_of(nn.Linear(2, 2)) == []


class Layer(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(inside), nn.Conv2d(inside, 2, 1)

    def forward(self, maps: dict[str, list[Tensor]]) -> Tensor:
        made: Tensor = self.conv(torch.relu(self.bn(torch.cat(maps["all"], 1))))
        return made


class Growing(nn.Module):
    """As torchvision's DenseNet: every layer is given one list, which then grows."""

    blocks = ("0.layers.0", "0.layers.1", "0.layers.2")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(3 + 2 * k) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        maps = {"all": [x]}
        for layer in self.layers:
            maps["all"].append(layer(maps))
        return torch.cat(maps["all"], 1)


class InPlace(nn.Module):
    """A block that changes its input, and one whose input is changed after it."""

    blocks = ("0.first", "0.second")

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.first = nn.Sequential(
            nn.Hardtanh(-1.0, 1.5, inplace=True), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Tanh()
        )
        # Neither keeps its input for the backward, so that it may be changed.
        self.second = nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (6, 6)), Own(4))
        self.last = nn.Conv2d(4, 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x)) * 1.0
        y = self.second(x)
        x.mul_(1.5)
        made: Tensor = self.last(x + y)
        return made


class Own(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.bn(x + 1.0)
        return made


@pytest.mark.parametrize("body", [Growing, InPlace])
def test_blocks_are_given_again_what_they_were_given(body: type[Growing | InPlace]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(body(), nn.Flatten(), nn.Linear(9 * 36, 5)).double()
    blocks = [(name, model.get_submodule(name)) for name in body.blocks]
    step = LockStep(model, hold="inputs", blocks=blocks)
    for seed in range(2):  # what was found in the first run is known in the second
        data = batch(7, seed=seed)
        want = whole(model, data)
        run(step, model, split(data, [3, 4]))
        assert error(result(model)[0], want[0]) <= 1e-12
        assert error(result(model)[1], want[1]) <= 1e-12
        model.zero_grad()


def test_the_last_block_is_not_computed_again() -> None:
    """In the backward it comes first: what is inside of it would be needed again at once."""
    model = resnet().double()
    data = batch(6)
    want = whole(model, data)
    calls: list[str] = []
    for name, block in blocks_of(model):
        block.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        first = next(m for m in block.modules() if isinstance(m, nn.Conv2d))
        first.register_forward_hook(lambda *_, name=name: calls.append(f"in {name}"))
    step = held(model, "inputs")
    inside = []
    for _ in range(2):
        calls.clear()
        model.zero_grad()
        run(step, model, split(data, [3, 3]))
        assert error(result(model)[0], want[0]) <= 1e-12
        inside.append([calls.count(f"in {name}") for name, _ in blocks_of(model)])
    assert inside == [[4, 4, 4], [4, 4, 2]]


def peak(parts: int, *, size: int = 2) -> int:
    model = resnet().double()
    step = held(model, "host")
    for _ in range(2):  # what is fetched ahead is known from the first on
        run(step, model, split(batch(parts * size), [size] * parts))
    assert step.traffic is not None
    return step.traffic.peak


def test_host_needs_the_same_for_any_number_of_micro_batches() -> None:
    few, many = peak(6), peak(16)  # with fewer, less is on its way at once
    assert many <= 1.02 * few


def test_host_holds_far_less_than_the_graphs() -> None:
    """All activations of the whole batch, saved and counted, against what was on the device."""
    model = resnet().double()
    data = batch(16)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = total(model, data)
    everything = sum(saved.values())
    del value
    assert peak(8) < 0.4 * everything


def test_host_gives_everything_back() -> None:
    model = resnet().double()
    step = held(model, "host")
    kept: list[Tensor] = []

    def backward(value: Tensor) -> Tensor:
        value.backward()
        return value.detach()

    def forward(micro: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model[0](micro[0])
        kept.append(hidden.detach())
        return nn.functional.cross_entropy(model[1](hidden), micro[1], reduction="sum")

    data = batch(6)
    expected = model[0](data[0])
    out = step.run(split(data, [2, 2, 2]), forward=forward, backward=backward)
    # What somebody still holds after the run is where it was.
    assert torch.allclose(torch.cat(kept), expected.detach(), rtol=1e-10, atol=1e-12)
    assert all(value.isfinite() for value in out)
    assert step._pool is not None
    assert step._pool.used == 0
    assert step.traffic is not None
    assert step.traffic.bytes_out > 0


def test_host_after_a_failure() -> None:
    model = resnet().double()
    step = held(model, "host")
    micros = split(batch(6), [2, 2, 2])

    def backward(value: Tensor) -> None:
        value.backward()
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        step.run(micros, forward=lambda m: total(model, m), backward=backward)
    assert step._pool is not None
    assert step._pool.used == 0
    model.zero_grad()
    want = whole(model, batch(6))
    run(step, model, micros)
    assert error(result(model)[0], want[0]) <= 1e-12


def test_pool_uses_its_memory_again() -> None:
    pool = HostPool(pinned=False)
    first = pool.take(5000)
    assert (len(first.bytes), pool.used) == (5000, 8192)
    pool.give(first)
    assert (pool.used, pool.held) == (0, 0)


def test_a_piece_that_held_less_is_used_again_in_full() -> None:
    pool = HostPool(pinned=False)
    first = pool.take(5000)
    pool._pinned = True  # as on CUDA: pieces are kept for later
    pool.give(first)
    again = pool.take(8000)  # of the same size when rounded up
    assert again is first
    assert len(again.bytes) == 8000


def test_options() -> None:
    with pytest.raises(
        OptionError, match='hold="disk": must be "graphs", "inputs", "host" or "auto"'
    ):
        LockStep(nn.Linear(2, 2), hold="disk")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has no blocks to compute again"):
        LockStep(nn.Linear(2, 2), hold="inputs")


@pytest.mark.parametrize("fits", ["inputs", "host"])
def test_auto_holds_less_when_memory_runs_out(fits: Hold) -> None:
    model = resnet().double()
    step = LockStep(model, hold="auto", least_page=512)
    data = batch(6)
    want = whole(model, data)
    tried: list[Hold] = []

    def forward(micro: tuple[Tensor, Tensor]) -> Tensor:
        if step.holding not in tried:
            tried.append(step.holding)
        if tried[-1] != fits and len(micro[1]) == 1:
            raise torch.OutOfMemoryError("as if")
        return total(model, micro)

    for _ in range(2):
        model.zero_grad()
        step.run(split(data, [3, 1, 2]), forward=forward, backward=lambda v: v.backward())
        assert error(result(model)[0], want[0]) <= 1e-12
    assert tried == ["graphs", "inputs", "host"][: 2 if fits == "inputs" else 3]
    assert step.holding == fits


def test_auto_leaves_a_window_that_has_begun_to_the_caller() -> None:
    model = resnet().double()
    step = LockStep(model, hold="auto", least_page=512)
    micros = split(batch(6), [3, 3])

    def backward(value: Tensor) -> None:
        if step.holding == "graphs":
            raise torch.OutOfMemoryError("as if")
        value.backward()

    with pytest.raises(torch.OutOfMemoryError, match="as if"):
        step.run(micros, forward=lambda m: total(model, m), backward=backward)
    assert step.holding == "inputs"
    step.run(micros, forward=lambda m: total(model, m), backward=backward)


def test_what_is_learnt_does_not_depend_on_what_the_first_one_makes() -> None:
    """Autocast casts the weights once: the first micro-batch makes storages that others do not."""
    model = resnet()
    x, y = batch(12, dtype=torch.float32)
    step = held(model, "host")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            run(step, model, split((x, y), [2] * 6))
    assert step.traffic is not None
    few = step.traffic.bytes_in
    plain = held(model.double(), "host")
    for _ in range(2):
        run(plain, model, split((x.double(), y), [2] * 6))
    assert plain.traffic is not None
    # Nothing is fetched in vain: half the bytes per number, about half the traffic or less.
    assert few < 0.6 * plain.traffic.bytes_in


def test_what_is_learnt_of_a_window() -> None:
    learned = LearnedUse()
    learned.learn(2, frozenset({(0, 1), (1, 0)}))
    learned.learn(5, frozenset({(0, 1)}))
    assert learned.next_use((0, 1), 0) == 2
    assert learned.next_use((0, 1), 2) == 5
    assert learned.next_use((0, 1), 5) > 1000  # not again, as far as is known
    learned.learn(2, frozenset({(3, 3)}))  # the next window went another way
    assert learned.next_use((0, 1), 0) == 5
    assert learned.next_use((1, 0), 0) > 1000
    assert learned.next_use((3, 3), 1) == 2


def layers(number: int) -> nn.Sequential:
    torch.manual_seed(0)
    stretch = [
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(number)
    ]
    return nn.Sequential(nn.Conv2d(3, 4, 1), *stretch, nn.Flatten(), nn.Linear(144, 5)).double()


def test_what_is_needed_at_once_again_is_not_moved() -> None:
    """From the second window on: in memory for one micro-batch, the next stretches stay."""
    model = layers(12)
    step = held(model, "host")
    micros = split(batch(8), [2, 2, 2, 2])
    moved = []
    for _ in range(2):
        want = whole(model.train(), batch(8))
        model.zero_grad()
        run(step, model, micros)
        assert error(result(model)[0], want[0]) <= 1e-12
        assert step.traffic is not None
        moved.append(step.traffic)
    first, second = moved
    assert second.bytes_in < 0.6 * first.bytes_in
    assert second.bytes_out < first.bytes_out
    # Of one micro-batch: what goes into each BatchNorm and comes out of each ReLU, twelve times.
    alone = 12 * 2 * (2 * 4 * 6 * 6 * 8)
    assert second.peak < 1.3 * alone


def test_gradients_take_of_the_room_for_pages() -> None:
    """Beside all of them the peak would be higher the more micro-batches still fill the room."""
    learned = LearnedUse(most=4000, busy=1000, largest=1000)
    weight = nn.Parameter(torch.zeros(100, dtype=torch.float64))
    pages = ActivationPages(
        2,
        pool=HostPool(pinned=False),
        kind="cpu",
        parameters=[weight],
        learned=learned,
        least=512,
    )
    pages.enter(0)
    assert pages._room == 3000
    total = torch.zeros(100, dtype=torch.float64)
    pages.created(total)
    pages.keep_sum(total)
    pages.keep_sum(total)  # once is enough
    assert (pages._room, pages._may_keep) == (2200, 1200)
    weight.grad = torch.zeros(100, dtype=torch.float64)
    pages.created(weight.grad)
    pages.leave(0)
    assert (pages._room, pages._may_keep) == (1500, 500)  # half of it stays
    pages.close()
