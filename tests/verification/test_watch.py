"""`wb.watch`: a live loop's mistake is told by its name, and right loops are left in peace.

The whole grid (every mistake, kind of model and door) is benchmarks/verify_mistakes.py.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from tests import processes
from tests.distributed.launch import reports
from tests.verification.fixtures import (
    outsider_right,
    outsider_wrong,
    round_7,
    round_8,
    round_11,
    round_12,
    round_13,
    round_14,
    round_15,
    round_16,
    round_17,
    round_18,
    round_19,
)
from tests.verification.fixtures.outsider import RIGHT as OUTSIDERS_RIGHT
from tests.verification.fixtures.outsider import WRONG as OUTSIDERS_WRONG
from tests.verification.fixtures.rounds import CASES, is_right, mlp
from tests.verification.loops.live import KINDS, MISTAKES, STYLES, found_in, quiet, verdict_of
from tests.verification.loops.mistakes import UNUSUAL_MISTAKES
from tests.verification.loops.right import RIGHT, sums_over_counted_units
from tests.verification.loops.unusual import COUPLED, UNUSUAL, batchnorm_model
from wholebatch.cli.app import run
from wholebatch.coupled.followed_tensor import FollowedTensor
from wholebatch.verification import ZOO, LoopVerdict

ROOT = Path(__file__).parents[2]
KIND = list(KINDS)
NOT_SEEN = {"functional_gradients", "a_copy_per_micro_batch"}
"""Loops whose gradients no backward of the watched parameters brings."""


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """A watch searches all objects for averages of the weights: not what was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


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
        assert found_in(verdict) == key, f"{loop.__name__}: {verdict}"


def test_right_loops_are_left_in_peace() -> None:
    for place, (name, plant) in enumerate(STYLES.items()):
        verdict = verdict_of("plain torch", KIND[place % 4], plant)
        assert verdict.same, f"{name}: {verdict}"
    for loop in UNUSUAL:
        verdict = watched(loop, ZOO["mlp"].model())
        assert verdict.same, f"{loop.__name__}: {verdict}"
    for place, loop in enumerate(RIGHT[2:]):
        case = ("mlp", "lm")[place % 2]
        verdict = watched(loop, ZOO[case].model(), case=case)
        wanted = "not judged" if loop.__name__ in NOT_SEEN else "right"
        assert found_in(verdict) == wanted, f"{loop.__name__}: {verdict}"


OUTSIDERS = (
    outsider_right,
    outsider_wrong,
    round_7,
    round_8,
    round_11,
    round_12,
    round_13,
    round_14,
)
TRAINERS = (round_15, round_16, round_17, round_18, round_19)
"""Loops of all styles; benchmarks/verify_mistakes.py runs them all, a test those that were hard."""
HARD_TO_LEAVE_IN_PEACE = """
    deep_supervision_list_of_losses gan_watch_discriminator sam_two_passes_over_window
    class_weights_exact_total per_sample_weights two_backwards_per_micro_batch mixup_two_ce_terms
    uncertainty_weighting fp64_logsumexp_hand_ce einsum_weighted_tokens lisa_toggled_layers
    grad_accum_in_backward_hook_divide grad_noise_added_before_step dcgan_order_d_window
    gan_d_two_backwards_real_then_fake ngpt_normalise_rows byol_target_detached_same_model
    train_mode_accuracy_logged adversarial_fgsm_autograd_grad dr_grpo_max_length
"""
HARD_TO_NAME = """
    loss_times_1024 loss_overwritten_only_last_backward skip_a_micro_divide_by_the_rest
    tokens_detached_loss sam_second_pass_last_only gan_generator_leaks_into_d barlow
    openclip_logit_scale step_every_micro_divided boundary_off_by_one division_by_loss_and_hook
    first_counted_twice ema_written_back batch_all_triplet hook_clamps_all part_cleared_each
    divided_by_last_ntokens
"""


def test_loops_of_an_outsider() -> None:
    names = (*HARD_TO_LEAVE_IN_PEACE.split(), *HARD_TO_NAME.split())
    for name in names:
        torch.manual_seed(0)
        loop, key = OUTSIDERS_WRONG.get(name) or (OUTSIDERS_RIGHT[name], "right")
        with quiet():
            verdict = loop().verdict
        assert found_in(verdict) == key, f"{name}: {verdict}"


HARD_ROUNDS = """
    plain_focal_by_positives_of_window plain_truncated_bptt plain_first_window_one_longer
    plain_rate_set_by_hand_each_batch plain_penalty_added_each_time plain_graph_nodes_of_window
    plain_ctc_means plain_decay_added_to_gradient_each_time plain_decoder_step_by_step
    plain_clouds_one_by_one plain_players_hinge_with_penalty plain_players_generator_leaks
    plain_distilled_with_hints plain_detector_short_last_window plain_experts_balanced
    plain_graph_divided_by_all_nodes plain_voice_padded_frames plain_bayes_divergence_with_each
    plain_optimizers_in_hooks plain_budget_of_tokens_as_planned plain_codes_follow_every_batch
    plain_advantage_of_each_minibatch plain_own_scale_grows_in_the_window
    plain_soft_actor_target_creeps_each plain_kto_baseline_of_the_window plain_kto_baseline_of_each
    plain_dino_centre_once_a_window plain_dino_centre_after_every_batch plain_masked_patches
    plain_episodes_by_steps_of_the_window plain_episodes_by_their_own_steps
    plain_scaler_of_two_optimizers plain_scaler_one_of_two_is_unscaled
    plain_adaptive_clip_after_each plain_timm_shadow_every_batch plain_timm_last_batch_is_smaller
    plain_weight_decay_by_a_table_of_batches plain_stylegan_phases plain_vqgan_adaptive_weight
    plain_masters_add_in_float32 plain_masters_overwrite plain_hessian_pass_between_windows
    plain_endless_loader_small_batch_inside plain_losses_over_their_own_value
    plain_condition_is_inverted plain_mean_over_the_batch_size_again plain_pyramid_of_boxes
    plain_translator_over_padded_words plain_replay_over_the_largest_of_the_batch
    plain_experts_balanced_over_the_window plain_windows_that_grow_with_the_old_divisor
"""
"""Loops of benchmarks/watch_rounds.py that were judged wrongly at first sight, in plain torch."""
HARD_IN_TRAINERS = {
    "transformers": """
        hf_detector_by_positives_of_each hf_two_tasks_each_by_its_own_count
        hf_dpo_with_a_mean_of_tokens hf_outliers_count_for_nothing hf_penalty_with_every_batch
        hf_penalty_shared_by_the_window
    """,
    "sentence_transformers": "trl_like_sentences_cosent",
    "trl": "trl_kto trl_dpo_sorted_over_the_batch trl_dpo_with_a_term_of_tokens",
    "accelerate": "accelerate_diffusion_divides_too accelerate_diffusion_with_average",
    "lightning": """
        lightning_detector_by_images lightning_critic_steps_every_batch lightning_barlow
        lightning_actor_and_critic lightning_critic_is_not_divided
        lightning_flow_matching_warms_up_by_hand fabric_hidden_states_of_a_teacher
        fabric_second_optimizer_is_not_cleared fabric_focal_per_image
        lightning_noise_levels_over_their_own_sum fabric_steps_before_the_last_batch
        fabric_limits_before_its_scale_is_out
    """,
}


@pytest.mark.parametrize("package", ["torch", *HARD_IN_TRAINERS])
def test_loops_that_were_hard_at_first_sight(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for name in HARD_IN_TRAINERS.get(package, HARD_ROUNDS).split():
        _, key, make = CASES[name]
        with quiet():
            assert is_right(make) == (key == "right"), name  # type: ignore[no-untyped-call]
        torch.manual_seed(0)
        model, train, _ = make()
        with quiet(), wb.watch(model) as watch:
            train()
        assert found_in(watch.verdict) == key, f"{name}: {watch.verdict}"


def weighed(weights: Any, total: Any) -> Any:
    """A loop whose samples have weights, over a number of the window, and the undivided one."""

    def make() -> Any:
        model = mlp()
        rows = [(torch.randn(n, 6), torch.randint(0, 5, (n,)), torch.rand(n)) for n in SIZES]

        def part(model: Any, rows: Any) -> Any:
            x, y, raw = (torch.cat(column) for column in zip(*rows, strict=True))
            losses = F.cross_entropy(model(x), y, reduction="none")
            lengths = [len(row[0]) for row in rows]
            return (losses * weights(raw, lengths)).sum()

        def train() -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for window in (rows[:4], rows[4:]):
                for row in window:
                    (part(model, [row]) / total(window)).backward()
                optimizer.step()
                optimizer.zero_grad()

        def whole(model: Any) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for window in (rows[:4], rows[4:]):
                optimizer.zero_grad()
                (part(model, window) / total(window)).backward()
                optimizer.step()

        return model, train, whole

    return make


SIZES = (6, 5, 7, 4, 5, 6, 4, 7)


def samples_of(window: Any) -> int:
    return sum(len(row[0]) for row in window)


def by_time(raw: Any, lengths: Any) -> Any:
    return torch.cat([0.9 ** torch.arange(n) for n in lengths]).to(raw)


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (lambda raw, lengths: raw / raw.max(), "coupled"),
        (lambda raw, lengths: raw / raw.mean(), "coupled"),
        (lambda raw, lengths: raw, "right"),
        (lambda raw, lengths: raw.mul(2).clamp(max=1), "right"),
        (by_time, "right"),
    ],
    ids=["over the largest", "over the mean", "as they are", "clamped", "discounts of episodes"],
)
def test_weights_over_a_number_of_each_micro_batch(weights: Any, found: str) -> None:
    make = weighed(weights, samples_of)
    assert is_right(make) == (found == "right")  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    model, train, _ = make()
    with quiet(), wb.watch(model) as watch:
        train()
    assert found_in(watch.verdict) == found, watch.verdict


@pytest.mark.parametrize(
    ("in_loss", "after", "found"),
    [
        (lambda n: n, lambda n: 1, "right"),
        (lambda n: 1, lambda n: n, "right"),
        (lambda n: 2, lambda n: n / 2, "right"),
        (lambda n: 2, lambda n: 1, "nominal-count"),
        (lambda n: 1, lambda n: 2, "right"),  # not seen: what is done to a later gradient
    ],
)
def test_longer_windows_after_a_right_one(in_loss: Any, after: Any, found: str) -> None:
    model = mlp()
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


@pytest.mark.parametrize(
    ("rounds", "name"),
    [
        (round_12, "plain_distilled_with_hints"),
        (round_8, "plain_heads_backward_one_by_one"),
        (round_18, "plain_hessian_pass_between_windows"),
    ],
)
def test_right_loops_stay_right_in_later_windows(
    rounds: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rounds.even
    monkeypatch.setattr(rounds, "even", lambda number: made(2 * number))
    torch.manual_seed(0)
    model, train, _ = CASES[name][2]()
    with quiet(), wb.watch(model) as watch:
        train()
    assert watch.verdict.same, watch.verdict


def test_gradients_of_every_sample_beside_the_loop() -> None:
    """Per-sample gradients for a log are no backward of the loop, and do not end the watch."""
    model = mlp()
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


def test_a_number_that_is_repeated_for_every_sample() -> None:
    """The mean over tokens, expanded to the samples: what the mean over those is a mean of."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(), wb.watch(model, optimizer) as watch:
        for count in (3, 8, 5, 2):
            x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))
            mean = F.cross_entropy(model(x)[:count], y[:count])
            (mean.expand(8).sum() / 8 / 4).backward()
        optimizer.step()
    assert found_in(watch.verdict) == "mean-of-means", watch.verdict


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


@pytest.mark.parametrize("found", ["right", "coupled"])
def test_a_loss_inside_ddp(found: str) -> None:
    """DDP passes losses on through a node of its own, and gives unused outputs no gradient."""
    with one_rank():
        torch.manual_seed(0)
        model = ComparesInside(found == "coupled")
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


def beside_a_gathered_mean(z: Any) -> Any:
    """The baseline of KTO, over all ranks."""
    mean = z[:, 1].mean().detach()[None]
    both = [torch.empty_like(mean)]
    torch.distributed.all_gather(both, mean)
    return (z[:, 0] - torch.cat(both).mean()).sigmoid().mean()


def beside_a_mean_gathered_into_a_tensor(z: Any) -> Any:
    mean, both = z[:, 1].mean().detach()[None], torch.empty(1)
    torch.distributed.all_gather_into_tensor(output_tensor=both, input_tensor=mean)
    return (z[:, 0] - both.mean()).sigmoid().mean()


@pytest.mark.parametrize("wrapped", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (each_by_itself, "right"),
        (sorted_beside_others, "coupled"),
        (beside_a_gathered_mean, "coupled"),
        (beside_a_mean_gathered_into_a_tensor, "coupled"),
    ],
)
def test_a_loss_beside_ddp(loss: Any, found: str, wrapped: dict[str, bool]) -> None:
    """The loop is right for any number of ranks, or couples the samples of its micro-batches."""
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
    assert torch.distributed.all_gather.__module__ == "torch.distributed.distributed_c10d"


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


def beside_its_mean(z: Any) -> Any:
    return (z[:, 0] - z[:, 1].mean().detach()).sigmoid().mean()


@pytest.mark.parametrize(
    ("loss", "found"), [(each_by_itself, "right"), (beside_its_mean, "coupled")]
)
def test_a_watch_switches_no_mode_on(loss: Any, found: str) -> None:
    """It follows the outputs of models, also under the modes of the loop."""
    from torch.overrides import _get_current_function_mode
    from torch.utils._device import DeviceContext

    model, seen = nn.Linear(6, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with quiet(), wb.watch(model, optimizer) as watch:
        with torch.device("cpu"):
            for x in torch.randn(4, 5, 6):
                seen += [model(x)]
                (loss(seen[-1]) / 4).backward()
            assert isinstance(_get_current_function_mode(), DeviceContext)
        assert _get_current_function_mode() is None
        assert {type(one) for one in seen} == {FollowedTensor}
        optimizer.step()
        assert {type(one) for one in seen} == {torch.Tensor}
    assert found_in(watch.verdict) == found, watch.verdict


def test_a_watched_loop_that_fails_leaves_plain_tensors() -> None:
    model = nn.Linear(6, 2)
    with pytest.raises(ZeroDivisionError), quiet(), wb.watch(model):
        made = model(torch.randn(4, 6))
        kept = [made, made.softmax(1), torch.zeros(4, 2)]
        kept[2][:] = kept[1]
        assert {type(one) for one in kept} == {FollowedTensor}
        raise ZeroDivisionError
    assert {type(one) for one in kept} == {torch.Tensor}
    assert type(kept[0] * 2) is torch.Tensor


@pytest.mark.parametrize("found", ["right", "moved-in-the-window", "refused"])
def test_a_loop_that_is_followed_by_a_watch_and_by_its_accumulator(found: str) -> None:
    """The Accumulator follows one micro-batch and refuses; the watch goes on after it."""
    torch.manual_seed(0)
    model, centre = nn.Linear(6, 2), torch.zeros(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = wb.Accumulator(model, optimizer, steps=4)
    kinds = []

    def train() -> None:
        for x in acc.over(list(torch.randn(4, 5, 6))):
            z = model(x)
            kinds.append((type(x), type(z)))
            mean = z.detach().mean(0) if found == "refused" else centre.clone()
            if found == "moved-in-the-window":
                centre.lerp_(z.detach().mean(0), 0.5)
            acc.backward((z - mean)[:, 0].square().sum(), units=5)

    with quiet(), wb.watch(model, optimizer) as watch:
        if found == "refused":
            with pytest.raises(wb.errors.LossError, match="compares samples with each other"):
                train()
        else:
            train()
    assert kinds[0] == (FollowedTensor, FollowedTensor)
    assert all(kind == (torch.Tensor, FollowedTensor) for kind in kinds[1:])
    assert type(centre) is torch.Tensor
    assert found == "refused" or found_in(watch.verdict) == found, watch.verdict


def test_a_batch_that_is_more_than_its_samples() -> None:
    for loop in COUPLED:
        verdict = watched(loop, ZOO["mlp"].model())
        assert verdict.mistakes[:1] == ("coupled",), f"{loop.__name__}: {verdict}"
    verdict = watched(sums_over_counted_units, batchnorm_model(), even=True)
    assert verdict.mistakes == ("coupled",)
    frozen = batchnorm_model()
    frozen[1].eval()  # type: ignore[index]
    assert watched(sums_over_counted_units, frozen, even=True).same


@pytest.mark.parametrize(
    "package, door, name",
    [
        ("accelerate", "Accelerate", "divided twice"),
        ("lightning", "Fabric", "loss scale left in"),
        ("lightning", "Lightning", "cleared twice"),
        ("transformers", "HF Trainer", "decayed every time"),
    ],
)
def test_inside_trainers(package: str, door: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    right = STYLES["clipped once"]
    for kind, plant in (("detector", MISTAKES[name]), ("language model", right)):
        verdict = verdict_of(door, kind, plant)
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
draw = torch.Generator().manual_seed(rank)
for step in range(100):
    sizes = [2 + rank, 3, 1 + 4 * rank, 2]
    total = torch.tensor(float(sum(sizes)))
    if ranks > 1 and "--wrong" not in sys.argv:
        dist.all_reduce(total)
        total /= ranks
    for size in sizes:
        x, y = torch.randn(size, 6, generator=draw), torch.randint(0, 3, (size,), generator=draw)
        (criterion(model(x), y) / (1 if ranks == 1 and "--wrong" in sys.argv else total)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert step < 1, "the script is stopped in its second window"
"""


def _trainer(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return processes.run(
        "wholebatch.cli",
        *("verify", "--json", "--trainer", str(script), *arguments),
        cwd=tmp_path,
        environment={**os.environ, **processes.ENVIRONMENT},
        timeout=300,
        ranks=2,
    )


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    assert run(["verify", "--json", "--trainer", str(script), "0.01", "--wrong"]) == 1
    assert json.loads(capsys.readouterr().out)["mistakes"] == ["not-divided"]
    assert run(["verify", "--trainer", str(script), "0.01"]) == 0
    assert "the same update as the undivided batch" in capsys.readouterr().out
    assert run(["verify", "--windows", "0", "--trainer", str(script), "0.01"]) == 3
    shown = capsys.readouterr()
    assert "the loop ended with AssertionError: the script is stopped" in shown.out
    assert shown.err.count("File ") == 1, "of the script's frames only"
    assert run(["verify", "--trainer", "nowhere.py"]) == 2
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
        (4, "sys.exit(0)", 0, "the same update"),
        (12, "", 0, "swallowed"),  # what ends the script at its second window
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
    assert run(["verify", "--trainer", str(script), str(count)]) == status
    out, err = capsys.readouterr()
    assert shown in out
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


KNOWN_ON_RANKS = {
    "ranks_only_the_first_steps_and_sends": "not judged",
    "ranks_weights_averaged_after_a_plain_step": "unsynchronised-ranks",
}
"""Right loops that a watch does not call right: limits in docs/verify.md."""


@pytest.mark.slow
@pytest.mark.distributed
def test_loops_on_two_ranks(tmp_path: Path) -> None:
    found = reports(Path(__file__).with_name("watch_ranks_worker.py"), 2, tmp_path)
    for name, (answer, key, right, words) in found["rounds"].items():
        assert right == (key == "right"), name
        assert answer == KNOWN_ON_RANKS.get(name, key), (name, words)
    assert found["long"] == {
        "a rank ends before the others": ["right", True],
        "windows of other lengths": ["mean-of-means", True],
    }
