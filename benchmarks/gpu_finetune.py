"""Fine-tuning at its real sizes: ms per window, memory, tokens per second, share of the peak.

    python benchmarks/gpu_finetune.py                                        # every row
    python benchmarks/gpu_finetune.py --rows 8b-lora --loops 'whole,loop+,sft*,sft' --budget 540
    python benchmarks/gpu_finetune.py --rows '8b-lora/sft*,3b/whole'          # a loop for each row
    python benchmarks/gpu_finetune.py --rows llama              # docs/benchmarks/trainers.md
    python benchmarks/gpu_finetune.py --rows tiny-lora --execute eager         # tried on a CPU

| row | model | trained | tokens × window, micro |
|---|---|---|---|
| 8b-lora | Llama 32×4096, 128,256 words, bf16 | LoRA of rank 16, all layers | 2,048 × 16, 1 |
| 8b-qlora | the same, nf4 with double quantisation | the same | 2,048 × 16, 1 |
| 3b | Llama 28×3072, bf16 | everything | 1,024 × 16, 2 |
| 1b-lora | Llama 22×2048, float32 | LoRA of rank 16 on attention | 1,024 × 32, 4 |
| 1b-long | Llama 22×2048, float32 | everything | 8,192 × 8, 1 |
| llama, llama-1 | Llama 12×768, float32, in every trainer | everything | 1,024 × 64, 4 and 1 |

Each loop runs in a process of its own. They get ready side by side as far as the card has room, and
are timed one at a time. A third of the tokens have no label, a different share in every sample
(not in the Llama 12×768).
Rows of TRL, PEFT, bitsandbytes or Liger are left out by name where the package is missing, and what
would begin too late for `--budget` is named. The share of the peak counts the matrix products that
the model must do (4 per frozen weight and token, 6 per trained one, and those of attention) against
989 TFLOP/s. "GiB" is reserved after the last window, "at most" before the windows that count, tests
and compilation included. The notes are what wholebatch logs: how its micro-steps run, and what it
did not test.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from speed.loops import CUDA, LOOPS, Job, trainer
from speed.models import CASES, DEVICE, Case, Sample, llama_of, transformer_of
from speed.together import Child, Expected, Spec, run_rows
from torch import nn

from wholebatch.compile import ExecuteWarning

PEAK = 989e12
"""Dense bf16 products of an H200 per second, by its data sheet."""
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_8B = llama_of(4096, 14336, 32, 32, num_key_value_heads=8) | {"vocab_size": 128_256}
_3B = llama_of(3072, 8192, 28, 24, num_key_value_heads=8) | {"vocab_size": 128_256}


@dataclass(frozen=True)
class Row:
    """A model, its data, and the size of a micro-batch."""

    case: Case
    micro: int
    tokens: int
    """Tokens of a sample."""
    expected: Expected
    """Seconds until it is measured, and GiB at most, of an earlier run on an H200, rounded up."""


def _sixteen_bit(sizes: dict[str, Any], *, tied: bool = False) -> Any:
    import transformers

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = transformers.LlamaConfig(use_cache=False, tie_word_embeddings=tied, **sizes)
        return transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def _in_four_bits(model: nn.Module) -> nn.Module:
    """Replace every linear layer but the last by bitsandbytes' nf4 with double quantisation."""
    import bitsandbytes.nn  # type: ignore[import-not-found, unused-ignore]

    kinds: Any = bitsandbytes.nn
    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    for name, layer in layers:
        if name == "lm_head":
            continue
        quantised = kinds.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        quantised.weight = kinds.Params4bit(
            layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, quantised.to(DEVICE))
    return model


def _with_adapters(build: Callable[[], nn.Module], targets: list[str]) -> Any:
    from peft import LoraConfig, get_peft_model

    base: Any = build().requires_grad_(False)
    made = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return made


def _masked(sample: Callable[[int], Sample]) -> Callable[[int], Sample]:
    """Take a prompt of its own length out of every sample's labels."""

    def masked(index: int) -> Sample:
        row = dict(sample(index))
        generator = torch.Generator().manual_seed(index)
        length = len(row["input_ids"])
        prompt = int(torch.randint(0, 2 * length // 3, (), generator=generator))
        row["labels"] = row["labels"].clone()
        row["labels"][:prompt] = -100
        return row

    return masked


def _case(sizes: dict[str, Any], window: int, tokens: int, build: Callable[[], Any]) -> Case:
    like = transformer_of("Llama", sizes, window, length=tokens)
    return dataclasses.replace(like, build=build, sample=_masked(like.sample))


_1B = llama_of(2048, 5632, 22, 32)
_TINY = llama_of(32, 64, 2, 2, vocab_size=64)
ROWS: dict[str, Row] = {
    "8b-lora": Row(
        _case(_8B, 16, 2048, lambda: _with_adapters(lambda: _sixteen_bit(_8B), _ALL)),
        1,
        2048,
        Expected(100.0, 48.0),
    ),
    "8b-qlora": Row(
        _case(
            _8B,
            16,
            2048,
            lambda: _with_adapters(lambda: _in_four_bits(_sixteen_bit(_8B)), _ALL),
        ),
        1,
        2048,
        Expected(120.0, 40.0),
    ),
    "3b": Row(
        _case(_3B, 16, 1024, lambda: _sixteen_bit(_3B, tied=True)), 2, 1024, Expected(80.0, 55.0)
    ),
    "1b-lora": Row(
        _case(_1B, 32, 1024, lambda: _with_adapters(CASES["llama-1b"].build, _ALL[:4])),
        4,
        1024,
        Expected(60.0, 30.0),
    ),
    "1b-long": Row(_case(_1B, 8, 8192, CASES["llama-1b"].build), 1, 8192, Expected(75.0, 60.0)),
    "llama": Row(CASES["llama"], 4, 1024, Expected(60.0, 14.0)),
    "llama-1": Row(CASES["llama"], 1, 1024, Expected(60.0, 14.0)),
    "tiny-lora": Row(
        _case(_TINY, 8, 16, lambda: _with_adapters(CASES["tiny"].build, _ALL)),
        2,
        16,
        Expected(5.0, 1.0),
    ),
}


def sft(job: Job, *, ours: bool = False, liger: bool = False) -> None:
    """Train by TRL's SFTTrainer on rows that are tokenised and masked already."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from wholebatch.integrations.transformers import exact

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            job.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = job.window_done()

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    samples = [job.case.sample(index) for index in range(job.case.window)]
    rows = [{name: leaf.tolist() for name, leaf in sample.items()} for sample in samples]
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=job.micro,
            gradient_accumulation_steps=job.steps,
            max_steps=1_000,
            max_length=None,
            max_grad_norm=1.0,
            bf16=CUDA,
            use_cpu=not CUDA,
            optim="adamw_torch_fused" if CUDA else "adamw_torch",
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            dataloader_pin_memory=CUDA,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_liger_kernel=liger,
        )
        kind: Any = exact(SFTTrainer, execute=job.execute) if ours else SFTTrainer  # type: ignore[arg-type]
        host = kind(
            model=job.model(),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        host.train()


HERE: dict[str, tuple[str, Callable[[Job], None]]] = {
    **{name: LOOPS[name] for name in ("whole", "loop+")},
    "sft*": ("exact(SFTTrainer)", functools.partial(sft, ours=True)),
    "sft": ("SFTTrainer", sft),
    **{name: LOOPS[name] for name in ("exact", "trainer")},
    "sft-liger": ("SFTTrainer, Liger", functools.partial(sft, liger=True)),
    "trainer-liger": ("Trainer, Liger", functools.partial(trainer, use_liger_kernel=True)),
    **{name: LOOPS[name] for name in ("acc", "loop", *LOOPS)},
}
"""In the order in which they are measured, for as long as there is time."""


def operations(model: nn.Module, row: Row) -> float:
    """Return the floating-point operations of a window's matrix products."""
    samples = row.case.window
    tokens = samples * row.tokens
    config: Any = getattr(model, "config", None)
    matrices: list[Any] = [one for one in model.modules() if hasattr(one, "in_features")]
    sizes = [
        (one.in_features * one.out_features, one.weight.requires_grad)
        for one in matrices
        if not hasattr(one, "base_layer")
    ]
    products = sum(size * (6 if trained else 4) for size, trained in sizes) * tokens
    attention = 6 * config.num_hidden_layers * config.hidden_size * row.tokens * tokens
    return float(products + attention)


def measure(spec: Spec, execute: str) -> dict[str, Any]:
    """Measure one loop on one row, in this process."""
    name, loop, micro = spec
    row = ROWS[name]
    job = Job(row.case, micro, execute)
    began = time.perf_counter()
    logged: list[str] = []
    listener = logging.Handler(logging.INFO)
    listener.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("wholebatch")
    ours.addHandler(listener)
    ours.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ExecuteWarning)
        HERE[loop][1](job)
    ms, gib = job.found()
    logged += [str(one.message) for one in warned if issubclass(one.category, ExecuteWarning)]
    with torch.device("meta"):
        counted = operations(
            job.case.build() if name != "8b-qlora" else ROWS["8b-lora"].case.build(), row
        )
    return {
        "ms": round(ms, 1),
        "gib": round(gib, 2),
        "highest": round(job.highest, 2),
        "tokens_per_s": round(row.case.window * row.tokens / ms * 1e3),
        "peak": round(counted / (ms / 1e3) / PEAK, 3),
        "ready_s": round(time.perf_counter() - began, 1),
        "logged": logged,
    }


def child(spec: Spec, execute: str) -> None:
    """Measure one row in this process, print it, and end at once."""
    answer: dict[str, Any] = dict(zip(("model", "loop", "micro"), spec, strict=True))
    try:
        answer |= measure(spec, execute)
    except Exception as problem:  # The other measurements are still made.
        traceback.print_exc()
        answer["error"] = f"{type(problem).__name__}: {str(problem)[:200]!r}"
    print("ROW " + json.dumps(answer), flush=True)
    os._exit(0)  # Nobody needs the memory to be freed tidily.


def line_of(answer: dict[str, Any]) -> str:
    """Return a line of the table."""
    begin = f"| {answer['model']} | {HERE[answer['loop']][0]} |"
    if "error" in answer:
        return f"{begin} | | | | | {answer['error']} |"
    return (
        f"{begin} {answer['ms']:,.0f} | {answer['gib']:.1f} | {answer['highest']:.1f} | "
        f"{answer['tokens_per_s']:,} | {answer['peak']:.0%} | {'; '.join(answer['logged'])} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(r for r in ROWS if not r.startswith("tiny")))
    parser.add_argument("--loops", default=",".join(HERE), help=f"of {', '.join(HERE)}")
    parser.add_argument("--execute", default="graph", help="of the entry points of wholebatch")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds in all")
    parser.add_argument("--out", help="a file for one JSON line per measurement")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    if options.child:
        row, loop, micro = options.child.split("/")
        child((row, loop, int(micro)), options.execute)
    parts = [item.partition("/") for item in options.rows.split(",")]
    pairs = [
        (row, loop)
        for row, _, own in parts
        for loop in ([own] if own else options.loops.split(","))
    ]
    for name, asked, known in (
        ("rows", {row for row, _ in pairs}, ROWS),
        ("loops", {loop for _, loop in pairs}, HERE),
    ):
        if unknown := asked - set(known):
            parser.error(f"--{name} {', '.join(unknown)}: must be some of {', '.join(known)}")
    began, lines = time.monotonic(), list[str]()

    def report(answer: dict[str, Any]) -> None:
        lines.append(line_of(answer))
        print(lines[-1], flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(answer) + "\n")

    run_rows(
        [(row, loop, ROWS[row].micro) for row, loop in pairs],
        lambda spec, gib: Child(
            Path(__file__).resolve(),
            spec,
            ["--execute", options.execute],
            os.environ.get("PYTHONPATH", ""),
            gib,
        ),
        lambda spec: ROWS[spec[0]].expected,
        until=began + options.budget,
        report=report,
    )
    print("\n| row | loop | ms per window | GiB | at most | tokens/s | of peak | notes |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    print("\n".join(lines))
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
