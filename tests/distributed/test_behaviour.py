"""Bytes on the wire, agreement between ranks, refusals, and ranks that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.behaviour_worker import SHARDED, sharded_gpt
from tests.distributed.launch import reports
from tests.memory.models import loss as gpt_loss
from tests.memory.models import tokens
from tests.support import EXACT
from wholebatch.memory.fsdp_sharding import Sharding
from wholebatch.memory.predict import predict_peak

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("behaviour")
    found: list[dict[str, Any]] = reports(HERE / "behaviour_worker.py", 2, folder)["ranks"]
    return found


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_window_reduces_the_bytes_of_one_micro_batch(engine: str, ranks: Any) -> None:
    for rank in ranks:
        by_steps = rank["bytes"][engine]
        assert by_steps["1"]["gradients"] > 5000
        assert by_steps["5"] == by_steps["1"]
        assert by_steps["5"]["small"] < 512


def test_fp16_skipping_is_agreed(ranks: Any) -> None:
    for rank in ranks:  # only rank 1 had the overflow
        assert rank["fp16"]["skipped"].startswith("gradients not finite at loss scale 1024")
        assert rank["fp16"]["scale"] == 512.0
        assert rank["fp16"]["untouched"]


def test_a_loss_that_is_not_finite_raises_on_all_ranks(ranks: Any) -> None:
    assert "another rank has a loss that is not finite" in ranks[0]["nonfinite"]
    assert "micro-batch 2 of 2 on rank 1 has a loss that is not finite" in ranks[1]["nonfinite"]


def test_exact_batchnorm_over_the_global_batch(ranks: Any) -> None:
    for rank in ranks:
        assert rank["batchnorm"]["update"] <= EXACT
        assert rank["batchnorm"]["buffers"] <= EXACT


def test_buffers_are_the_first_ranks_or_those_of_a_ranks_own_samples(ranks: Any) -> None:
    """DDP broadcasts them; a sharded rank forgets the micro-batch that it ran again for others."""
    first, second = (rank["running means"] for rank in ranks)
    own = [pytest.approx([2.0 * (1 - 0.9**2)] * 2), pytest.approx([3.0 * 0.1] * 2)]
    assert [first["ddp"], second["ddp"]] == [own[0], own[0]]
    assert [first["fsdp2"], second["fsdp2"]] == own


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", SHARDED)
def test_the_memory_of_a_sharded_window_was_predicted(name: str, ranks: Any) -> None:
    precision, sync = SHARDED[name]
    model, batch = sharded_gpt(), tokens(2)
    found = predict_peak(
        model,
        gpt_loss,
        batch,
        optimizer=torch.optim.AdamW(model.parameters()),
        precision=precision,
        sharding=Sharding(len(ranks), sync),  # type: ignore[arg-type]
    )
    predicted = found.peak - sum(leaf.nbytes for leaf in batch.values())
    for rank in ranks:
        assert 0.95 < predicted / rank["sharded"][name]["peak"] < 1.1


def test_parameters_are_gathered_once_per_window(ranks: Any) -> None:
    """Two blocks and the root, three micro-batches; the root stays gathered after a forward."""
    for rank in ranks:
        assert rank["sharded"]["hold"]["gathers"] == 3 * (2 * 2 + 1)
        assert rank["sharded"]["gathered"]["gathers"] == 3
        assert rank["sharded"]["gathered"]["peak"] > rank["sharded"]["hold"]["peak"]


@pytest.mark.parametrize("name", [*SHARDED, "gathered"])
def test_sharded_windows_make_the_update_of_a_whole_model(name: str, ranks: Any) -> None:
    for rank in ranks:
        assert rank["sharded"][name]["off"] <= 1e-7


def test_refusals_name_what_was_given(ranks: Any) -> None:
    *first, state, flush = ranks[0]["refused"]
    hook, static, sparse, every, unknown, inside, narrow, alone, with_it, reduces, by_itself = first
    assert "a plain model in a job of 2 ranks: nothing reduces its gradients" in alone
    assert 'should train alone, pass close=wb.Close(sync="none")' in alone
    assert 'sync="none" on a model of ddp: this engine reduces gradients' in reduces
    assert (with_it, by_itself) == ("accepted", "accepted")
    assert narrow.startswith("weight is torch.bfloat16, and FSDP2 would round the sum")
    assert "communication hook" in hook
    assert "leave static_graph out" in static
    assert "module: sparse gradients" in sparse
    assert 'sync="every" with DistributedDataParallel' in every
    assert "sync='sometimes': must be" in unknown
    assert "Sequential around DistributedDataParallel" in inside
    assert "save where backward() or run() returned a Step" in state
    assert "has no backward left" in flush
