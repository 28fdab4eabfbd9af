"""Correct models, batches and optimizers: what they keep and draw is harmless."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.mistakes.cases import ALL, CASES, STREAMS, Make, correct, net
from tests.mistakes.kinds import classifier, classify, labelled, rows, run, squared
from tests.mistakes.kinds import task as of_kind
from tests.mistakes.sequences import of_tokens
from tests.mistakes.task import Batch, Sum, Task


class Remembers(nn.Module):
    """Keeps its last activations and a count, for somebody to look at; reads neither."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls, self.last = net(), 0, torch.empty(0)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + len(x)
        self.last = self.net(x)
        return self.last


@correct("WholeBatch", *STREAMS)
def a_model_that_remembers(draw: random.Random, samples: int) -> Task:
    return classifier(Remembers(), rows(samples, 5), 3)


@correct("WholeBatch", "Accumulator", "Lightning", "Trainer")
def a_loss_that_logs(draw: random.Random, samples: int) -> Task:
    made, log = classifier(net(), rows(samples, 5), 3), []

    def loss(model: nn.Module, micro: Batch) -> Any:
        given = made.sum(model, micro)
        log.append(given.value.item())
        return given

    return made.but(loss=loss)


class Rotary(nn.Module):
    """Angles that are made in the first forward and kept; attention within a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.norm, self.gate, self.up = nn.RMSNorm(8), nn.Linear(8, 12), nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.angles: Tensor | None = None

    def turn(self, x: Tensor) -> Tensor:
        if self.angles is None or len(self.angles) < x.shape[1]:
            self.angles = torch.outer(torch.arange(x.shape[1]), 0.1 ** torch.arange(4)).double()
        a, b = x.chunk(2, -1)
        cos, sin = self.angles[: x.shape[1]].cos(), self.angles[: x.shape[1]].sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        hidden = self.embed(x)
        key = self.turn(self.norm(hidden))
        hidden = hidden + F.scaled_dot_product_attention(key, key, hidden, is_causal=True)
        return self.head(hidden + self.down(F.silu(self.gate(hidden)) * self.up(hidden)))


@correct("WholeBatch", "Accumulator", "Trainer")
def rotary_angles_made_in_the_first_forward(draw: random.Random, samples: int) -> Task:
    return of_tokens(Rotary().double(), samples)


@correct("WholeBatch")
def instance_norm_with_running_statistics(draw: random.Random, samples: int) -> Task:
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)),
    )
    return classifier(model, torch.randn(samples, 1, 5, 5).double(), 3)


@correct("WholeBatch", "Accumulator", "Lightning")
def batchnorm_in_evaluation_mode(draw: random.Random, samples: int) -> Task:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].eval()
    made = classifier(model, rows(samples, 5), 3)

    def forward(m: nn.Module, b: Batch) -> Tensor:
        return m(b["x"])

    # Lightning sets every module to training when it begins: the model holds its norm still.
    model[1].train = lambda mode=True: model[1]  # type: ignore[method-assign,assignment]
    return made.but(forward=forward)


@correct("WholeBatch")
def batchnorm_with_a_cumulative_average(draw: random.Random, samples: int) -> Task:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))
    return classifier(model, rows(samples, 5), 3)


@correct("WholeBatch", "Accumulator")
def spectral_norm_held_still(draw: random.Random, samples: int) -> Task:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8))
    first.eval()
    return classifier(nn.Sequential(first, nn.Linear(8, 3)), rows(samples, 5), 3)


@correct("WholeBatch", "Accumulator")
def hooks_that_only_look(draw: random.Random, samples: int) -> Task:
    model, seen = net(), []
    model[0].register_forward_hook(lambda _m, _a, out: seen.append(out.detach().abs().mean()))
    return classifier(model, rows(samples, 5), 3)


@correct("WholeBatch", "Accumulator")
def a_gradient_hook_that_scales(draw: random.Random, samples: int) -> Task:
    """Gradient reversal: linear, so that it adds up."""
    made = classifier(net(), rows(samples, 5), 3)

    def forward(model: nn.Module, micro: Batch) -> Tensor:
        hidden = model[0](micro["x"])
        if hidden.requires_grad:
            hidden.register_hook(lambda g: -0.5 * g)
        return model[2](model[1](hidden))

    return made.but(forward=forward)


# Batches of many shapes


@correct("WholeBatch", "Accumulator")
def detection_with_lists_of_boxes(draw: random.Random, samples: int) -> Task:
    """A list of images, each with boxes of its own number; the loss is over boxes."""
    images = [torch.randn(2, 4, 4).double() for _ in range(samples)]
    targets = [{"boxes": torch.rand(draw.randint(0, 4), 4).double()} for _ in range(samples)]
    targets[0] = {"boxes": torch.rand(2, 4).double()}

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(64, 16)

        def forward(self, images: list[Tensor]) -> list[Tensor]:
            hidden = F.relu(self.body(torch.stack(images))).flatten(1)
            return list(self.head(hidden).view(-1, 4, 4))

    def loss(model: nn.Module, micro: Batch) -> Any:
        found = model(micro["images"])
        boxes = [one["boxes"] for one in micro["targets"]]
        parts = [
            F.smooth_l1_loss(a[: len(b)], b, reduction="sum")
            for a, b in zip(found, boxes, strict=True)
        ]
        return Sum(torch.stack(parts).sum(), sum(len(b) for b in boxes))

    batch = {"images": images, "targets": targets}
    return Task("", Detector().double(), batch, run, squared).but(loss=loss)


@correct("WholeBatch", "Accumulator", "Fabric")
def micro_batches_without_any_unit(draw: random.Random, samples: int) -> Task:
    made = of_kind("transformer", draw.randint(0, 99), samples)
    made.batch["mask"][:8] = False
    made.batch["mask"][:8, 0] = True
    counts = made.batch["mask"].clone()
    counts[:8] = False
    return made.but(batch={**made.batch, "counts": counts}, weights=lambda b: b["counts"].double())


# Randomness: nothing to compare with, and nothing to complain about


@correct(*ALL)
def noise_drawn_in_the_loss(draw: random.Random, samples: int) -> Task:
    made = of_kind("diffusion", draw.randint(0, 99))

    def loss(model: nn.Module, micro: Batch) -> Any:
        x = micro["x"]
        noise, time = torch.randn_like(x), torch.rand(len(x), dtype=x.dtype)
        out = made.forward(model, {"x": x, "noise": noise, "time": time})
        return Sum((out - noise).square().mean((1, 2, 3)).sum(), len(x))

    count = {"announced": lambda micro: len(micro["x"])}
    return made.but(loss=loss, random=True, **count)


@correct("WholeBatch", "Accumulator", "Lightning", "Trainer")
def a_vae_that_draws(draw: random.Random, samples: int) -> Task:
    made = of_kind("vae", draw.randint(0, 99))

    def forward(model: nn.Module, micro: Batch) -> Any:
        return model(micro["x"], torch.randn_like(micro["noise"]))

    return made.but(forward=forward, random=True)


@correct("WholeBatch", "Accumulator", "Lightning")
def stochastic_depth_and_flips(draw: random.Random, samples: int) -> Task:
    made = of_kind("cnn with groupnorm", draw.randint(0, 99))

    def forward(model: nn.Module, micro: Batch) -> Tensor:
        x = micro["x"]
        x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
        return model(x * (torch.rand(len(x), 1, 1, 1) < 0.9).to(x.dtype))

    return made.but(forward=forward, random=True)


@correct("WholeBatch", "Accumulator")
def gumbel_codes(draw: random.Random, samples: int) -> Task:
    made = classifier(net(), rows(samples, 5), 3)
    codes = nn.Parameter(rows(4, 3))

    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.codes = net(5, 4), codes

        def forward(self, x: Tensor) -> Tensor:
            return F.gumbel_softmax(self.net(x), tau=0.7) @ self.codes

    return made.but(model=Coded(), random=True)


@correct("WholeBatch", "Lightning")
def masked_patches_drawn_in_the_forward(draw: random.Random, samples: int) -> Task:
    made = Task("", net(6, 6), {"x": rows(samples, 6)}, run, squared)

    def loss(model: nn.Module, micro: Batch) -> Any:
        hide = torch.rand_like(micro["x"]) < 0.4
        out = model(micro["x"].masked_fill(hide, 0.0))
        return Sum(((out - micro["x"]).square() * hide).sum(), hide.sum())

    return made.but(loss=loss, random=True)


@correct("WholeBatch", "Lightning", "Trainer")
def dropout_everywhere(draw: random.Random, samples: int) -> Task:
    model = nn.Sequential(
        *(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.AlphaDropout(0.1), nn.Linear(8, 3))
    )
    return classifier(model, rows(samples, 5), 3).but(random=True)


# Optimizers and options


def orthogonal(gradient: Tensor) -> Tensor:
    """Newton–Schulz, as Muon has it, in the gradient's own precision."""
    x = gradient / (gradient.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


class OwnMuon(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    move = orthogonal(p.grad) if p.dim() == 2 else p.grad
                    p.sub_(move, alpha=group["lr"])
        return value


def optimized(make: Any, **options: Any) -> Make:
    def case(draw: random.Random, samples: int) -> Task:
        made = classifier(net(), rows(samples, 5), 3)
        return made.but(optimizer=lambda model: make(list(model.parameters())), options=options)

    return case


CASES["muon of one's own"] = (optimized(lambda p: OwnMuon(p, lr=0.1)), ALL)
CASES["adamw"] = (optimized(lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3)), ALL)
CASES["momentum by nesterov"] = (
    optimized(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    ("WholeBatch", "Accumulator"),
)
CASES["rmsprop"] = (optimized(lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3)), ("WholeBatch",))
CASES["adafactor"] = (optimized(lambda p: torch.optim.Adafactor(p, lr=0.1)), ("Accumulator",))


@correct("WholeBatch", "Accumulator")
def torchs_muon(draw: random.Random, samples: int) -> Task:
    """Its Newton–Schulz iteration is in bfloat16, so the update is compared coarsely."""
    made = classifier(nn.Linear(5, 3, bias=False), rows(samples, 5), 3)
    return made.but(
        optimizer=lambda model: torch.optim.Muon(list(model.parameters()), lr=0.1), tolerance=0.05
    )


@correct("WholeBatch", "Accumulator")
def parameters_in_16_bits(draw: random.Random, samples: int) -> Task:
    """Sums are kept in float32: as near as the undivided batch's own rounding."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()

    def forward(m: nn.Module, b: Batch) -> Tensor:
        return m(b["x"].bfloat16()).float()

    batch = labelled(torch.randn(samples, 5), 3)
    made = Task("", model, batch, forward, classify, lambda b: torch.ones(len(b["y"])))
    return made.but(tolerance=0.1)
