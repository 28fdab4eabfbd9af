"""What ranks do beyond the programs of tests/programs: one job of 2 ranks, and one of 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORKER = Path(__file__).with_name("worker.py")
OTHER_PARAMETERS = "RankError: ranks differ in their parameters (names, shapes, order, or which are"
OTHER_WEIGHTS = "RankError: the weights differ between ranks, so the models would never be the"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    modules = ("agree", "behaviour", "coupled", "exact", "gathered", "moe")
    return reports(WORKER, 2, tmp_path_factory.mktemp("two"), *modules)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Any:
    modules = ("gathered", "pipeline", "tensor_parallel")
    return reports(WORKER, 4, tmp_path_factory.mktemp("four"), *modules)


def assert_exact(ranks: Any, module: str) -> None:
    """Adam's square root amplifies rounding: its updates are held to ten times the floor."""
    for rank in ranks:
        for case, row in rank[module]["off"].items():
            for name, off in row.items():
                wide = "adam" in case and name == "update"
                assert off <= (10 if wide else 1) * EXACT, (case, name)


@pytest.mark.parametrize("module", ["exact", "gathered", "coupled"])
def test_two_ranks_make_the_update_of_the_undivided_batch(module: str, two: Any) -> None:
    assert_exact(two, module)


@pytest.mark.parametrize("module", ["pipeline", "tensor_parallel"])
def test_four_ranks_make_the_update_of_the_undivided_batch(module: str, four: Any) -> None:
    assert_exact(four, module)


# ------------------------------------------------------------------ agreement


@pytest.mark.parametrize(
    ("case", "said"),
    [
        *((case, OTHER_PARAMETERS) for case in ("frozen", "other_order", "other_rate")),
        *((case, OTHER_WEIGHTS) for case in ("loaded_on_one", "beside_the_model")),
        ("left_out_by_ddp", "UnsupportedError: module.2.weight: DistributedDataParallel ignores"),
    ],
)
def test_every_rank_is_told_what_differs(case: str, said: str, two: Any) -> None:
    for rank in two:
        assert all(told.startswith(said) for told in rank["agree"]["refused"][case])


def test_weights_that_differ_later_are_found(two: Any) -> None:
    for rank in two:
        assert rank["agree"]["off"] <= EXACT
        assert rank["agree"]["resumed"].startswith(OTHER_WEIGHTS)
        assert "on_gradient= has made gradients of norm" in rank["agree"]["noise"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("steps", "accumulators of 2 and 3 steps"),
        ("order", "give them to wb.over in the order of their backwards"),
        ("first", "several accumulators in one loop need it on every rank"),
        ("announce", "announce() on several ranks, with several accumulators"),
        ("no data", "needs every rank in every forward"),
        ("gradient", "after gradient() the step is made by each rank's own loop"),
    ],
)
def test_loops_that_ranks_cannot_share(case: str, said: str, two: Any) -> None:
    assert all(said in rank["exact"]["refused"][case] for rank in two)


# ------------------------------------------------------------------ behaviour


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_window_reduces_the_bytes_of_one_micro_batch(engine: str, two: Any) -> None:
    for rank in two:
        one, five = rank["behaviour"]["bytes"][engine]
        assert one["gradients"] > 5000
        assert five == one
        assert five["small"] < 512


def test_what_is_not_finite_on_one_rank_is_agreed(two: Any) -> None:
    for rank in two:  # only rank 1 had the overflow
        fp16 = rank["behaviour"]["fp16"]
        assert fp16["skipped"].startswith("gradients not finite at loss scale 1024")
        assert (fp16["scale"], fp16["untouched"]) == (512.0, True)
    first, second = (rank["behaviour"]["nonfinite"] for rank in two)
    assert "another rank has a loss that is not finite" in first
    assert "micro-batch 2 of 2 on rank 1 has a loss that is not finite" in second


def test_buffers_are_the_first_ranks_or_those_of_a_ranks_own_samples(two: Any) -> None:
    """DDP broadcasts them; a sharded rank forgets the micro-batch that it ran again for others."""
    first, second = (rank["behaviour"]["running means"] for rank in two)
    own = [pytest.approx([2.0 * (1 - 0.9**2)] * 2), pytest.approx([3.0 * 0.1] * 2)]
    assert [first["ddp"], second["ddp"]] == [own[0], own[0]]
    assert [first["fsdp2"], second["fsdp2"]] == own


def test_losses_that_talk_to_other_ranks_are_tested_equally_often(two: Any) -> None:
    assert all(rank["behaviour"]["off"] <= 1e-12 for rank in two)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("hook", "communication hook"),
        ("static", "leave static_graph out"),
        ("sparse", "module: sparse gradients"),
        ("every", 'sync="every" with DistributedDataParallel'),
        ("unknown", "sync='sometimes': must be"),
        ("inside", "Sequential around DistributedDataParallel"),
        ("narrow", "weight is torch.bfloat16, and FSDP2 would round the sum"),
        ("plain", "a plain model in a job of 2 ranks: nothing reduces its gradients"),
        ("reduces", 'sync="none" on a model of ddp: this engine reduces gradients'),
        ("by itself", "accepted"),
        ("state", "save where backward() or run() returned a Step"),
        ("flush", "has no backward left"),
        ("compares", "wb.Coupled"),
    ],
)
def test_refusals_name_what_was_given(case: str, said: str, two: Any) -> None:
    assert said in two[0]["behaviour"]["refused"][case]


# ------------------------------------------------------------------ gathered, coupled, experts


def test_parameters_are_gathered_and_scattered_once_per_window(two: Any, four: Any) -> None:
    """Two blocks and the root, in windows of 1, 2 and 5 micro-batches; replicas are added up."""
    each = {"allgather_base": 3, "reduce_scatter_base": 3}
    for rank in two:
        assert rank["gathered"]["collectives"] == [each] * 3
        off = rank["gathered"]["sixteen bit"]
        assert 1e-4 < off["gathered"] <= 1.25 * off["hold"]
    assert all(rank["gathered"]["collectives"] == {**each, "allreduce": 3} for rank in four)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("forward before the window", "take the micro-batches from acc.over(loader)"),
        # On a GPU trial steps are measured, and the ranks take the smallest size of all.
        ("no room on one rank", "a micro-batch of one sample|another rank ran out"),
    ],
)
def test_gathered_windows_refuse(case: str, said: str, two: Any) -> None:
    for rank in two:
        told = rank["gathered"]["refused"][case]
        assert any(part in told for part in said.split("|")), told
        assert rank["gathered"]["refused"]["shards after it"] == "True"


def test_what_coupled_losses_on_ranks_cannot_do_is_said_on_all_of_them(two: Any) -> None:
    for rank in two:
        local, unequal, sharded = rank["coupled"]["refused"]
        assert "differs between the ranks" in local
        assert "needs the representations of every rank" in unequal
        assert "wb.Coupled on a model of Sharded" in sharded


def test_the_balance_of_experts_is_that_of_the_global_batch(two: Any) -> None:
    for rank in two:
        own = rank["moe"]["Trainer"]
        assert own > 0.01  # transformers 48690: the balance of each rank, times the ranks
        assert all(off <= EXACT for name, off in rank["moe"].items() if name != "Trainer")


# ------------------------------------------------------------------ stages and slices


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("schedule", "schedule='dualpipe': must be one of 'gpipe', '1f1b'"),
        ("module", "stage=Part: must be a torch.distributed.pipelining.PipelineStage"),
        ("clip by group", "clip_norm=[1.0] in a pipeline: stages have parameter groups"),
        ("ddp", "the stage is wrapped in DistributedDataParallel: it would reduce"),
        ("batchnorm", "BatchNorm1d '1' in a pipeline: it would normalise with each"),
        ("no target", "step() without target= on the rank of the last stage"),
        ("no inputs", "step() without inputs on the rank of the first stage"),
        ("sizes", "tensors with different first dimensions (3 and 4): every tensor"),
        ("terms", "a loss of several terms in a pipeline"),
        ("state", "this is not a state dict of wholebatch"),
    ],
)
def test_pipelines_refuse(case: str, said: str, four: Any) -> None:
    assert said in four[0]["pipeline"]["refused"][case]


def test_tensor_parallel_refuses(four: Any) -> None:
    for rank in four:
        refused = rank["tensor_parallel"]["refused"]
        assert "a DTensor in DistributedDataParallel" in refused["ddp"]
        assert "its parameters are on several meshes" in refused["gathered"]
