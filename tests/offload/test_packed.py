"""Two moments in the memory of one: how much of them is left, and that errors do not lean."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wholebatch.offload import packed_moments as packed
from wholebatch.offload.packed_moments import keys_of, pack, unpack


def moments(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Over many powers of ten, with some zeros."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(shape, generator=generator, dtype=dtype).mul_(3).exp_()
    first = torch.randn(shape, generator=generator, dtype=dtype) * spread * 1e-4
    second = (first * torch.randn(shape, generator=generator, dtype=dtype)).square()
    first.view(-1)[:5], second.view(-1)[:3] = 0.0, 0.0
    return first, second


def packed_with(first: Tensor, second: Tensor, count: Tensor | float) -> Tensor:
    """What `unpack` asks for."""
    key = keys_of([first], [second], [count])[0]
    pack([first], [second], [key])
    return key.row


def opened(first: Tensor, second: Tensor, count: float) -> tuple[Tensor, Tensor]:
    """What comes back of both; `second` holds it too."""
    row = packed_with(first, second, count)
    old = [part.clone() for _, part, _ in unpack([first], [second], [row])]
    return torch.cat([part.reshape(-1) for part in old]), second


@pytest.mark.parametrize(
    ("dtype", "of_first", "of_second"),
    [(torch.float32, 2**-11, 2**-10), (torch.float64, 2**-24, 2**-23)],
    ids=str,
)
@pytest.mark.parametrize("count", [0.0, 1.0, 7.0, 1e6])
def test_what_comes_back(
    dtype: torch.dtype, of_first: float, of_second: float, count: float
) -> None:
    first, second = moments((40, 50), dtype)
    kept = first.clone(), second.clone()
    old, back = opened(first, second, count)
    assert torch.equal(first, kept[0])  # only the memory of the second is used
    # What is smaller than 2⁻²⁹ of the largest has fewer bits, as float16 has.
    floor = float(kept[0].abs().max()) * 2.0**-40
    assert bool(((old - kept[0].view(-1)).abs() <= of_first * kept[0].view(-1).abs() + floor).all())
    in_range = kept[1] >= kept[1].max() * 2.0**-63
    off = (back - kept[1]).abs()
    assert bool((off <= of_second * kept[1])[in_range].all())
    if dtype is torch.float32:
        assert not in_range.all()
        assert bool((off <= kept[1].max() * 2.0**-63)[~in_range].all())
    assert torch.equal(back == 0, kept[1] == 0)


def test_moments_that_are_zero_or_tiny_come_back() -> None:
    for size in (0.0, 1e-44, 1e-38, 1e-20, 1e38):
        right = torch.full((3,), size)
        old, back = opened(right.clone(), right.clone(), 5.0)
        assert torch.allclose(old, right, rtol=1e-3, atol=1e-41)
        assert torch.allclose(back, right, rtol=1e-3, atol=2e-41)
    empty = torch.empty(0), torch.empty(0)
    assert opened(*empty, 0.0)[0].numel() == 0


def test_rounding_does_not_lean_to_one_side() -> None:
    """An average that moves by less than a step in an update: to the nearest, it would stand."""
    generator = torch.Generator().manual_seed(2)
    second = torch.rand(2000, generator=generator) + 0.5
    right, nearest = second.double(), second.clone()
    first = torch.zeros(2000)
    for count in range(400):
        opened(first, second, float(count))
        opened(first, nearest, 0.0)
        for average in (second, right, nearest):
            average.mul_(0.9998)
    assert float((nearest / right - 1).abs().max()) > 0.05
    assert float((second / right - 1).abs().max()) < 0.02
    assert abs(float((second / right - 1).mean())) < 0.005


@pytest.mark.parametrize("shape", [(7, 5, 3), (100,), (1, 64)])
def test_pieces_and_other_orders_of_memory(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = opened(*moments(shape), 3.0)
    monkeypatch.setattr(packed, "_CHUNK", 8)
    in_pieces = opened(*moments(shape), 3.0)
    assert all(map(torch.equal, at_once, in_pieces))
    first, second = moments(shape)
    turned = second.t().contiguous().t() if second.ndim == 2 else second
    if second.ndim == 3:
        turned = second.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert all(map(torch.equal, at_once, opened(first, turned, 3.0)))


def test_fails_with_both_moments_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = moments((4, 4))
    kept = first.clone(), second.clone()

    def fails(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fails)
        with pytest.raises(torch.OutOfMemoryError):
            packed_with(first, second, 0.0)
    assert torch.equal(first, kept[0])
    assert torch.equal(second, kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "counts", [[4.0] * 4, [0.0, 3.0, 7.0, 7.0], [torch.tensor(float(n)) for n in range(4)]], ids=str
)
def test_many_together_are_packed_as_each_alone(
    dtype: torch.dtype, counts: list[Tensor | float]
) -> None:
    shapes = [(7, 5), (), (64,), (3, 1, 4)]
    alone, together = ([moments((200,), dtype) for _ in shapes] for _ in range(2))
    for number, shape in enumerate(shapes):
        for pairs in (alone, together):
            size = math.prod(shape)
            first, second = (part[number : number + size].view(shape) for part in pairs[number])
            pairs[number] = (first * 10.0**number, second * 10.0 ** (2 * number))
    single = [packed_with(*pair, count) for pair, count in zip(alone, counts, strict=True)]
    firsts, seconds = [m for m, _ in together], [v for _, v in together]
    keys = keys_of(firsts, seconds, counts)
    pack(firsts, seconds, keys)
    rows = [key.row for key in keys]
    assert all(map(torch.equal, single, rows))
    whole = torch.int64 if dtype is torch.float64 else torch.int32
    for (_, one), other in zip(alone, seconds, strict=True):
        assert torch.equal(one.reshape(-1).view(whole), other.reshape(-1).view(whole))
    right = []
    for (first, second), key in zip(alone, single, strict=True):
        for m, old, v in unpack([first], [second], [key]):
            right.append(old.reshape(-1).clone())
            m.mul_(2), v.mul_(3)
    for m, old, v in unpack(firsts, seconds, rows):
        assert torch.equal(old, torch.cat(right))
        m.mul_(2), v.mul_(3)
    for (m, v), first, second in zip(alone, firsts, seconds, strict=True):
        assert torch.equal(m, first)
        assert torch.equal(v, second)
