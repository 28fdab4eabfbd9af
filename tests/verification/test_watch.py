"""`wb.watch`: a live loop's mistake is told by its name, and right loops are left in peace.

Loops as people write them are drawn by tests/programs/plain.
"""

from __future__ import annotations

import copy
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

import wholebatch as wb
from tests import processes
from tests.distributed.launch import reports
from tests.verification.answers import found_in, quiet
from tests.verification.window_loops import not_divided, right
from wholebatch.cli.app import run
from wholebatch.verification import ZOO, LoopVerdict


def watched(loop: Any, model: nn.Module, *, case: str = "mlp", even: bool = False) -> LoopVerdict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with quiet(), wb.watch(model, optimizer) as watch:
        for count in (4, 4, 3):
            loop(model, optimizer, ZOO[case].window(4, even, 0)[:count])
    return watch.verdict


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


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def each_by_itself(z: Any) -> Any:
    return z.square().mean()


def sorted_beside_others(z: Any) -> Any:
    """The loss `aot` of DPO."""
    return F.softplus(z[:, 0].sort()[0] - z[:, 1].detach().sort()[0]).mean()


@pytest.mark.parametrize("wrapped", [{"find_unused_parameters": True}])
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
                right(model, optimizer, ZOO["mlp"].window(4, True, 0))
        return [*model.parameters(), *model.buffers()]

    pairs = zip(train(True), train(False), strict=True)
    assert all(torch.equal(ours, plain) for ours, plain in pairs)
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_a_watch_runs_no_forward_of_its_own() -> None:
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


def one_window(model: nn.Module, loss: Any, trained: nn.Module | None = None) -> LoopVerdict:
    """Watch one window of four micro-batches; `loss(x)` gives each one's loss."""
    optimizer = torch.optim.SGD((trained or model).parameters(), 0.1)
    with quiet(), wb.watch(model) as watch:
        for x in torch.randn(4, 8, 6):
            loss(x).backward()
        optimizer.step()
    return watch.verdict


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
    verdict = watched(not_divided, ZOO["mlp"].model())
    assert verdict.watched is not None
    verdict = replace(verdict, watched=replace(verdict.watched, trainer=trainer))
    assert line in str(verdict)


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
    assert uneven.table[1][2:] == (f"{off:.0%}", "✗ mean of means")


def _doubtful(what: str) -> LoopVerdict:
    """Train with right weights of the micro-batches, and something that one run cannot judge."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.0)
    with quiet(), wb.watch(model, optimizer) as watch:
        for _ in range(3):
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
        ("teacher", "called modules hold changes between two backwards"),
        ("statistic", "called without gradients before every backward"),
        ("advantages", "may be normalised"),
        ("picked", "it picks among its samples"),
        ("sum", "a sum over its samples that nothing divides"),
        ("penalty", "a penalty on the weights comes with the losses"),
        ("doubled", "the loop itself changes the gradient by"),
        ("average in one", "called modules hold changes between two backwards"),
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
    assert run(["verify", "--windows", "2", str(script), "--", "0.01"]) == 0
    assert "2 windows seen" in " ".join(capsys.readouterr().out.split())
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
