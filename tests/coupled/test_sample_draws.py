"""Draws that follow their samples: diffusion is the same however its batch is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import EXACT, Seen, distance
from wholebatch.compile import ExecuteWarning
from wholebatch.coupled.sample_draws import undivided
from wholebatch.errors import OptionError, UnsupportedError

Batch = dict[str, Tensor]


class UNet(nn.Module):
    """Two levels with a skip connection, GroupNorm, and the timestep added to every level."""

    def __init__(self, norm: Any = lambda c: nn.GroupNorm(2, c)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Linear(1, 8)
        self.down, self.deep = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(16, 1, 3, padding=1)
        self.norm = norm(8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        high = self.down(x) + self.time(t[:, None])[:, :, None, None]
        low = F.silu(self.norm(self.deep(F.silu(high))))
        out: Tensor = self.out(torch.cat([high, self.up(low)], 1))
        return out


class DiT(nn.Module):
    """Patches of an image through a block whose norm is scaled by timestep and label."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.label = nn.Linear(4, 16), nn.Embedding(4, 16)
        self.condition = nn.Linear(17, 48)
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.read = nn.Linear(16, 4)

    def forward(self, x: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        n = len(x)
        label = torch.zeros(n, dtype=torch.long) if label is None else label
        tokens = x.view(n, 4, 2, 4, 2).transpose(2, 3).reshape(n, 16, 4)
        scale, shift, gate = self.condition(torch.cat([self.label(label), t[:, None]], 1)).chunk(
            3, -1
        )
        hidden = self.patch(tokens)
        inner = self.norm(hidden) * (1 + scale[:, None]) + shift[:, None]
        hidden = hidden + gate[:, None] * self.mix(inner, inner, inner, need_weights=False)[0]
        out: Tensor = self.read(hidden).view(n, 4, 4, 2, 2).transpose(2, 3).reshape(x.shape)
        return out


def images(number: int = 13, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(number, 1, 8, 8, generator=generator, dtype=dtype),
        "label": torch.randint(1, 4, (number,), generator=generator),
    }


def by_unet(model: Any, micro: Batch) -> wb.Loss:
    """Denoising at a drawn timestep (DDPM)."""
    x = micro["x"]
    noise, t = wb.randn_like(x), wb.randint_like(micro["label"], 0, 1000)
    kept = torch.cos(t.to(x.dtype) / 1000 * torch.pi / 2)[:, None, None, None]
    made = model(kept * x + (1 - kept**2).sqrt() * noise, t.to(x.dtype) / 1000)
    return wb.Loss((made - noise).square().sum(), len(x))


def by_dit(model: Any, micro: Batch) -> wb.Loss:
    """Flow matching, with labels dropped for guidance."""
    x = micro["x"]
    noise, t = wb.randn_like(x), wb.rand_like(x[:, 0, 0, 0])
    label = micro["label"].where(wb.rand_like(t) >= 0.3, 0)
    at = t[:, None, None, None]
    return wb.Loss(
        (model((1 - at) * noise + at * x, t, label) - (x - noise)).square().sum(), len(x)
    )


CASES = [(UNet, by_unet), (DiT, by_dit)]


def stepped(
    model: Any, loss: Any, batch: Batch, micro_batch: int, **options: Any
) -> tuple[float, list[Tensor]]:
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch, **options)
    return train.step(batch).loss, seen.gradients[0]


@pytest.mark.parametrize(("make", "loss"), CASES)
@pytest.mark.parametrize("micro_batch", [1, 4, 5, 12])
@pytest.mark.parametrize("audit", [True, False])
def test_the_same_draws_and_update_however_split(
    make: Any, loss: Any, micro_batch: int, audit: bool
) -> None:
    model, batch = make().double(), images()
    torch.manual_seed(7)
    with undivided(lambda: range(13), torch.get_rng_state()):
        whole = loss(model, batch)
    mean = whole.total / whole.units
    reference = torch.autograd.grad(mean, list(model.parameters()))
    value, ours = stepped(model, loss, batch, micro_batch, audit=audit)
    assert distance(ours, reference) <= EXACT
    assert value == pytest.approx(mean.item(), rel=EXACT)
    assert distance(stepped(model, loss, batch, 13)[1], reference) <= EXACT


@pytest.mark.parametrize(("make", "loss"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verify_passes(make: Any, loss: Any, dtype: torch.dtype) -> None:
    verdict = wb.verify(make().to(dtype), loss, images(dtype=dtype), micro_batch=4)
    assert verdict.same, verdict
    assert not verdict.causes


def test_torchs_own_draws_are_still_found() -> None:
    def loss(model: Any, micro: Batch) -> wb.Loss:
        noise, t = torch.randn_like(micro["x"]), wb.rand_like(micro["x"][:, 0, 0, 0])
        t = t + torch.rand_like(t)
        return wb.Loss((model(micro["x"] + noise, t) - noise).square().sum(), len(t))

    verdict = wb.verify(UNet().double(), loss, images(), micro_batch=4)
    assert [cause.kind for cause in verdict.causes] == ["randomness"]


@pytest.mark.parametrize("options", [{}, {"dropout": "per-sample"}, {"audit": False}])
def test_every_window_draws_anew_and_torchs_generator_moves_on(options: dict[str, Any]) -> None:
    drawn: list[Tensor] = []

    def loss(model: Any, micro: Batch) -> wb.Loss:
        noise = wb.randn_like(micro["x"])
        drawn.append(noise)
        return wb.Loss((model(micro["x"], noise[:, 0, 0, 0]) - noise).square().sum(), len(noise))

    model = UNet().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=13, **options)
    for _ in range(3):
        train.step(images())
    assert len({float(one[0, 0, 0, 0]) for one in drawn}) == 3
    state = torch.get_rng_state()
    assert torch.equal(wb.randn_like(drawn[0]), _after(state, torch.randn_like, drawn[0]))


def _after(state: Tensor, draw: Any, like: Tensor) -> Tensor:
    torch.set_rng_state(state)
    made: Tensor = draw(like)
    return made


def test_two_passes_and_resuming(tmp_path: Any) -> None:
    batch = images()

    def encode(model: Any, micro: Batch) -> Tensor:
        t = wb.rand_like(micro["x"][:, 0, 0, 0])
        made: Tensor = model(micro["x"] + wb.randn_like(micro["x"]), t).flatten(1)
        return made

    coupled = wb.Coupled(encode, lambda z: wb.info_nce(z, z.roll(1, 0)))
    whole = stepped(UNet().double(), coupled, batch, 13)[1]
    assert distance(stepped(UNet().double(), coupled, batch, 4)[1], whole) <= EXACT

    found = []
    for stops in (False, True):
        torch.manual_seed(7)
        model = UNet().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = wb.WholeBatch(model, optimizer, loss=by_unet, micro_batch=4)
        saved: list[Any] = []
        train.step(batch, after_micro=lambda done, of, t=train, s=saved: s.append(t.state_dict()))
        if stops:
            again = UNet().double()
            optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
            other = wb.WholeBatch(again, optimizer, loss=by_unet, micro_batch=4)
            other.load_state_dict(saved[1])
            torch.manual_seed(99)
            other.step(batch)
            model = again
        found.append([p.detach().clone() for p in model.parameters()])
    assert distance(found[1], found[0]) <= EXACT


def test_the_numbers_are_of_their_distribution() -> None:
    x = torch.zeros(64, 4096)
    with undivided(lambda: range(64), torch.get_rng_state()):
        normal, flat = wb.randn_like(x), wb.rand_like(x)
        whole = wb.randint_like(x, -3, 5, dtype=torch.long)
        half = wb.rand_like(x.half())
        several = wb.randn_like(torch.zeros(128, 3))  # two draws for each sample
    for made, like in ((normal, torch.randn_like(x)), (flat, torch.rand_like(x))):
        for moment in (1, 2, 3, 4):
            assert made.pow(moment).mean() == pytest.approx(
                float(like.pow(moment).mean()), abs=0.03
            )
    assert whole.unique().tolist() == list(range(-3, 5))
    assert float(half.max()) < 1.0
    assert len(several.unique()) == 384
    assert abs(float(torch.corrcoef(torch.stack([normal[0], normal[1]]))[0, 1])) < 0.1


def test_what_cannot_follow_its_samples_is_refused() -> None:
    def shared(model: Any, micro: Batch) -> wb.Loss:
        noise = wb.randn_like(micro["x"][0, 0])  # one for all samples
        return wb.Loss((model(micro["x"], micro["x"][:, 0, 0, 0]) - noise).square().sum(), 1)

    with pytest.raises(UnsupportedError, match=r"in the shape \(8, 8\) in a micro-batch of 5"):
        stepped(UNet().double(), shared, images(), 5, audit=False)

    def checkpointed(model: Any, micro: Batch) -> wb.Loss:
        from torch.utils.checkpoint import checkpoint

        def block(x: Tensor) -> Tensor:
            made: Tensor = model(x + wb.randn_like(x), x[:, 0, 0, 0])
            return made

        out = checkpoint(block, micro["x"], use_reentrant=False)
        return wb.Loss(out.square().sum(), len(out))

    with pytest.raises(UnsupportedError, match="within a checkpointed block"):
        stepped(UNet().double(), checkpointed, images(), 5, audit=False)
    with pytest.raises(OptionError, match="low must be below high"):
        wb.randint_like(torch.zeros(3), 5, 5)


def test_graphs_give_way_to_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> object:
        raise UnsupportedError("as in torch.compile, without its seconds")

    monkeypatch.setattr(torch, "compile", lambda _: refuses)
    model, batch = UNet().double(), images()
    torch.manual_seed(7)
    train = wb.WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loss=by_unet,
        micro_batch=4,
        execute="compile",
    )
    with pytest.warns(ExecuteWarning) as said:
        step = train.step(batch)
    assert "number their samples in Python" in str(said[0].message)
    assert train._runner.executor.mode == "eager"
    assert step.loss == pytest.approx(stepped(UNet().double(), by_unet, batch, 13)[0], rel=EXACT)
