"""A Llama of real size on one GPU: the usual loop under bf16 autocast beside `wb.WholeBatch`.

    python examples/llama_gpu.py                 # 134 million parameters, 64 texts of 1,024 tokens
    python examples/llama_gpu.py --layers 22 --width 2048 --batch 32    # 1.1 billion

Both train on the sources of your Python, as bytes. The usual loop divides the loss of each
micro-batch by their number. `wb.WholeBatch` gets the whole batch: on a GPU it runs forward,
backward and addition as one compiled graph, recorded as a CUDA graph.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb


def llama(layers: int, width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        vocab_size=32000,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def texts(batch: int, tokens: int, device: str) -> dict[str, Tensor]:
    """Python's own sources as bytes, `batch` texts of `tokens` each."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)[: batch * tokens]
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().view(batch, tokens)
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


def adamw(model: Any) -> torch.optim.Optimizer:
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)


def before(model: Any, micro_batch: int) -> Callable[[dict[str, Tensor]], float]:
    """Return the update of the usual loop."""
    optimizer, device = adamw(model), next(model.parameters()).device.type

    def update(batch: dict[str, Tensor]) -> float:
        micros = list(wb.split(batch, micro_batch))
        for micro in micros:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = model(**micro).loss / len(micros)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()) * len(micros)

    return update


def after(model: Any, micro_batch: int) -> Callable[[dict[str, Tensor]], float]:
    """Return the update of `wb.WholeBatch`."""
    train = wb.WholeBatch(
        model,
        adamw(model),
        loss=wb.causal_lm,
        micro_batch=micro_batch,
        precision="bf16" if next(model.parameters()).is_cuda else "full",
        clip_norm=1.0,
    )
    return lambda batch: train.step(batch).loss


def main(
    layers: int = 12, width: int = 768, batch: int = 64, micro_batch: int = 4, seconds: float = 60.0
) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = texts(batch, 1024 if device == "cuda" else 64, device)
    found = {}
    for name, loop in (("usual loop", before), ("wb.WholeBatch", after)):
        model = llama(layers, width).to(device)
        update = loop(model, micro_batch)
        began, times, loss = time.perf_counter(), [0.0], 0.0
        while time.perf_counter() - began < seconds or len(times) < 3:
            start = time.perf_counter()
            loss = update(data)  # reads the loss, so the device has finished
            times.append(time.perf_counter() - start)
        found[name] = sorted(times[-10:])[len(times[-10:]) // 2] * 1e3
        gib = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0
        print(f"{name}: {found[name]:.0f} ms per update, {gib:.1f} GiB, loss {loss:.3f}")
        del model, update
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    ratio = found["usual loop"] / found["wb.WholeBatch"]
    print(f"Shown: an update takes 1 / {ratio:.1f} of the time of the usual loop.")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for option, value in (("layers", 12), ("width", 768), ("batch", 64), ("micro-batch", 4)):
        parser.add_argument(f"--{option}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each loop")
    main(**vars(parser.parse_args()))
