"""`wb.watch`: a live loop's mistake is told by its name, and right loops are left in peace."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import wholebatch as wb
from tests import processes
from tests.distributed.launch import reports
from tests.verification.loops.live import KINDS, MISTAKES, STYLES, found_in, quiet, verdict_of
from tests.verification.loops.mistakes import UNUSUAL_MISTAKES
from tests.verification.loops.right import RIGHT, sums_over_counted_units
from tests.verification.loops.unusual import COUPLED, UNUSUAL, batchnorm_model
from wholebatch.cli.app import run
from wholebatch.verification import ZOO, LoopVerdict

ROOT = Path(__file__).parents[2]
KIND = list(KINDS)
NOT_SEEN = {
    "functional_gradients",
    "a_copy_per_micro_batch",
    "with_a_regulariser",
    "buffers_of_its_own",
    "backwards_in_pairs",
    "two_backwards_of_a_forward",
    "one_backward_for_all",
    "evaluated_between",
}
"""Right loops that are not judged: no backward brings the gradients, or a weight is not known."""
OTHER_NAMES = {
    "clipped_in_a_hook": "unknown",
    "head_stepped_every_time": "not judged",
    "running_loss": "not judged",
    "mean_of_a_stack": "not judged",
}
"""Mistakes that are found with another name or with none, or that are not judged."""


def watched(loop: Any, model: nn.Module, *, case: str = "mlp", even: bool = False) -> LoopVerdict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with quiet(), wb.watch(model, optimizer) as watch:
        for count in (4, 4, 3):
            loop(model, optimizer, ZOO[case].window(4, even, 0)[:count])
    return watch.verdict


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    kind = KIND[list(MISTAKES).index(name) % 4]
    verdict = verdict_of("plain torch", kind, MISTAKES[name])
    assert found_in(verdict) == MISTAKES[name].key, f"{kind}: {verdict}"
    assert verdict.exit_status == 1
    assert verdict.mistake is not None
    assert verdict.mistake.name in verdict.line


def test_unusual_mistakes_are_named() -> None:
    for loop, key in UNUSUAL_MISTAKES.items():
        verdict = watched(loop, ZOO["mlp"].model())
        wanted = OTHER_NAMES.get(loop.__name__, key)
        assert found_in(verdict) == wanted, f"{loop.__name__}: {verdict}"


def test_right_loops_are_left_in_peace() -> None:
    for place, (name, plant) in enumerate(STYLES.items()):
        verdict = verdict_of("plain torch", KIND[place % 4], plant)
        assert found_in(verdict) == plant.key, f"{name}: {verdict}"
    for loop in UNUSUAL:
        verdict = watched(loop, ZOO["mlp"].model())
        wanted = "not judged" if loop.__name__ in NOT_SEEN else "right"
        assert found_in(verdict) == wanted, f"{loop.__name__}: {verdict}"
    for place, loop in enumerate(RIGHT[2:]):
        case = ("mlp", "lm")[place % 2]
        verdict = watched(loop, ZOO[case].model(), case=case)
        wanted = "not judged" if loop.__name__ in NOT_SEEN else "right"
        assert found_in(verdict) == wanted, f"{loop.__name__}: {verdict}"


@pytest.mark.parametrize(
    ("in_loss", "after", "found"),
    [
        (lambda n: n, lambda n: 1, "right"),
        (lambda n: 1, lambda n: n, "right"),
        (lambda n: 2, lambda n: n / 2, "right"),
        (lambda n: 2, lambda n: 1, "nominal-count"),
        (lambda n: 1, lambda n: 2, "nominal-count"),
    ],
)
def test_longer_windows_after_a_right_one(in_loss: Any, after: Any, found: str) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(), wb.watch(model, optimizer) as watch:
        for count in (2, 4, 6):
            for _ in range(count):
                x, y = torch.randn(4, 6), torch.randint(0, 5, (4,))
                (F.cross_entropy(model(x), y) / in_loss(count)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= after(count)
            optimizer.step()
            optimizer.zero_grad()
    assert found_in(watch.verdict) == found, watch.verdict


def test_what_would_be_wrong_in_every_window_is_not_named_beside_a_right_one() -> None:
    """Two means over 4 are half of the mean: "divided twice" in this window alone."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(), wb.watch(model, optimizer) as watch:
        for count in (4, 4, 2):
            for x in torch.randn(count, 8, 6):
                (model(x).square().mean() / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.verdict.mistakes == ("nominal-count",)
    assert "divided twice" not in str(watch.verdict)


def test_steps_of_a_divided_loss_have_one_cause() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        for micro in micros:
            (F.cross_entropy(model(micro["x"]), micro["y"]) / 8).backward()
            optimizer.step()
            optimizer.zero_grad()

    verdict = watched(loop, ZOO["mlp"].model(), even=True)
    assert verdict.mistakes == ("stepped-every-micro-batch",)
    assert "(or:" not in verdict.line


def test_gradients_of_every_sample_beside_the_loop() -> None:
    """Per-sample gradients for a log are no backward of the loop, and do not end the watch."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    with quiet(), wb.watch(model, optimizer) as watch:
        for _ in range(4):
            x, y = torch.randn(4, 6), torch.randint(0, 5, (4,))
            held = {name: p.detach() for name, p in model.named_parameters()}
            each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(held, x, y)
            norms.append(sum(float(one.norm()) for one in each.values()))
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert found_in(watch.verdict) == "not-divided", watch.verdict


@pytest.mark.parametrize(("divisor", "found"), [(4, "right"), (1, "not-divided")])
def test_a_backward_inside_a_forward(divisor: int, found: str) -> None:
    """Lightning's manual steps run so in DDP."""

    class Step(nn.Linear):
        def forward(self, x: Any) -> Any:
            loss = super().forward(x).square().mean()
            (loss / divisor).backward()
            return loss.detach()

    model = Step(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with quiet(), wb.watch(model, optimizer) as watch:
        for x in torch.randn(4, 5, 3):
            model(x)
        optimizer.step()
    assert found_in(watch.verdict) == found, str(watch.verdict)


@pytest.mark.parametrize(("cached", "found"), [(True, "not judged"), (False, "not-divided")])
def test_features_of_other_micro_batches(cached: bool, found: str) -> None:
    """open_clip keeps features: each loss is that of the whole batch, and adding them is right."""
    torch.manual_seed(0)
    left, right = nn.Linear(6, 8), nn.Linear(6, 8)
    optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()], 0.1)
    parts = torch.randn(3, 4, 6)
    with quiet(), wb.watch(nn.ModuleList([left, right]), optimizer) as watch:
        with torch.no_grad():
            kept = [(left(x), right(x)) for x in parts]
        for i, x in enumerate(parts):
            here = [(left(x), right(x)) if i == j else pair for j, pair in enumerate(kept)]
            pairs = here if cached else here[i : i + 1]
            a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
            F.cross_entropy(a @ b.T, torch.arange(len(a))).backward()
        optimizer.step()
    assert found_in(watch.verdict) == found, str(watch.verdict)


class ComparesInside(nn.Module):
    """A model that computes its loss itself, and couples its samples in it if asked."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.left, self.right, self.couples = nn.Linear(6, 8), nn.Linear(6, 8), couples

    def forward(self, x: Any) -> dict[str, Any]:
        left, right = self.left(x), self.right(x.flip(-1))
        labels = torch.arange(len(x)) if self.couples else torch.zeros(len(x), dtype=torch.long)
        logits = left @ right.T if self.couples else left * right
        return {"loss": F.cross_entropy(logits, labels), "unused": right * 2}


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("found", ["right", "not judged"])
def test_a_loss_inside_ddp(found: str) -> None:
    """DDP passes losses on through a node of its own, and gives unused outputs no gradient."""
    with one_rank():
        torch.manual_seed(0)
        model = ComparesInside(found != "right")
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        with quiet(), wb.watch(model) as watch:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for x in torch.randn(4, 5, 6):
                (wrapped(x)["loss"] / 4).backward()
            optimizer.step()
    assert found_in(watch.verdict) == found, str(watch.verdict)


def each_by_itself(z: Any) -> Any:
    return z.square().mean()


def sorted_beside_others(z: Any) -> Any:
    """The loss `aot` of DPO."""
    return F.softplus(z[:, 0].sort()[0] - z[:, 1].detach().sort()[0]).mean()


@pytest.mark.parametrize("wrapped", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (each_by_itself, "right"),
        (sorted_beside_others, "not judged"),
    ],
)
def test_a_loss_beside_ddp(loss: Any, found: str, wrapped: dict[str, bool]) -> None:
    """The loop is right for any number of ranks, or may couple the samples of its micro-batches."""
    with one_rank():
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        ddp = nn.parallel.DistributedDataParallel(model, **wrapped)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with quiet(), wb.watch(model, optimizer) as watch:
            for x in torch.randn(4, 5, 6):
                (loss(ddp(x)) / 4).backward()
            optimizer.step()
    assert found_in(watch.verdict) == found, str(watch.verdict)


def test_two_optimizers_and_one_scaler() -> None:
    """Each step unscales its own gradients: at the first, those of the other are still scaled."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(6, 8), "head": nn.Linear(8, 5)})
    both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    with quiet(), wb.watch(model) as watch:
        for index in range(8):
            out = model["head"](model["body"](torch.randn(4, 6)).tanh())
            scaler.scale(F.cross_entropy(out, torch.randint(0, 5, (4,))) / 4).backward()  # type: ignore[no-untyped-call]
            if index % 4 == 3:
                for optimizer in both:
                    scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
    assert watch.verdict.same, watch.verdict


def test_a_batch_that_is_more_than_its_samples() -> None:
    for loop, found in COUPLED.items():
        verdict = watched(loop, ZOO["mlp"].model())
        assert found_in(verdict) == found, f"{loop.__name__}: {verdict}"
    verdict = watched(sums_over_counted_units, batchnorm_model(), even=True)
    assert verdict.mistakes == ("coupled",)
    frozen = batchnorm_model()
    frozen[1].eval()  # type: ignore[index]
    assert watched(sums_over_counted_units, frozen, even=True).same


@pytest.mark.parametrize(
    "package, entry_point, name",
    [
        ("accelerate", "Accelerate", "divided twice"),
        ("lightning", "Fabric", "loss scale left in"),
        ("lightning", "Lightning", "cleared twice"),
        ("transformers", "HF Trainer", "decayed every time"),
    ],
)
def test_inside_trainers(package: str, entry_point: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    right = STYLES["clipped once"]
    for kind, plant in (("detector", MISTAKES[name]), ("language model", right)):
        verdict = verdict_of(entry_point, kind, plant)
        assert found_in(verdict) == plant.key, str(verdict)


def test_the_loop_is_not_changed() -> None:
    """The weights after training, bit for bit, with dropout, with a watch and without."""

    def train(watch: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(12, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 5)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        context: Any = wb.watch(model, optimizer) if watch else quiet()
        with quiet(), context:
            for _ in range(3):
                sums_over_counted_units(model, optimizer, ZOO["mlp"].window(4, True, 0))
        return [*model.parameters(), *model.buffers()]

    pairs = zip(train(True), train(False), strict=True)
    assert all(torch.equal(ours, plain) for ours, plain in pairs)
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_a_watch_runs_no_forward_of_its_own() -> None:
    """What its records cost is a figure of benchmarks/watch_rounds.py."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    assert one_window(model, lambda x: model(x).square().mean() / 4).same
    assert len(forwards) == 4


def exact_loop(backward: Any, count: int = 4) -> LoopVerdict:
    """A loop with wb.Accumulator over masked labels, watched; `backward(acc, model, x, y)`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    acc = wb.Accumulator(model, optimizer, steps=4)
    data = []
    for n in (5, 2, 7, 3, 4, 6)[: count + 2]:
        y = torch.randint(0, 5, (n,))
        y[1:2] = -100
        data.append((torch.randn(n, 6), y))
    with quiet(), wb.watch(model, optimizer) as watch:
        for x, y in acc.over(data):
            backward(acc, model, x, y)
    return watch.verdict


def test_windows_of_wholebatch_are_read_from_their_ledger() -> None:
    def mean(acc: Any, model: Any, x: Any, y: Any) -> None:
        acc.backward(mean=F.cross_entropy(model(x), y), units=(y != -100).sum())

    def loss(acc: Any, model: Any, x: Any, y: Any) -> None:
        acc.backward(wb.cross_entropy(model(x), y))

    def policy(acc: Any, model: Any, x: Any, y: Any) -> None:
        losses = F.cross_entropy(model(x), y, reduction="none")[:, None]
        acc.backward(wb.losses.aggregate(losses, y[:, None] != -100, mean="sequences"))

    for backward in (mean, loss, policy):
        verdict = exact_loop(backward)
        assert verdict.same, str(verdict)
        assert {trial.source for trial in verdict.trials} == {"ledger, with units as given"}
        assert [trial.micro_batches for trial in verdict.trials] == [4, 2]


def test_a_verdict_says_that_units_of_the_loop_are_not_judged() -> None:
    def samples_as_units(acc: Any, model: Any, x: Any, y: Any) -> None:
        acc.backward(F.cross_entropy(model(x), y, reduction="sum"), units=len(x))

    verdict = exact_loop(samples_as_units)  # labels are masked: these units are wrong
    said = "same update by construction, if its units are right: the loop over 2 windows"
    assert verdict.line.startswith(said)
    assert "Not measured: the units (wb.verify does)" in verdict.line
    assert "off by" not in str(verdict)
    assert "✓ by construction" in str(verdict)

    def tested(acc: Any, model: Any, x: Any, y: Any) -> None:
        acc.run(
            losses.setdefault(0, lambda micro: wb.cross_entropy(model(micro[0]), micro[1])), (x, y)
        )

    losses: dict[int, Any] = {}
    verdict = exact_loop(tested)
    assert verdict.line.startswith("same update by construction: the loop over 2 windows of")
    assert "Measured: no micro-batch is left over" in verdict.line


def test_a_rate_set_between_announce_and_the_first_backward() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader([(torch.randn(6), i % 3) for i in range(24)], batch_size=2)
    acc = wb.Accumulator(model, optimizer, steps=4)
    with quiet(), wb.watch() as watch:
        seen = iter(batches)
        for update in range(3):
            acc.announce({"ce": 8})
            for place, (x, y) in enumerate(acc.over([next(seen) for _ in range(4)])):
                if place == 0:
                    optimizer.param_groups[0]["lr"] = 0.1 / (update + place + 2)
                total = F.cross_entropy(model(x), y, reduction="sum")
                acc.backward(wb.Loss.terms({"ce": (total, len(y))}))
    assert watch.verdict.mistakes == ()
    assert watch.verdict.watched is not None
    assert watch.verdict.watched.end, "the loop has a DataLoader, and it came to its end"


def test_terms_with_weights_in_a_whole_batch() -> None:
    def loss(model: Any, micro: Any) -> Any:
        out = model(micro["x"])
        total = F.cross_entropy(out, micro["y"], reduction="sum")
        penalty = out.square().sum()
        return wb.Loss.terms({"ce": (total, len(out)), "size": (penalty, out.numel(), 0.1)})

    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def units(micro: Any) -> Any:
        return {"ce": len(micro["x"]), "size": 5 * len(micro["x"])}

    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, units=units)
    with quiet(), wb.watch(model) as watch:
        for _ in range(2):
            train.step({"x": torch.randn(10, 6), "y": torch.randint(0, 5, (10,))})
    assert watch.verdict.same, str(watch.verdict)


def test_a_schedule_that_moves_within_a_window_of_wholebatch() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    acc = wb.Accumulator(model, optimizer, steps=4)
    refused = pytest.raises(wb.errors.WindowError, match="the learning rate changed in the middle")
    with refused, quiet(), wb.watch(model, optimizer) as watch:
        for x in acc.over(list(torch.randn(8, 3, 6))):
            acc.backward(model(x).square().sum(), units=3)
            optimizer.param_groups[0]["lr"] *= 0.9
    assert not watch.verdict.same


def test_windows_in_accelerates_loop_under_a_watch() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from wholebatch.integrations.accelerate import AccelerateAccumulator

    torch.manual_seed(0)
    model: Any = nn.Linear(6, 5)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = accelerator.prepare(model, optimizer)
    windows = AccelerateAccumulator(accelerator, model, optimizer)
    with quiet(), wb.watch(model) as watch:
        for n in (5, 2, 7, 3, 4, 4, 4, 1):
            x, y = torch.randn(n, 6), torch.randint(0, 5, (n,))
            with accelerator.accumulate(model):
                windows.backward(mean=F.cross_entropy(model(x), y), units=n)
                optimizer.step()
                optimizer.zero_grad()
    assert watch.verdict.same, str(watch.verdict)


def test_every_form_of_call_is_passed_on() -> None:
    """Arguments by keyword, generators of parameters, gradients that are asked for."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with quiet(), wb.watch(model, optimizer) as watch:
        for x in torch.randn(8, 4, 6):
            x.requires_grad_(True)
            out = model(x)
            asked = torch.autograd.grad(
                outputs=out.sum(), inputs=[x], retain_graph=True, create_graph=False
            )
            assert asked[0].shape == x.shape
            torch.autograd.backward(tensors=[out.square().mean() / 4], grad_tensors=None)
            if bool(optimizer.state) or watch._recorder._number % 4 == 0:
                norm = nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.5)
                assert float(norm) > 0
                nn.utils.clip_grad_value_((p for p in model.parameters()), clip_value=10.0)
                optimizer.step()
                optimizer.zero_grad()
    assert watch.verdict.same, str(watch.verdict)


@pytest.mark.parametrize(("divisor", "found"), [(4, "right"), (1, "not-divided")])
def test_a_gan_whose_parts_are_frozen_in_turn(divisor: int, found: str) -> None:
    torch.manual_seed(0)
    generator, judge = nn.Linear(3, 6), nn.Linear(6, 1)
    both = nn.ModuleDict({"g": generator, "d": judge})
    by_g = torch.optim.SGD(generator.parameters(), 0.1)
    by_d = torch.optim.SGD(judge.parameters(), 0.1)
    with quiet(), wb.watch(both) as watch:
        for _ in range(3):
            both.requires_grad_(False)
            judge.requires_grad_(True)
            for x in torch.randn(4, 5, 6):
                fake = generator(torch.randn(5, 3)).detach()
                (F.softplus(judge(fake)).mean() + F.softplus(-judge(x)).mean()).div(4).backward()
            by_d.step()
            by_d.zero_grad()
            both.requires_grad_(False)
            generator.requires_grad_(True)
            for _ in range(4):
                loss = F.softplus(-judge(generator(torch.randn(5, 3)))).mean()
                (loss / divisor).backward()
            by_g.step()
            by_g.zero_grad()
    assert found_in(watch.verdict) == found, str(watch.verdict)


@pytest.mark.parametrize(("batches", "found"), [(8, "right"), (10, "no-update")])
def test_the_end_of_the_data(batches: int, found: str) -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.randn(4 * batches, 6), batch_size=4)  # type: ignore[arg-type]
    with quiet(), wb.watch(model, optimizer) as watch:
        for index, x in enumerate(loader):
            (model(x).square().mean() / 4).backward()
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert found_in(watch.verdict) == found, str(watch.verdict)
    assert watch.verdict.watched is not None
    assert (watch.verdict.watched.windows, watch.verdict.watched.end) == (2, True)
    assert "2 windows seen; the end of the data was among them" in str(watch.verdict)


def one_window(model: nn.Module, loss: Any, trained: nn.Module | None = None) -> LoopVerdict:
    """Watch one window of four micro-batches; `loss(x)` gives each one's loss."""
    optimizer = torch.optim.SGD((trained or model).parameters(), 0.1)
    with quiet(), wb.watch(model) as watch:
        for x in torch.randn(4, 8, 6):
            loss(x).backward()
        optimizer.step()
    return watch.verdict


def test_a_mean_given_as_a_sum_is_named_where_the_audit_is_off() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(model: Any, micro: Any) -> wb.Loss:
        return wb.Loss(model(micro).square().mean(), len(micro))

    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, audit=False)
    with quiet(), wb.watch(model) as watch:
        train.step(torch.randn(8, 6))
    assert watch.verdict.mistakes == ("mean-as-sum",), str(watch.verdict)


def test_parameters_that_nobody_steps_on_are_told() -> None:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 5)})
    verdict = one_window(model, lambda x: model["b"](model["a"](x)).square().mean() / 4, model["b"])
    assert "not judged, no optimizer step was seen: a.weight, a.bias" in str(verdict)


def test_a_failure_inside_the_watch_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("inside")

    monkeypatch.setattr("wholebatch.verification.window_recorder.MeasuredLoss", broken)
    model = nn.Linear(6, 5)
    verdict = one_window(model, lambda x: model(x).square().mean() / 4)
    assert not verdict.judged
    assert "the watch failed: KeyError" in verdict.line


def test_at_most_six_functions_are_replaced_and_all_are_put_back() -> None:
    from wholebatch.verification.window_recorder import _REPLACED

    assert len(_REPLACED) <= 6
    before = [getattr(owner, name) for owner, name in _REPLACED]
    with wb.watch(nn.Linear(2, 2)):
        assert all(getattr(o, n) is not b for (o, n), b in zip(_REPLACED, before, strict=True))
    assert [getattr(owner, name) for owner, name in _REPLACED] == before


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ("HF Trainer", "exact(Trainer)(model=model, args=args, ...)"),
        ("TRL", "exact(SFTTrainer)(model=model, args=args, ...)"),
        ("Accelerate", "windows.backward(mean=loss, units=...)"),
        ("Lightning", "Trainer(callbacks=[ExactAccumulation("),
        ("plain torch", "divide the sum by all units of the window, once"),
    ],
)
def test_advice_is_for_the_trainer_at_hand(trainer: str, line: str) -> None:
    verdict = verdict_of("plain torch", KIND[0], MISTAKES["not divided"])
    assert verdict.watched is not None
    verdict = replace(verdict, watched=replace(verdict.watched, trainer=trainer))
    assert line in str(verdict)


def test_the_trainer_is_known_by_the_stack() -> None:
    pytest.importorskip("transformers")
    verdict = verdict_of("HF Trainer", KIND[0], MISTAKES["mean of means"])
    assert verdict.watched is not None
    assert verdict.watched.trainer == "HF Trainer"
    assert "instead: from wholebatch.integrations.transformers import exact" in str(verdict)


def test_what_cannot_be_known_is_not_judged() -> None:
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x.square().mean()

        @staticmethod
        def backward(ctx: Any, slope: Any) -> Any:
            return 2 * ctx.saved_tensors[0] * slope / ctx.saved_tensors[0].numel()

    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        for micro in micros:
            (Opaque.apply(model(micro["x"])) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    verdict = watched(loop, ZOO["mlp"].model())
    assert (verdict.judged, verdict.exit_status) == (False, 3)
    assert "OpaqueBackward" in verdict.line
    assert json.loads(verdict.to_json())["judged"] is False

    def alone(model: Any, optimizer: Any, micros: Any) -> None:
        for micro in micros:
            F.cross_entropy(model(micro["x"]), micro["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert "one micro-batch" in watched(alone, ZOO["mlp"].model()).line
    with wb.watch(nn.Linear(2, 2)) as nothing:
        pass
    assert "no backward was seen" in nothing.verdict.line
    assert "use `wholebatch verify FILE.py:FUNCTION`" in nothing.verdict.line
    assert str(nothing.verdict) == nothing.verdict.line  # it has no table of no window


def test_the_note_of_equal_units_agrees_with_the_table() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        for micro in micros:
            (F.cross_entropy(model(micro["x"]), micro["y"]) / len(micros)).backward()
        optimizer.step()
        optimizer.zero_grad()

    equal = watched(loop, ZOO["mlp"].model(), even=True)
    assert any("the same number of units" in note for note in equal.notes)
    uneven = watched(loop, ZOO["mlp"].model())
    assert uneven.mistakes == ("mean-of-means",)
    assert not any("the same number of units" in note for note in uneven.notes)
    # The share of 5, 2, 7 and 1 samples beside a quarter for each: in the L2 norm, 54% off.
    shares = torch.tensor([5.0, 2.0, 7.0, 1.0]) / 15
    off = float((shares - 0.25).norm() / shares.norm())
    assert uneven.table[1][3:] == (f"{off:.0%}", "✗ mean of means")


def _doubtful(what: str) -> LoopVerdict:
    """Train with right weights of the micro-batches, and something that one run cannot judge."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.0)
    with quiet(), wb.watch(model, optimizer) as watch:
        for window in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            for place in range(4):
                x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
                losses = F.cross_entropy(model(x), y, reduction="none")
                if what == "teacher":
                    losses = losses + (model(x) - teacher(x)).square().mean(1)
                    teacher.weight.data.mul_(0.9)
                if what == "average in each" or (what == "average in one" and place == 2):
                    teacher.weight.data.lerp_(model.weight.data, 0.5)
                if what == "statistic":
                    with torch.no_grad():
                        baseline = F.cross_entropy(model(x), y)
                    losses = F.softplus(losses - baseline)
                if what == "advantages":
                    losses = losses * ((x[:, 0] - x[:, 0].mean()) / x[:, 0].std())
                if what == "picked":
                    losses = losses.topk(3).values
                loss = losses.sum() if what == "sum" else losses.mean() / 4
                if what == "penalty":
                    loss = losses.sum() / 20 + 0.01 * model.weight.square().sum()
                loss.backward()
            if what == "doubled" and model.bias.grad is not None:
                model.bias.grad *= 2
            optimizer.param_groups[0]["lr"] *= 0.0 if what == "rate" and window else 1.0
            optimizer.step()
            optimizer.zero_grad()
            if what == "average":
                for weight, was in zip(model.parameters(), before, strict=True):
                    weight.data.lerp_(was, 0.5)
    return watch.verdict


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("", ""),
        ("teacher", "weight changes between two backwards"),
        ("statistic", "called without gradients before every backward"),
        ("advantages", "may be normalised"),
        ("picked", "it picks among its samples"),
        ("sum", "a sum over its samples that nothing divides"),
        ("penalty", "a penalty on the weights comes with the losses"),
        ("rate", "the learning rate is 0"),
        ("doubled", "the loop itself changes the gradient by"),
        ("average in one", "weight changes between two backwards"),
        ("average", "the loop changes the weights beside the step"),
    ],
)
def test_a_doubt_is_not_judged(what: str, reason: str) -> None:
    verdict = _doubtful(what)
    assert verdict.exit_status == (3 if what else 0), verdict
    assert reason in verdict.line


def test_an_average_that_follows_in_every_micro_batch_is_named() -> None:
    """Once in a window, wherever that is, an average moves as often as with the whole batch."""
    assert _doubtful("average in each").mistakes == ("averaged-per-micro-batch",)


def test_usage() -> None:
    with pytest.raises(wb.errors.OptionError, match="must be an nn"):
        wb.watch("model")  # type: ignore[arg-type]
    with pytest.raises(wb.errors.OptionError, match="must be a torch optimizer"):
        wb.watch(nn.Linear(2, 2), "sgd")


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), float(sys.argv[1]))
criterion = nn.CrossEntropyLoss(reduction="sum")
means = nn.CrossEntropyLoss()
draw = torch.Generator().manual_seed(rank)
for step in range(100):
    sizes = [2 + rank, 3, 1 + 4 * rank, 2]
    total = torch.tensor(float(sum(sizes)))
    if ranks > 1 and "--wrong" not in sys.argv:
        dist.all_reduce(total)
        total /= ranks
    for size in sizes:
        x, y = torch.randn(size, 6, generator=draw), torch.randint(0, 3, (size,), generator=draw)
        if ranks == 1 and "--wrong" in sys.argv:
            means(model(x), y).backward()
        else:
            (criterion(model(x), y) / total).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert step < 9, "the script is stopped after 8 windows"
"""


def _trainer(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return processes.run(
        "wholebatch.cli",
        *("verify", "--json", str(script), "--", *arguments),
        cwd=tmp_path,
        environment={**os.environ, **processes.ENVIRONMENT},
        timeout=300,
        ranks=2,
    )


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    assert run(["verify", "--json", str(script), "--", "0.01", "--wrong"]) == 1
    assert json.loads(capsys.readouterr().out)["mistakes"] == ["not-divided"]
    assert run(["verify", str(script), "--", "0.01"]) == 0
    shown = capsys.readouterr()
    assert "same update: train.py" in shown.out
    assert "8 windows seen; the end of the data is not known" in " ".join(shown.out.split())
    assert run(["verify", "--windows", "0", str(script), "--", "0.01"]) == 3
    shown = capsys.readouterr()
    assert "the loop ended with AssertionError: the script" in shown.out
    assert shown.err.count("File ") == 1, "of the script's frames only"
    assert run(["verify", "nowhere.py"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert run(["verify", "--windows", "2"]) == 2


_WINDOW = """
import sys, torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i in range(int(sys.argv[1])):
    try:
        model(torch.randn(2, 3)).mean().div(4).backward()
    except:
        print("swallowed")
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("count", "end", "status", "shown"),
    [
        (4, "raise ValueError('late')", 3, "the loop ended with ValueError: late"),
        (2, "raise ValueError('early')", 3, "2 backwards without a torch"),
        (0, "sys.exit('usage: a config')", 3, "no backward was seen in this process"),
        (4, "sys.exit(5)", 3, "the loop ended with SystemExit: 5"),
        (4, "sys.exit(0)", 0, "same update"),
        (48, "", 0, "swallowed"),  # what ends the script after 8 windows
    ],
)
def test_how_a_script_ends(
    count: int,
    end: str,
    status: int,
    shown: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_WINDOW + end, encoding="utf-8")
    assert run(["verify", str(script), "--", str(count)]) == status
    out, err = capsys.readouterr()
    assert shown in out
    is_first = "the loop ended with" not in out or out.startswith("the loop ended with")
    assert is_first, "the verdict comes after the error"
    assert "usage: a config" in err or "usage" not in end
    assert "the loop ended with" not in out or status == 3


@pytest.mark.slow
@pytest.mark.distributed
def test_a_script_on_two_ranks(tmp_path: Path) -> None:
    done = _trainer(tmp_path, "0.01")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["same"] is True
    done = _trainer(tmp_path, "0.01", "--wrong")
    assert json.loads(done.stdout[: done.stdout.rindex("}") + 1])["mistakes"] == ["mean-of-means"]


@pytest.mark.slow
@pytest.mark.distributed
def test_loops_on_two_ranks(tmp_path: Path) -> None:
    found = reports(Path(__file__).with_name("watch_ranks_worker.py"), 2, tmp_path)
    for name, (answer, key, is_unchanged) in found.items():
        assert answer == key, (name, found)
        assert is_unchanged, name
