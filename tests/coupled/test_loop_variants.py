"""Loops of the user's own, followed in their first window: what they are refused for.

Every loop is compared with the undivided batch in float64, over uneven micro-batches.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import mlp, pieces, samples, sgd
from wholebatch.coupled.followed_tensor import FollowedTensor
from wholebatch.coupled.loop_variants import LoopVariants

Micro = dict[str, Tensor]
Body = Callable[[nn.Module, Micro], tuple[Any, ...]]
SIZES = [5, 8, 4]


def batch_of(size: int) -> Micro:
    batch = samples(size)
    torch.manual_seed(3)
    return batch | {
        "noise": torch.randn(size, 5).double(),
        "length": torch.randint(1, 6, (size,)),
        "mask": torch.rand(size, 3) < 0.7,
        "weight": torch.rand(size).double() + 0.5,
        "seq": torch.randn(size, 6, 5).double(),
    }


def step_of(model: nn.Module, body: Body, micros: Any, acc: Any = None) -> None:
    """Make one update: of all micro-batches by `acc`, or of the one that is given."""
    for micro in micros:
        loss, units, *is_mean = body(model, micro)
        if acc is None:
            (loss if is_mean else loss / units).backward()
            sgd(model).step()
        elif is_mean:
            acc.backward(mean=loss, units=units)
        else:
            acc.backward(loss, units=units)


def gap(body: Body, *, driven: bool, audit: bool = True, model: nn.Module | None = None) -> float:
    """Return the largest difference of an update from that of the undivided batch."""
    model = mlp() if model is None else model
    whole, own = copy.deepcopy(model), copy.deepcopy(model)
    acc = wb.Accumulator(own, sgd(own), steps=len(SIZES), audit=audit)
    micros: Any = pieces(batch_of(sum(SIZES)), SIZES)
    step_of(own, body, acc.over(micros) if driven else micros, acc)
    assert acc.updates == 1
    step_of(whole, body, [batch_of(sum(SIZES))])
    pairs = zip(own.parameters(), whole.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def losses(z: Tensor, micro: Micro) -> Tensor:
    return F.cross_entropy(z, micro["y"], reduction="none")


# ------------------------------------------------------------------------------ right loops

RIGHT: dict[str, tuple[Body, Callable[[], nn.Module]]] = {}


def right(body: Body | None = None, *, model: Callable[[], nn.Module] = mlp) -> Any:
    def add(body: Body) -> Body:
        RIGHT[body.__name__] = body, model
        return body

    return add if body is None else add(body)


@right
def plain_mean(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    return F.cross_entropy(model(micro["x"]), micro["y"]), len(micro["y"]), "mean"


@right
def logs_statistics_of_the_micro_batch(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    each = losses(z, micro)
    shown = [z.detach().mean(), z.std(0), (z.argmax(1) == micro["y"]).double().mean(), each.max()]
    assert all(float(one.detach().norm()) >= 0 for one in shown)
    return each.sum(), len(each)


@right
def written_in_place(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    z *= 2
    z[:, 0] += 1
    z -= z.detach().amax(1, keepdim=True)
    return losses(z, micro).sum(), len(z)


@right
def masked_in_place(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = (model(micro["x"]) - 1).square()
    each[~micro["mask"]] = 0
    return each.sum(), micro["mask"].sum()


@right
def picked_by_a_mask(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = (model(micro["x"]) - 1).square()[micro["mask"]]
    return each.sum(), each.numel()


@right
def mean_over_a_mask(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each, mask = (model(micro["x"]) - 1).square(), micro["mask"]
    return (each * mask).sum() / mask.sum(), mask.sum(), "mean"


@right
def mean_over_a_counted_mask(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each, count = (model(micro["x"]) - 1).square(), int(micro["mask"].sum())
    return (each * micro["mask"]).sum() / count, count, "mean"


@right
def weights_of_the_samples(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each, weight = losses(model(micro["x"]), micro), micro["weight"]
    return (each * weight).sum(), weight.sum()


@right
def weights_by_confidence(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    return (losses(z, micro) * z.detach().softmax(1).amax(1)).sum(), len(z)


@right
def focal(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = losses(model(micro["x"]), micro)
    return ((1 - (-each).exp()) ** 2 * each).sum(), len(each)


@right
def confident_samples_only(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    sure = z.detach().softmax(1).amax(1) > 0.4
    return (losses(z, micro) * sure).sum(), len(z)


@right
def one_sample_after_the_other(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    both = zip(model(micro["x"]), micro["y"], strict=True)
    rows = [F.cross_entropy(row, goal) for row, goal in both]
    return torch.stack(rows).sum(), len(rows)


@right
def added_in_a_loop(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    total = torch.zeros((), dtype=torch.float64)
    for row, goal in zip(model(micro["x"]).unbind(), micro["y"].tolist(), strict=True):
        total = total - row.log_softmax(0)[goal]
    return total, len(micro["y"])


@right
def into_a_buffer(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    buffer = torch.zeros(len(z), 3, dtype=z.dtype)
    buffer[: len(z) // 2] = z[: len(z) // 2] * 2
    buffer[len(z) // 2 :] = z[len(z) // 2 :] * 2
    return losses(buffer, micro).sum(), len(z)


@right
def in_chunks(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = torch.cat([model(part) for part in micro["x"].split(2)])
    return losses(z, micro).sum(), len(z)


@right
def shuffled(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    order = torch.randperm(len(micro["x"]))
    z = model(micro["x"][order])
    return F.cross_entropy(z, micro["y"][order], reduction="sum"), len(z)


@right
def sorted_by_length(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    order = micro["length"].argsort(descending=True)
    z = model(micro["x"][order])
    return (losses(z[order.argsort()], micro) * micro["length"]).sum(), micro["length"].sum()


@right
def noise_of_the_samples(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"] + 0.1 * micro["noise"])
    return losses(z, micro).sum(), len(z)


@right
def reconstruction(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    x = micro["x"].flatten(1)
    return (model(x) - x[:, :3]).square().mean(1).sum(), len(x)


@right
def two_views(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    a, b = model(micro["x"]), model(micro["x"] + micro["noise"])
    return (1 - F.cosine_similarity(a, b.detach())).sum(), len(a)


@right
def two_views_in_one_call(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    a, b = model(torch.cat([micro["x"], micro["x"] + micro["noise"]])).chunk(2)
    return (a - b.detach()).square().sum(), len(a)


@right
def target_by_the_model_itself(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    with torch.no_grad():
        goal = model(micro["x"]).softmax(1)
    z = model(micro["x"] + micro["noise"])
    return F.cross_entropy(z, goal, reduction="sum"), len(z)


TEACHER = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()


@right
def a_teacher(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    with torch.no_grad():
        goal = TEACHER(micro["x"])
    z = model(micro["x"])
    kl = F.kl_div(z.log_softmax(1), goal.log_softmax(1), reduction="batchmean", log_target=True)
    return kl, len(z), "mean"


@right
def normalised_in_each_sample(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    x = micro["x"]
    z = model((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1))
    return losses(z / z.detach().norm(dim=1, keepdim=True), micro).sum(), len(z)


@right
def through_numpy(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(torch.from_numpy(micro["x"].numpy() * 2))
    goal = torch.from_numpy(z.detach().numpy().argmax(1))
    return F.cross_entropy(z, goal, reduction="sum"), len(z)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


@right
def custom_function(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = Doubled.apply(model(micro["x"]))
    return losses(z + z.detach(), micro).sum(), len(micro["y"])


@right
def by_vmap(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    each = torch.vmap(lambda row, weight: row.square().sum() * weight)(z, micro["weight"])
    return each.sum(), len(z)


@right
def checkpointed_loss(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    return checkpoint(lambda z: losses(z, micro).sum(), z, use_reentrant=False), len(z)


def _centred(z: Tensor, goal: Tensor) -> Tensor:
    return F.cross_entropy(z - z.detach().mean(1, keepdim=True), goal, reduction="sum")


@right
def compiled_loss(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    run = torch.compile(_centred, backend="eager", fullgraph=True)
    return run(model(micro["x"]), micro["y"]), len(micro["y"])


@right
def a_gradient_penalty(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    x = micro["x"].clone().requires_grad_()
    z = model(x)
    (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return losses(z, micro).sum() + (slope.norm(dim=1) - 1).square().sum(), len(z)


@right
def a_hook_on_the_output(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    z.register_hook(lambda gradient: 2 * gradient)
    return losses(z, micro).sum(), len(z)


@right
def copied_and_pickled(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    kept, file = copy.deepcopy(z.detach()), io.BytesIO()
    torch.save({"z": kept, "x": micro["x"]}, file)
    file.seek(0)
    goal = pickle.loads(pickle.dumps(torch.load(file)["z"]))
    assert type(goal) is Tensor
    return (z - goal / 2).square().sum(), len(z)


@right
def einsum_and_gather(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = torch.einsum("bi,ij->bj", model(micro["x"]), torch.eye(3).double() * 2)
    return -z.log_softmax(1).gather(1, micro["y"][:, None]).sum(), len(z)


@right
def scattered_targets(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    goal = torch.zeros_like(z).scatter_(1, micro["y"][:, None], 1.0).mul_(0.9).add_(0.1 / 3)
    return -(goal * z.log_softmax(1)).sum(), len(z)


@right
def by_a_spectrum(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = torch.fft.rfft(model(micro["x"]), dim=1)
    return z.abs().square().sum(), len(z)


@right
def quantiles_of_each_sample(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    return (z - z.detach().median(1, keepdim=True).values).abs().sum(), len(z)


@right
def clipped_ratio(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    log_p = model(micro["x"]).log_softmax(1).gather(1, micro["y"][:, None])[:, 0]
    ratio, gain = (log_p - log_p.detach()).exp(), micro["weight"] - 1
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum(), len(ratio)


@right
def tokens(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z, count = model(micro["seq"]), torch.arange(6) < micro["length"][:, None]
    each = z.square().sum(2) * count
    return each.sum() / count.sum(), count.sum(), "mean"


@right
def advantages_within_a_sequence(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["seq"])
    gain = z.detach()[..., 0]
    gain = gain - gain.mean(1, keepdim=True)
    return (z.log_softmax(2)[..., 1] * gain).sum(), gain.numel()


@right
def time_first(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["seq"].transpose(0, 1).contiguous())
    gain = z.detach()[..., 0]
    return (z.log_softmax(2)[..., 1] * (gain - gain.mean(0))).sum(), gain.numel()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.GRU(5, 3, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


@right(model=lambda: Recurrent().double())
def packed_sequences(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    length = micro["length"]
    packed = pack_padded_sequence(micro["seq"], length, batch_first=True, enforce_sorted=False)
    z, _ = pad_packed_sequence(model(packed), batch_first=True)
    return z.square().sum(), length.sum()


@right
def pairs(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    good, bad = model(micro["x"])[:, 0], model(micro["noise"])[:, 0]
    return -F.logsigmoid(good - bad).sum(), len(good)


@right
def several_lists_and_dicts(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    made = {"z": model(micro["x"]), "others": [model(micro["noise"])]}
    parts = [losses(one, micro) for one in (made["z"], *made["others"])]
    return torch.stack(parts).sum(), len(parts[0])


@right
def parts_of_the_loss(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    parts = {"data": losses(z, micro).mean(), "size": 0.1 * z.square().mean()}
    return sum(parts.values()), len(z), "mean"


@right
def by_another_thread(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(losses(z, micro).detach().exp()))
    thread.start()
    thread.join()
    return (losses(z, micro) * made[0]).sum(), len(z)


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.calls += 1
        return func(*args, **(kwargs or {}))


@right
def under_a_mode_of_its_own(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    with Counting():
        z = model(micro["x"])
        return losses(z * z.detach().abs(), micro).sum(), len(z)


@right
def a_scripted_loss(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    run = torch.jit.trace(lambda z: z.square().sum(), torch.ones(2, 3).double(), check_trace=False)
    return run(model(micro["x"])), len(micro["x"])


@right
def a_penalty_on_the_weights(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(micro["x"]), micro["y"]) + 0.01 * penalty, len(micro["y"]), "mean"


@right
def sums_of_other_data(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    other = torch.arange(20).double().view(4, 5)
    z = model(micro["x"]) - model(other).detach().mean(0)
    return losses(z, micro).sum(), len(z)


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")
@pytest.mark.parametrize("driven", [True, False])
@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_pass(name: str, driven: bool, caplog: pytest.LogCaptureFixture) -> None:
    body, model = RIGHT[name]
    assert gap(body, driven=driven, model=model()) < 1e-12
    assert not [one for one in caplog.records if one.name == "wholebatch"]


# ------------------------------------------------------------------------------ wrong loops

WRONG: dict[str, tuple[Body, str]] = {}


def wrong(outcome: str) -> Callable[[Body], Body]:
    """`refused`; or `told` by a warning, if the micro-batch came by `over`."""

    def add(body: Body) -> Body:
        WRONG[body.__name__] = body, outcome
        return body

    return add


@wrong("refused")
def centred_by_a_detached_mean(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    return losses(z - z.detach().mean(0), micro).sum(), len(z)


@wrong("refused")
def divided_by_a_detached_deviation(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    with torch.no_grad():
        deviation = z.std(0)
    return losses(z / deviation, micro).mean(), len(z), "mean"


@wrong("refused")
def above_the_median(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = losses(model(micro["x"]), micro)
    return (each * (each.detach() >= each.detach().median())).sum(), len(each)


@wrong("refused")
def clipped_at_a_quantile(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = losses(model(micro["x"]), micro)
    return each.clamp(max=each.detach().quantile(0.6)).sum(), len(each)


@wrong("refused")
def weights_by_a_softmax(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = losses(model(micro["x"]), micro)
    return (each * each.detach().softmax(0)).sum() * len(each), len(each)


@wrong("refused")
def weights_by_rank(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = losses(model(micro["x"]), micro)
    return (each * each.detach().argsort().argsort()).sum(), len(each)


@wrong("refused")
def divided_by_the_largest(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = losses(model(micro["x"]), micro)
    return (each / each.detach().max()).sum(), len(each)


@wrong("refused")
def prototypes_of_the_classes(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    which = F.one_hot(micro["y"], 3).double()
    centres = (which.T @ z.detach()) / which.sum(0).clamp_min(1)[:, None]
    return (z - centres[micro["y"]]).square().sum(), len(z)


@wrong("refused")
def similar_to_detached_samples(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    scores = z @ z.detach().T
    return F.cross_entropy(scores, torch.arange(len(z)), reduction="sum"), len(z)


@wrong("refused")
def centred_targets_of_the_model_itself(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    with torch.no_grad():
        goal = model(micro["noise"])
        goal = (goal - goal.mean(0)).softmax(1)
    z = model(micro["x"])
    return F.cross_entropy(z, goal, reduction="sum"), len(z)


@wrong("refused")
def centred_through_a_buffer(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    buffer = torch.empty(len(z), 3, dtype=z.dtype)
    buffer[:] = z.detach()
    return losses(z - buffer.mean(0), micro).sum(), len(z)


@wrong("refused")
def advantages_of_the_outputs(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    gain = micro["weight"] - z[:, 2].detach()
    gain = gain - gain.mean()
    return (z.log_softmax(1)[:, 0] * gain).sum(), len(z)


@wrong("refused")
def a_share_of_the_micro_batch(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    shares = z.detach().softmax(1).mean(0)
    return (z.softmax(1) * shares).sum(), len(z)


@wrong("refused")
def in_a_loop_over_the_samples(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    rows = [row - z.detach().mean(0) for row in z]
    return torch.stack(rows).square().sum(), len(z)


@wrong("refused")
def tokens_above_the_mean_of_all(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    each = model(micro["seq"]).square().sum(2)
    return (each * (each.detach() > each.detach().mean())).mean(1).sum(), len(each)


@wrong("told")
def mixed_samples(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(0.7 * micro["x"] + 0.3 * micro["x"].flip(0))
    return losses(z, micro).sum(), len(z)


@wrong("told")
def cut_and_pasted(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    x = micro["x"].clone()
    x[:, 2:] = micro["x"].roll(1, 0)[:, 2:]
    return losses(model(x), micro).sum(), len(x)


@wrong("told")
def mixed_labels(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    goal = F.one_hot(micro["y"], 3).double()
    return F.cross_entropy(z, 0.8 * goal + 0.2 * goal.mean(0), reduction="sum"), len(z)


@wrong("told")
def centred_inputs(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"] - micro["x"].mean(0))
    return losses(z, micro).sum(), len(z)


@wrong("told")
def scaled_by_the_largest_input(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"] / micro["x"].abs().max())
    return losses(z, micro).sum(), len(z)


@wrong("told")
def weights_by_frequency(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    weight = 1 / micro["y"].bincount(minlength=3).clamp_min(1).double()
    z = model(micro["x"])
    return F.cross_entropy(z, micro["y"], weight, reduction="none").sum(), len(z)


@wrong("told")
def centred_rewards(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    gain = micro["weight"] - micro["weight"].mean()
    return (model(micro["x"]).log_softmax(1)[:, 0] * gain).sum(), len(gain)


@wrong("told")
def ranks_of_rewards(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    gain = micro["weight"].argsort().argsort().double()
    return (model(micro["x"]).log_softmax(1)[:, 0] * gain).sum(), len(gain)


BARE = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False)).double()


@wrong("a BatchNorm")
def a_teacher_without_running_statistics(model: nn.Module, micro: Micro) -> tuple[Any, ...]:
    z = model(micro["x"])
    return (z - BARE(micro["x"]).detach()).square().sum(), len(z)


@pytest.mark.parametrize("driven", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_are_refused_or_told(
    name: str, driven: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body, outcome = WRONG[name]
    assert gap(body, driven=driven, audit=False) > 1e-6
    assert not caplog.records
    if outcome == "refused":
        with pytest.raises(wb.errors.LossError, match="compares samples with each other"):
            gap(body, driven=driven)
    elif outcome == "a BatchNorm" and driven:
        with pytest.raises(wb.errors.UnsupportedError, match="runs a BatchNorm1d in training mode"):
            gap(body, driven=driven)
    elif driven:
        gap(body, driven=driven)
        assert "depends on the data of other samples" in caplog.text


def test_every_term_of_a_loss_is_looked_at() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    acc.announce({"a": 9, "b": 9})
    z = model(batch_of(5)["x"])
    first, second = z.square().sum(), (z - z.detach().mean(0)).square().sum()
    with pytest.raises(wb.errors.LossError, match="compares samples with each other"):
        acc.backward(wb.Loss.terms({"a": (first, 5), "b": (second, 5)}))


def test_the_random_numbers_of_a_loop_are_those_that_it_would_have_drawn() -> None:
    drawn = []
    for audit in (True, False):
        model = mlp()
        acc = wb.Accumulator(model, sgd(model), steps=2, audit=audit)
        torch.manual_seed(1)
        for micro in acc.over(pieces(batch_of(12), [5, 7])):
            z = F.dropout(model(micro["x"] + torch.randn_like(micro["x"])), 0.4)
            drawn.append(z.detach().clone())
            acc.backward(losses(z, micro).sum(), units=len(z))
        drawn.append(torch.rand(2))
    assert all(torch.equal(a, b) for a, b in zip(drawn[:3], drawn[3:], strict=True))


def test_buffers_that_a_call_writes_into_move_once() -> None:
    batch, means = batch_of(9), []
    for audit in (True, False):
        model, other = mlp(), nn.BatchNorm1d(5).double()
        acc = wb.Accumulator(model, sgd(model), steps=2, audit=audit)
        for micro in acc.over(pieces(batch, [5, 4])):
            other(micro["x"])  # to log something
            acc.backward(losses(model(micro["x"]), micro).sum(), units=len(micro["x"]))
        means.append(other.running_mean)
    assert torch.equal(means[0], means[1])


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


def gathered_in_a_list(one: Tensor) -> Tensor:
    every = [torch.empty_like(one)]
    torch.distributed.all_gather(every, one)
    return every[0]


def gathered_in_a_tensor(one: Tensor) -> Tensor:
    every = torch.empty_like(one)
    torch.distributed.all_gather_into_tensor(every, one)
    return every


def added_over_the_ranks(one: Tensor) -> Tensor:
    torch.distributed.all_reduce(one)
    return one


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
@pytest.mark.parametrize("couples", [True, False])
@pytest.mark.parametrize(
    "collective", [gathered_in_a_list, gathered_in_a_tensor, added_over_the_ranks]
)
def test_collectives_are_followed_and_made_once(
    collective: Callable[[Tensor], Tensor], couples: bool, one_rank: None
) -> None:
    """Ranks with other sizes would wait for each other, if each made its calls again."""
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    made = []
    with torch.profiler.profile() as profile:
        for micro in acc.over(pieces(batch_of(9), [5, 4])):
            z = model(micro["x"])
            mean = collective(z.detach().mean(0))
            made.append(type(mean))
            loss = losses(z - mean if couples else z, micro).sum()
            if couples:
                with pytest.raises(wb.errors.LossError, match="compares samples with each other"):
                    acc.backward(loss, units=len(z))
                break
            acc.backward(loss, units=len(z))
    calls = [one.count for one in profile.key_averages() if one.key.startswith("gloo:")]
    assert calls == [len(made)]
    assert made[0] is FollowedTensor


# ------------------------------------------------------------------------------ nothing is left


def left_by_break(acc: wb.Accumulator, model: nn.Module) -> Any:
    for micro in acc.over(pieces(batch_of(8), [5, 3])):
        z = model(micro["x"])
        return micro["x"], z, losses(z, micro)


def left_by_an_error(acc: wb.Accumulator, model: nn.Module) -> Any:
    kept: list[Any] = []
    try:
        for micro in acc.over(pieces(batch_of(8), [5, 3])):
            kept += [micro["x"], model(micro["x"])]
            raise ValueError("of the user's own")
    except ValueError as error:
        kept.append(error)  # its traceback holds the loop
    return kept


def left_as_an_iterator(acc: wb.Accumulator, model: nn.Module) -> Any:
    loop = acc.over(pieces(batch_of(8), [5, 3]))
    micro = next(loop)
    return micro["x"], model(micro["x"]), loop


def left_without_a_loader(acc: wb.Accumulator, model: nn.Module) -> Any:
    z = model(batch_of(4)["x"])
    return z, z.softmax(1)


def left_in_a_model(acc: wb.Accumulator, model: nn.Module) -> Any:
    micro = next(iter(acc.over(pieces(batch_of(8), [5, 3]))))
    with pytest.raises(RuntimeError):
        model(micro["x"].flatten())
    return micro["x"], micro["noise"]


@pytest.mark.parametrize(
    "leave",
    [left_by_break, left_by_an_error, left_as_an_iterator, left_without_a_loader, left_in_a_model],
)
def test_a_loop_that_is_left_leaves_nothing_on(leave: Callable[..., Any]) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    kept = leave(acc, model)
    assert torch._C._len_torch_function_stack() == 0
    assert type(torch.ones(2) + torch.ones(2)) is Tensor  # What else runs is not seen.
    for _ in range(5000):  # What is left is followed for a while, and no longer.
        kept[0] + 1
    assert not acc._look._variants.on
    tensors = [one for one in kept if isinstance(one, Tensor)]
    assert all(type(one) is Tensor for one in tensors)
    assert type(tensors[1] * 2) is Tensor


def test_what_is_left_is_plain_when_the_accumulator_is_gone() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    z = model(batch_of(4)["x"])
    held = weakref.ref(batch_of(2)["x"])
    assert type(z) is FollowedTensor
    del acc
    assert type(z * 2) is Tensor
    assert type(z) is Tensor
    assert held() is None


def test_two_loops_at_once() -> None:
    """The later one is followed; both are exact."""
    model, other = mlp(), mlp()
    first, second = (wb.Accumulator(m, sgd(m), steps=3) for m in (model, other))
    body, micros = RIGHT["written_in_place"][0], pieces(batch_of(17), SIZES)
    loops: list[Iterator[Any]] = [first.over(micros), second.over(micros)]
    for a, b in zip(*loops, strict=True):
        step_of(model, body, [a], first)
        step_of(other, body, [b], second)
    whole = mlp()
    step_of(whole, body, [batch_of(17)])
    for made in (model, other):
        for a, b in zip(made.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_ends_with_the_next_one() -> None:
    x = torch.ones(4, 2)
    first, second = LoopVariants(), LoopVariants()
    first.start([x])
    made = x + 1
    assert type(made) is FollowedTensor
    second.start([])
    assert [type(one) for one in (x, made, x + 1)] == [Tensor] * 3
    assert not first.on
    second.stop(clear=True)


def test_later_windows_are_not_followed() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    kinds = []
    for micro in acc.over(pieces(batch_of(16), [4, 4, 4, 4])):
        kinds.append(type(micro["x"]))
        z = model(micro["x"])
        assert type(z) is kinds[-1]
        acc.backward(losses(z, micro).sum(), units=4)
        assert type(z) is type(micro["x"]) is Tensor
    assert kinds == [FollowedTensor, Tensor, Tensor, Tensor]
