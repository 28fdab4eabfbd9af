"""`verify_loop`: planted mistakes are told by their names, and right loops are left in peace."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.distributed.launch import reports
from tests.verification.loops import peers
from tests.verification.loops.mistakes import (
    OTHER_UNITS,
    PLANTED,
    UNUSUAL_MISTAKES,
    mean,
    not_divided,
    total,
    units,
)
from tests.verification.loops.right import RIGHT, bf16_autocast, fp16_with_a_scaler
from wholebatch.losses.loss import Terms
from wholebatch.verification import MISTAKES, ZOO, Case, verify_loop
from wholebatch.verification.example_models import loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# The models take turns, and the second one is trained with AdamW, which hides all scales.
@pytest.mark.parametrize("loop", PLANTED, ids=lambda loop: loop.__name__)
def test_planted_mistakes_are_named(loop: Any) -> None:
    turn = list(PLANTED).index(loop) % len(ZOO)
    case, make = list(ZOO)[turn], adamw if turn else None
    verdict = verify_loop(loop, case=case, optimizer=make)
    assert not verdict.same
    assert verdict.exit_status == 1
    assert verdict.mistakes[0] == PLANTED[loop], str(verdict)
    assert verdict.mistake is not None
    assert verdict.mistake.name in verdict.line


def test_a_short_window_that_is_equal_by_chance_has_no_note() -> None:
    def window(steps: int, even: bool, rank: int) -> list[Any]:
        micros = ZOO["mlp"].window(steps, True, rank)
        return micros if even else [*micros[:-1], {k: v[:1] for k, v in micros[-1].items()}]

    def stepped_every_time(model: Any, optimizer: Any, micros: Any) -> None:
        for micro in micros:
            mean(model, micro).backward()
            optimizer.step()

    verdict = verify_loop(stepped_every_time, case=Case("last", ZOO["mlp"].model, loss, window))
    kinds = [trial.name.split()[1] for trial in verdict.trials]
    assert kinds == ["equal", "equal", "uneven", "equal"]
    assert not verdict.notes
    assert {row[3] for row in verdict.table[1:]} == {""}  # several steps have no one gradient


NOT_NAMED = ("clipped_in_a_hook", "head_stepped_every_time")
"""Wrong without a name, and not judged: it has several optimizers."""


def test_unusual_mistakes_are_named() -> None:
    for loop, key in UNUSUAL_MISTAKES.items():
        verdict = verify_loop(loop, case="mlp")
        wanted = () if loop.__name__ in NOT_NAMED else (key,)
        assert not verdict.same, f"{loop.__name__}: {verdict}"
        assert verdict.mistakes[:1] == wanted, f"{loop.__name__}: {verdict}"


@pytest.mark.parametrize("loop", OTHER_UNITS, ids=lambda loop: loop.__name__)
def test_units_that_count_padding_are_named(loop: Any) -> None:
    verdict = verify_loop(loop, case=Case("texts", ZOO["lm"].model, loss, _uneven_texts))
    assert verdict.mistakes == ("other-units",), str(verdict)
    assert verify_loop(loop, case="mlp").same  # every label counts


def _uneven_texts(steps: int, even: bool, rank: int) -> list[dict[str, Tensor]]:
    """Return the built-in texts with other numbers of texts and of padded tokens in each."""
    micros = ZOO["lm"].window(steps, even, rank)
    texts, longer = (1, 3, 2, 2), (1, 0, 4, 2)
    result = []
    for micro, keep, more in zip(micros, texts[:steps], longer, strict=False):
        x, y = micro["x"][:keep, : 12 - more], micro["y"][:keep, : 12 - more]
        result.append({"x": x, "y": y})
    return result


def test_lbfgs_steps_with_a_closure() -> None:
    """It evaluates the closure several times; the gradient of the first is compared."""
    loop = next(loop for loop in RIGHT if loop.__name__ == "stepped_with_a_closure")
    verdict = verify_loop(
        loop, case="mlp", optimizer=lambda model: torch.optim.LBFGS(model.parameters())
    )
    assert verdict.same, str(verdict)
    assert {trial.optimizer_steps for trial in verdict.trials} == {1}


def test_a_wrong_closure_is_named() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        def closure() -> None:
            for micro in micros:
                mean(model, micro).backward()

        optimizer.zero_grad()
        optimizer.step(closure)

    assert verify_loop(loop, case="mlp").mistakes[0] == "not-divided"


def test_two_mistakes_are_both_told() -> None:
    loop = next(loop for loop in PLANTED if loop.__name__ == "nominal_count_means")
    assert verify_loop(loop, case="lm").mistakes == ("nominal-count", "mean-of-means")


@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_right_loops_are_right(loop: Any) -> None:
    verdict = verify_loop(loop, case=list(ZOO)[RIGHT.index(loop) % len(ZOO)])
    if loop.__name__ == "an_optimizer_for_each_part":
        assert verdict.exit_status == 3
        assert "several optimizers step on parts of the model: use wb.watch" in verdict.line
        return
    assert verdict.same, str(verdict)
    assert verdict.exit_status == 0
    assert not verdict.mistakes
    assert not any(trial.notes for trial in verdict.trials)
    assert len(verdict.trials) >= 4


def test_a_step_that_a_loss_scaler_skips_is_not_judged() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for micro in micros:
            with torch.autocast("cpu", dtype=torch.float16):
                value = total(model, micro) / units(micros)
            scaler.scale(value * 1e4).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    verdict = verify_loop(loop, case="mlp")
    assert verdict.exit_status == 3
    assert "let it begin at a smaller scale, such as GradScaler(init_scale=64.0)" in verdict.line


def test_there_are_twenty_right_loops() -> None:
    assert len(RIGHT) >= 20


def _quiet(loop: Callable[..., None]) -> Callable[..., None]:
    """Without what the peers say while they are imported and set up."""

    def quiet(*arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            try:
                loop(*arguments)
            finally:
                logging.disable(logging.NOTSET)

    return quiet


@pytest.mark.parametrize(
    "package, loop",
    [
        ("accelerate", peers.accelerate_accumulate),
        ("accelerate", peers.accelerate_by_hand),
        ("lightning", peers.fabric_loop),
        ("lightning", peers.fabric_bf16),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_right_loops_of_peers(package: str, loop: Any) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    verdict = verify_loop(_quiet(loop), case="lm")
    assert verdict.same, str(verdict)


def test_a_peer_divides_already() -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    verdict = verify_loop(_quiet(peers.accelerate_wrong), case="mlp")
    assert verdict.mistakes == ("divided-twice",), str(verdict)


# --------------------------------------------------------------------- what is seen


def test_precision_is_noticed() -> None:
    assert verify_loop(bf16_autocast, case="mlp").precision == "bf16"
    assert verify_loop(fp16_with_a_scaler, case="mlp").precision == "fp16"


def test_a_mistake_in_bf16_is_named_too() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        for micro in micros:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                part = mean(model, micro)
            part.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert verify_loop(loop, case="mlp").mistakes == ("not-divided",)


def test_equal_micro_batches_can_be_promised() -> None:
    loop = next(loop for loop in PLANTED if loop.__name__ == "mean_of_means")
    assert not verify_loop(loop, case="mlp").same
    assert verify_loop(loop, case="mlp", uneven=False).same


def test_clipping_by_hand_is_right() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        all_units = units(micros)
        for micro in micros:
            (total(model, micro) / all_units).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.01 / float(norm))
        optimizer.step()
        optimizer.zero_grad()

    assert verify_loop(loop, case="mlp").same


def test_an_update_by_hand_is_not_judged() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        all_units = units(micros)
        for micro in micros:
            (total(model, micro) / all_units).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        optimizer.zero_grad()

    verdict = verify_loop(loop, case="mlp")
    assert not verdict.judged
    assert "without a step of a torch optimizer" in verdict.line


def test_built_in_models_on_which_a_loop_fails_are_left_out() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        all_units = units(micros)
        for micro in micros:
            logits = model(micro["x"])
            if logits.dim() != 3:
                raise ValueError("a language model is needed")
            (total(model, micro) / all_units).backward()
        optimizer.step()
        optimizer.zero_grad()

    verdict = verify_loop(loop)
    assert verdict.same
    assert {trial.case for trial in verdict.trials} == {"lm"}
    assert "not run on the built-in model 'mlp', where the loop raises ValueError" in str(verdict)
    with pytest.raises(ValueError, match="a language model is needed"):
        verify_loop(loop, case="mlp")


def test_what_no_known_mistake_explains_is_said() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        all_units = units(micros)
        for micro in micros:
            (total(model, micro) / all_units).backward()
        next(iter(model.parameters())).grad *= 1.5
        optimizer.step()
        optimizer.zero_grad()

    verdict = verify_loop(loop, case="mlp")
    assert not verdict.same
    assert verdict.mistakes == ()
    assert verdict.mistake is None
    assert "no known mistake fits" in verdict.line
    assert "no known mistake" in str(verdict)


def test_batchnorm_is_a_coupling_and_no_mistake_of_the_loop() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))

    case = Case("batchnorm", model, loss, _windows_of_several)
    verdict = verify_loop(RIGHT[0], case=case)
    assert verdict.mistakes == ("coupled",), str(verdict)


def _windows_of_several(steps: int, even: bool, rank: int) -> list[dict[str, Tensor]]:
    return ZOO["mlp"].window(steps, True, rank)


def test_dropout_is_off() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 5))

    def training(model: Any, optimizer: Any, micros: Any) -> None:
        model.train()
        RIGHT[0](model, optimizer, micros)

    verdict = verify_loop(training, case=Case("dropping", model, loss, ZOO["mlp"].window))
    assert verdict.same, str(verdict)
    assert any("dropout in 1 is off" in note for trial in verdict.trials for note in trial.notes)


def _half_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("holds_all", [True, False])
def test_frozen_layers_have_no_part_in_the_verdict(holds_all: bool) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        held = [p for p in model.parameters() if holds_all or p.requires_grad]
        return torch.optim.SGD(held, lr=0.1)

    def usual(model: Any, optimizer: Any, micros: Any) -> None:
        for micro in micros:
            mean = functional.cross_entropy(model(micro["x"]), micro["y"])
            (mean / len(micros)).backward()
        optimizer.step()
        optimizer.zero_grad()

    case = Case("frozen", _half_frozen, loss, ZOO["mlp"].window)
    assert verify_loop(RIGHT[0], case=case, optimizer=optimizer).same
    assert verify_loop(usual, case=case, optimizer=optimizer).mistakes[:1] == ("mean-of-means",)


def test_the_zoo_is_uneven_enough() -> None:
    """A mean of means must be far from the mean, or the mistake could not be told."""
    for case in ZOO.values():
        model = case.model()
        counts = [case.loss(model, micro).units for micro in case.window(4, False, 0)]
        assert max(map(float, counts)) >= 4 * min(map(float, counts)), case.name
        even = [float(case.loss(model, micro).units) for micro in case.window(4, True, 0)]
        assert len(set(even)) == 1, case.name


def test_usage() -> None:
    with pytest.raises(wb.errors.OptionError, match="must be one of mlp, lm"):
        verify_loop(not_divided, case="transformer")
    with pytest.raises(wb.errors.OptionError, match="at least 2"):
        verify_loop(not_divided, steps=1)
    with pytest.raises(wb.errors.OptionError, match="must be a function"):
        verify_loop("train.py")  # type: ignore[arg-type]


def test_json_and_text() -> None:
    verdict = verify_loop(not_divided, case="mlp")
    data = json.loads(verdict.to_json())
    assert data["same"] is False
    assert data["mistakes"] == ["not-divided"]
    assert data["trials"][0]["findings"][0]["key"] == "not-divided"
    assert data["trials"][0]["findings"][0]["variant"].startswith("mean losses added")
    assert MISTAKES["not-divided"].instead in str(verdict)


def test_the_whole_batch_is_the_reference_not_a_formula() -> None:
    """The right gradient of a window is that of its micro-batches put together again."""
    case = ZOO["mlp"]
    micros = case.window(4, False, 0)
    seen: list[Tensor] = []

    def loop(model: Any, optimizer: Any, given: Any) -> None:
        batch = {name: torch.cat([micro[name] for micro in given]) for name in ("x", "y")}
        functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        seen.append(batch["y"])
        optimizer.step()
        optimizer.zero_grad()

    assert verify_loop(loop, case="mlp").same
    assert any(len(labels) == sum(len(micro["y"]) for micro in micros) for labels in seen)


@pytest.mark.slow
@pytest.mark.distributed
def test_on_two_ranks(tmp_path: Path) -> None:
    found = reports(Path(__file__).with_name("ranks_worker.py"), 2, tmp_path)
    for kind, verdict in found["engines"].items():
        assert verdict["same"], (kind, verdict["line"], verdict["causes"])
        assert verdict["untouched"], kind
        assert verdict["ranks"] == 2
    assert len(found["loops"]) == 8
    for name, verdict in found["loops"].items():
        assert verdict["found"][:1] == verdict["wanted"], (name, verdict["said"])
        assert verdict["same"] == (not verdict["wanted"]), name


def _of_two_terms(model: nn.Module, micro: dict[str, Tensor]) -> Terms:
    """Return a term over all labels, and one with a weight over the labels of class 0."""
    each = functional.cross_entropy(
        model(micro["x"]).flatten(0, -2), micro["y"].flatten(), reduction="none"
    )
    some = (micro["y"].flatten() == 0).to(each)
    terms = {"all": (each.sum(), each.numel())}
    return wb.Loss.terms({**terms, "some": ((each.square() * some).sum(), int(some.sum()), 3.0)})


def _undivided_terms(model: nn.Module, optimizer: Any, micros: Any) -> None:
    whole = {key: torch.cat([micro[key] for micro in micros]) for key in micros[0]}
    terms = _of_two_terms(model, whole).by_name.values()
    sum(term.weight * term.total / term.units for term in terms).backward()
    optimizer.step()
    optimizer.zero_grad()


def _announced_terms(model: nn.Module, optimizer: Any, micros: Any) -> None:
    acc = wb.Accumulator(model, optimizer, steps=len(micros))
    labels = [micro["y"] for micro in micros]
    some = sum(int((y == 0).sum()) for y in labels)
    acc.announce({"all": sum(y.numel() for y in labels), "some": some})
    for micro in acc.over(micros):
        acc.backward(_of_two_terms(model, micro))


def _means_of_terms(model: nn.Module, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        terms = _of_two_terms(model, micro).by_name.values()
        mean = sum(term.weight * term.total / max(term.units, 1) for term in terms)
        (mean / len(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _in_float64(steps: int, even: bool, rank: int) -> list[dict[str, Tensor]]:
    return [{"x": m["x"].double(), "y": m["y"]} for m in ZOO["mlp"].window(steps, even, rank)]


def test_each_term_is_judged_over_its_own_units() -> None:
    case = Case("terms", lambda: ZOO["mlp"].model().double(), _of_two_terms, _in_float64)
    for right in (_undivided_terms, _announced_terms):
        verdict = verify_loop(right, case=case)
        assert verdict.same, str(verdict)
        assert max(trial.off for trial in verdict.trials) < 1e-12
    wrong = verify_loop(_means_of_terms, case=case)
    assert wrong.mistakes == ("mean-of-means",), str(wrong)
