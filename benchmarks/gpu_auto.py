"""`micro_batch="auto"` beside the largest micro-batch that fits, and predicted beside real peaks.

    python benchmarks/gpu_auto.py [NAME ...]     # on CUDA; writes memory.md

Each model runs in a process of its own, under a hard limit of its allocator, for at most 60
seconds. "Largest that fits" is searched in steps of 4% above the chosen size, each with a window of
two micro-batches, until three sizes in a row fail. A model with BatchNorms that train is not split,
so ResNet-50 has GroupNorms here. The page goes to $OUT if that is set, else to docs/benchmarks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from memory_models import GPT, UNet, ViT, images, loss, masks, resnet, texts
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.memory import predict_peak
from wholebatch.memory.plain_window import PlainWindow

GIB = 2**30
Batch = dict[str, Tensor]


def llama() -> nn.Module:
    """Return a Llama of 12 layers of 768, or a GPT of that size without transformers."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return GPT(layers=12, width=768, heads=12, length=1024)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        vocab_size=32000,
        max_position_embeddings=1024,
        use_cache=False,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-any-return, unused-ignore]


def logits_loss(model: nn.Module, micro: Batch) -> wb.Loss:
    made = model(micro["x"])
    return wb.cross_entropy(getattr(made, "logits", made), micro["y"], dim=-1)


def resnet_with_group_norms() -> nn.Module:
    model = resnet((3, 4, 6, 3))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            model.set_submodule(name, nn.GroupNorm(32, module.num_features))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Any, float]] = {
    "Llama 12×768": (llama, lambda n: texts(n, 1024, 32000), logits_loss, 10.0),
    "ViT-B": (lambda: ViT(width=768, heads=12), images, loss, 6.0),
    "ResNet-50, GroupNorm": (resnet_with_group_norms, images, loss, 4.0),
    "UNet": (UNet, masks, loss, 4.0),
}
"""A model, its batches and loss, and the GiB of memory that it gets."""


SECONDS = 60
"""The most time that a model gets, in its own process."""


def measured(name: str, most: int = 256) -> dict[str, Any]:
    """Return the chosen size, the largest that runs, and a predicted and a real peak."""
    make, batch_of, loss_of, gib = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = int(gib * GIB)
    batch = batch_of(most)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss_of,
        precision="bf16",
        memory=budget,
        execute="eager",
    )
    began = time.perf_counter()
    print(train.choose(batch), file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    chosen = train.micro_batch_size
    assert chosen is not None
    train.step({key: value[: 2 * chosen] for key, value in batch.items()})
    recoveries = train.recoveries
    print(f"{recoveries} recoveries in the first window", file=sys.stderr, flush=True)

    def peak(size: int) -> int | None:
        """Return the peak of a window in the middle of a run; None if it does not fit."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        micro = {key: value[:size].cuda() for key, value in batch.items()}
        try:
            PlainWindow(model, loss_of, optimizer=optimizer, precision="bf16").run([micro, micro])
            return torch.cuda.max_memory_allocated()
        except torch.OutOfMemoryError:
            return None
        finally:
            optimizer.zero_grad(set_to_none=True)
            torch.clear_autocast_cache()

    largest, step, failures = chosen, max(1, chosen // 25), 0
    size = chosen
    while failures < 3 and size < most:
        size += step
        if peak(size) is None:
            failures += 1
        else:
            largest, failures = size, 0
        print(f"{size}: largest so far {largest}", file=sys.stderr, flush=True)
    few = {key: value[: chosen // 2] for key, value in batch.items()}
    told = predict_peak(model, loss_of, few, optimizer=optimizer, precision="bf16")
    return {
        "chosen": chosen,
        "largest": largest,
        "recoveries": recoveries,
        "seconds": seconds,
        "predicted": told.peak / GIB,
        "real": (peak(chosen // 2) or 0) / GIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--one", help="measure this model alone, and print it as JSON")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measured(options.one)))
        return
    page = [
        "# Memory: measured, chosen and predicted",
        "",
        f"Written by `benchmarks/gpu_auto.py` on {date.today()}: {torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}. bf16, AdamW, eager. The prediction is for half the chosen "
        "size.",
        "",
        "| model | budget, GiB | auto | largest that fits | share | recoveries | seconds |"
        " predicted, GiB | real, GiB | off |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in options.names:
        again = [sys.executable, __file__, "--one", name]
        try:
            ran = subprocess.run(again, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            ran = None
        if ran is None or ran.returncode:
            why = f"took more than {SECONDS} seconds" if ran is None else "failed"
            page.append(f"| {name} | {why} |")
        else:
            row = json.loads(ran.stdout.splitlines()[-1])
            off = row["predicted"] / row["real"] - 1 if row["real"] else float("nan")
            page.append(
                f"| {name} | {MODELS[name][3]:.0f} | {row['chosen']} | {row['largest']} | "
                f"{row['chosen'] / row['largest']:.0%} | {row['recoveries']} | "
                f"{row['seconds']:.0f} | {row['predicted']:.2f} | {row['real']:.2f} | {off:+.1%} |"
            )
        print(page[-1], flush=True)
    folder = Path(os.environ.get("OUT", Path(__file__).parents[1] / "docs/benchmarks"))
    (folder / "memory.md").write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
