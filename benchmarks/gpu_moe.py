"""What a mixture of experts pays for the balance loss of the whole window.

    python benchmarks/gpu_moe.py            # on CUDA; a few minutes; writes moe.json to $OUT
    python benchmarks/gpu_moe.py --small    # a look at the code path, anywhere

A Mixtral of Transformers (bf16 parameters), windows of 8 micro-batches, with and without activation
checkpointing. `wb.moe_loss` needs the counts of the whole window before the first backward: it
keeps the graph of the last micro-batch, and runs the others twice.
All ways run in one process, in turn; a figure is the median over windows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb

LARGE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
MICRO_BATCHES = 8
ALLOWED = 1.15
Step = Callable[[], Any]


def mixture(sizes: dict[str, Any], device: str, *, balanced: bool, checkpointing: bool) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **sizes,
        num_experts_per_tok=2,
        output_router_logits=balanced,
        router_aux_loss_coef=0.02,
        use_cache=False,
    )
    with torch.device(device):
        model: Any = transformers.MixtralForCausalLM(config)
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def windows(micro: int, length: int, vocabulary: int, device: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (3, micro * MICRO_BATCHES, length)
    return [
        {"input_ids": ids.to(device)}
        for ids in torch.randint(0, vocabulary, shape, generator=generator)
    ]


def ways(small: bool) -> dict[str, dict[str, Any]]:
    """Each way: whether it is balanced, checkpointed, compiled, and how it keeps graphs."""
    made: dict[str, dict[str, Any]] = {}
    for checkpointing in (False, True):
        also = ", checkpointing" if checkpointing else ""
        common = {"checkpointing": checkpointing}
        made[f"without, eager{also}"] = {**common, "execute": "eager"}
        made[f"whole window, keep=auto{also}"] = {**common, "keep": "auto"}
        made[f"whole window, keep=0{also}"] = {**common, "keep": 0}
        if not small:
            made[f"without, recorded graphs{also}"] = {**common, "execute": "graph"}
            made[f"whole window, compiled model, keep=auto{also}"] = {
                **common,
                "keep": "auto",
                "compiled": True,
            }
    return made


def step_of(way: dict[str, Any], sizes: dict[str, Any], device: str, micro: int, data: Any) -> Step:
    balanced = "keep" in way
    model = mixture(sizes, device, balanced=balanced, checkpointing=way["checkpointing"])
    if way.get("compiled"):
        model.model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=wb.moe_loss(keep=way["keep"]) if balanced else wb.causal_lm,
        micro_batch=micro,
        execute=way.get("execute", "auto"),
        audit=False,
    )
    turn = iter(range(10**9))

    def step() -> Any:
        return train.step(data[next(turn) % len(data)])

    return step


def measured(step: Step, device: str, warm: int, rounds: int) -> dict[str, float]:
    for _ in range(warm):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds, loss = [], 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        loss = step().loss
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"seconds": statistics.median(seconds), "peak_gib": peak, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    device = "cpu" if small else "cuda"
    sizes, micro, length = (SMALL, 2, 16) if small else (LARGE, 8, 1024)
    data = windows(micro, length, sizes["vocab_size"], device)
    found: dict[str, Any] = {}
    for name, way in ways(small).items():
        try:
            step = step_of(way, sizes, device, micro, data)
            found[name] = measured(step, device, *((2, 2) if small else (4, 6)))
            del step
        except Exception as error:  # one way that fails must not cost the others
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        base = found.get("without, eager" + (", checkpointing" if way["checkpointing"] else ""), {})
        if "seconds" in found[name] and "seconds" in base:
            found[name]["ratio_to_eager_without"] = found[name]["seconds"] / base["seconds"]
        print(name, json.dumps(found[name]), flush=True)
    kept = [one for name, one in found.items() if name.startswith("whole window, keep=auto")]
    worst = max(one.get("ratio_to_eager_without", float("inf")) for one in kept)
    print(f"balance over the whole window: {worst:.3f} of the loop without it (at most {ALLOWED})")
    if folder := os.environ.get("OUT"):
        Path(folder, "moe.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
