"""A plan shows what fits, recommends even micro-batches, and says what would help."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.memory.models import GPT, loss, mlp, tokens, vectors
from wholebatch.cli.plan_command import plan
from wholebatch.errors import (
    OptionError,
    RecipeError,
    UnsupportedError,
    WholebatchError,
)
from wholebatch.memory.fsdp_sharding import Sharding
from wholebatch.memory.plan import make_plan
from wholebatch.memory.predict import Simulation, predict_peak, simulating

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@dataclass(frozen=True)
class Ran:
    exit_code: int
    output: str


def command(*arguments: str) -> Ran:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "110")
        status = plan(arguments)
    return Ran(status, said.getvalue())


def refused(*arguments: str) -> BaseException:
    with pytest.raises(WholebatchError) as caught:
        command(*arguments)
    return caught.value


def test_recommends_even_micro_batches() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = vectors(4)
    budget = predict_peak(model, loss, vectors(300), optimizer=optimizer).peak
    made = make_plan(
        model,
        loss,
        batch,
        batch_size=2048,
        budget=budget,
        ranks=2,
        optimizer=optimizer,
    )
    assert made.micro_batch is not None
    assert made.largest is not None
    assert 0.85 * 300 <= made.largest <= 300
    assert made.steps == -(-1024 // made.largest)
    assert made.micro_batch == -(-1024 // made.steps)
    by_size = {point.micro_batch: point for point in made.points}
    assert by_size[made.micro_batch].fits
    assert by_size[made.largest].peak <= budget
    assert all(sum(point.by_category.values()) == point.peak for point in made.points)


def test_nothing_fits() -> None:
    made = make_plan(mlp(), loss, vectors(2), batch_size=8, budget=1000)
    assert (made.micro_batch, made.steps) == (None, 0)
    with pytest.raises(OptionError, match="ranks=0: must be at least 1"):
        make_plan(mlp(), loss, vectors(2), batch_size=8, budget=1000, ranks=0)
    with pytest.raises(OptionError, match="batch_size=3 on 4 ranks: must be at least one sample"):
        make_plan(mlp(), loss, vectors(2), batch_size=3, budget=1000, ranks=4)


def test_command_shows_a_table_and_the_parts_of_the_peak() -> None:
    result = command("digits-cnn", "--batch-size", "512", "--gpu-memory", "80MiB", "--gpus", "2")
    assert result.exit_code == 0
    text = result.output
    assert "2 × 80.00 MiB of GPU memory" in text
    assert re.search(r"at the peak of micro-batch 128: .*activations [\d.]+ MiB", text)
    assert "▶" in text
    assert "128 × 2 × 2 ranks = 512 samples an update (micro-batch × steps × ranks)" in text
    assert re.search(r"BatchNorm: train does not split .* needs [\d.]+ MiB .* does not fit", text)


def test_command_says_what_would_help_and_fails() -> None:
    result = command("digits-cnn", "--gpu-memory", "1MiB")
    assert result.exit_code == 1
    assert "a micro-batch of one sample needs" in result.output
    advised = re.search(r"wholebatch plan (--parameters .*)", result.output)
    assert advised is not None
    assert "fewest GPUs" in command(*advised[1].split()).output


def test_seventy_billion_parameters_by_arithmetic() -> None:
    options = ("--gpus", "8", "--gpu", "A100 40")
    found = json.loads(command("--parameters", "70B", *options, "--json").output)
    ways = {way["way"]: way for way in found["ways"]}
    full = ways["FSDP2 or ZeRO-3"]
    assert (full["each"], full["fits"]) == (70 * 10**9 * 16 // 8, False)
    assert full["gpus"] == -(-70 * 10**9 * 16 // int(0.75 * 39.4 * 2**30))
    assert ways["ZeRO-3, Adam on the host"]["host"] == 12 * 70 * 10**9
    assert ways["LoRA, weights sharded"]["fits"]
    assert ways["DDP, fp32 and Adam"]["gpus"] is None
    text = command("--parameters", "70B", *options)
    assert text.exit_code == 0
    assert "QLoRA, weights sharded" in text.output
    assert "also give --gpu" in str(refused("--parameters", "70B"))
    assert "must be a number of parameters" in str(refused("--parameters", "big", "--gpu", "T4"))


def test_command_refuses_bad_options() -> None:
    assert "--gpus 0: must be" in str(refused("--gpus", "0"))
    assert "--precision int3: must be one of" in str(refused("--precision", "int3"))
    assert "--seq 0: must be" in str(refused("--seq", "0"))
    assert "--seq: is for hf:CONFIG.json" in str(refused("digits-cnn", "--seq", "8"))
    for size in ("much", "24"):  # 24 bytes are not meant
        assert f"--gpu-memory {size}: must be a size" in str(refused("--gpu-memory", size))
    few = refused("digits-cnn", "--gpu-memory", "1GiB", "--batch-size", "3", "--gpus", "4")
    assert "--gpus 4: a batch of 3 samples leaves some of them without" in str(few)
    if not torch.cuda.is_available():
        for share in ("50%", "0.5", "free"):
            assert "no GPU here" in str(refused("digits-cnn", "--gpu-memory", share))


def test_the_gpu_by_name() -> None:
    for name in ("RTX 4090", "rtx4090", "24"):
        if name == "24":
            assert "--gpu 24: must be one of T4, V100 16, L4" in str(refused("--gpu", name))
            continue
        result = command("digits-cnn", "--batch-size", "64", "--gpu", name)
        assert "1 × RTX 4090 with 23.6 GiB" in result.output
        assert "undivided, it needs" in result.output
    assert "give one of them" in str(refused("--gpu", "T4", "--gpu-memory", "1GiB"))


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 128}
CONFIGURATIONS = {
    "mistral": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 8},
    "mixtral": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 2},
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "vocab_size": 128,
        "num_heads": 2,
    },
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_command_reads_hugging_face_configurations(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **CONFIGURATIONS[kind]}))
    result = command(
        f"hf:{path}",
        "--seq",
        "16",
        "--batch-size",
        "8",
        "--gpu-memory",
        "1GiB",
        "--json",
    )
    found = json.loads(result.output)
    assert found["micro_batch"] == 8
    assert found["parameters"] > 2 * 128 * 32


def test_command_says_what_is_wrong_with_a_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    for stored, said in (
        ({**LLAMA, "num_attention_heads": 5}, "is not a multiple of the number of attention heads"),
        ({"model_type": "no such"}, "no model can be built: "),
        ({"model_type": "wav2vec2"}, "wav2vec2 is neither a language model nor an image"),
    ):
        path.write_text(json.dumps(stored))
        error = refused(f"hf:{path}")
        assert isinstance(error, RecipeError)
        assert said in str(error)
        assert len(str(error)) < 250 + len(str(path))
        assert "\n" not in str(error)


def test_command_refuses_what_is_no_configuration(tmp_path: Path) -> None:
    missing = refused(f"hf:{tmp_path / 'none.json'}")
    assert isinstance(missing, RecipeError)
    assert "cannot be read" in str(missing)
    path = tmp_path / "config.json"
    path.write_text("{")
    assert "is not JSON" in str(refused(f"hf:{path}"))
    path.write_text("{}")
    assert "has no model_type" in str(refused(f"hf:{path}"))


def test_predicts_a_sharded_model() -> None:
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole, hold, every = (
        predict_peak(model, loss, tokens(1), optimizer=optimizer, sharding=sharding)
        for sharding in (None, Sharding(4, "hold"), Sharding(4, "every"))
    )
    slices = sum(p.nbytes for p in model.parameters()) // 4
    assert hold.by_category["optimizer state"] == every.by_category["gradients"] == slices
    assert every.peak < hold.peak < whole.peak


def test_one_simulation_answers_as_several() -> None:
    """A prediction does not depend on those made before it with the same copy of the model."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    questions: list[tuple[int, dict[str, Any]]] = [
        (2, {}),
        (5, {"micro_batches": 1}),
        (2, {"checkpoints": True}),
    ]

    def asked(simulation: Simulation, size: int, options: dict[str, Any]) -> Any:
        found = simulation.predict(tokens(size), **options)
        return found.by_category, found.largest

    options: dict[str, Any] = {"optimizer": optimizer}
    with simulating(model, loss, **options) as simulation:
        together = [asked(simulation, *question) for question in questions]
    for question, found in zip(questions, together, strict=True):
        with simulating(model, loss, **options) as simulation:
            assert asked(simulation, *question) == found


def test_refuses_what_cannot_be_sharded() -> None:
    model = mlp().bfloat16()
    with pytest.raises(UnsupportedError, match="and FSDP2 would round the sum"):
        predict_peak(model, loss, vectors(2), sharding=Sharding(2))
    with pytest.raises(OptionError, match="ranks=1: sharding takes at least 2"):
        Sharding(1)
    with pytest.raises(OptionError, match="sync='never'"):
        Sharding(2, "never")  # type: ignore[arg-type]


def test_the_command_shards() -> None:
    sharded = [
        "digits-cnn",
        "--gpus",
        "2",
        "--parallel",
        "fsdp2",
        "--gpu-memory",
        "1GiB",
    ]
    said = command(*sharded, "--batch-size", "2").output
    assert "sharded by FSDP2 (sync gathered)" in said
    assert re.search(r"▶ gathered .*iB .*\n *hold .*iB .*\n *every .*iB ", said)
    assert "--parallel zero: must be one of ddp, fsdp2" in str(refused("--parallel", "zero"))
    assert "--gpus 1: give the number" in str(refused("--parallel", "fsdp2"))


def test_ways_of_a_sharded_model_differ_by_whole_tensors() -> None:
    """Gathered once, twice per micro-batch, and reduced once or each time, over 4 ranks."""
    model, batch = mlp(), vectors(8)
    nbytes = sum(p.nbytes for p in model.parameters())
    made = {
        sync: make_plan(
            model,
            loss,
            batch,
            batch_size=32,
            budget=1 << 30,
            ranks=4,
            sharding=Sharding(4, sync),  # type: ignore[arg-type]
        )
        for sync in ("hold", "gathered")
    }
    modes = {mode.sync: mode for mode in made["hold"].modes}
    wires = [modes[sync].wire for sync in ("gathered", "hold", "every")]
    steps = made["hold"].steps
    times = (1 + 1, 2 * steps + 1, 3 * steps)
    assert wires == [count * nbytes * 3 // 4 for count in times]
    assert modes["every"].peak < modes["hold"].peak < modes["gathered"].peak
    [chosen] = [p for p in made["hold"].points if p.micro_batch == made["hold"].micro_batch]
    assert chosen.peak == modes["hold"].peak


def test_command_plans_for_this_machine() -> None:
    result = command("digits-cnn", "--batch-size", "8")
    assert result.exit_code == 0
    assert "8 × 1 × 1 rank = 8 samples an update" in result.output


def test_command_reads_classifiers_of_images(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    small = {**SMALL, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    path.write_text(json.dumps({"model_type": "vit", **small}))
    result = command(f"hf:{tmp_path}", "--gpu-memory", "1GiB", "--batch-size", "5")
    assert result.exit_code == 0
    assert f"{tmp_path.name} (vit)" in result.output
    assert "images of 32 × 32" in result.output
    assert "--seq 8: is for language models" in str(refused(f"hf:{path}", "--seq", "8"))
