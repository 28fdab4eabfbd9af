"""Seconds from the first step until the recorded graph runs: cold, and in a second process.

    python benchmarks/gpu_ready.py --budget 280                       # as far as the time goes
    python benchmarks/gpu_ready.py --rows llama-12/blocks llama-12/whole
    python benchmarks/gpu_ready.py --rows tiny/blocks --windows 2     # on a CPU, to try it

A row is a model, and the way in which it is compiled: `blocks` compiles layers that are alike once,
`whole` compiles the whole graph. Each row runs in two processes, one after the other: the first
with empty caches, the second with what the first has left. The table says how long each phase took,
the time of a window and the peak of device memory afterwards. A row that would not end within the
budget is not begun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LORA_RANK = 16


@dataclass(frozen=True)
class Model:
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int = 32000
    length: int = 1024
    micro: int = 4
    window: int = 32
    lora: bool = False
    seconds: float = 60.0
    """Expected for both processes of a row."""


MODELS = {
    "llama-12": Model(12, 768, 12, 2048),
    "llama-48": Model(48, 768, 12, 2048, seconds=90.0),
    "llama-22": Model(22, 2048, 32, 5632, window=16, seconds=80.0),
    "lora-22": Model(22, 2048, 32, 5632, window=16, lora=True, seconds=100.0),
    "narrow-12": Model(12, 64, 4, 128, vocabulary=256, length=32, micro=2, window=4),
    "tiny": Model(6, 32, 4, 64, vocabulary=64, length=16, micro=2, window=4),
}
ROWS = [
    "llama-12/blocks",
    "llama-12/whole",
    "llama-48/blocks",
    "llama-22/blocks",
    "lora-22/blocks",
    "llama-22/whole",
    "lora-22/whole",
    "llama-48/whole",
]
PHASES = (
    "eager",
    "import",
    "trace",
    "rewrite",
    "cut",
    "compile",
    "set aside",
    "trial",
    "check",
    "record",
)
"""`eager` is the rest: the first windows, and the look before them."""


# ----------------------------------------------------------------------------- one row, one process


def build(model: Model) -> Any:
    import torch
    from torch import Tensor, nn
    from transformers import LlamaConfig, LlamaForCausalLM

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, LORA_RANK, bias=False)
            self.up = nn.Linear(LORA_RANK, base.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.base(x) + 2.0 * self.up(self.down(x))
            return made

    config = LlamaConfig(
        hidden_size=model.width,
        num_attention_heads=model.heads,
        intermediate_size=model.inner,
        num_hidden_layers=model.layers,
        vocab_size=model.vocabulary,
        max_position_embeddings=model.length,
        use_cache=False,
    )
    torch.manual_seed(0)
    built = LlamaForCausalLM(config)
    if model.lora:
        built.requires_grad_(False)
        for layer in built.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, child in list(part.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(part, name, Lora(child))
    return built


@contextlib.contextmanager
def phases_timed(device: str) -> Iterator[dict[str, float]]:
    """Add up the seconds of each phase of getting ready."""
    import torch

    from wholebatch.compile import joint_graph, micro_step
    from wholebatch.compile.gradient_buffers import Gradients
    from wholebatch.compile.graph_check import Check

    spent: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            if device == "cuda":
                torch.cuda.synchronize()
            spent[phase] += time.perf_counter() - began
            return result

        return run

    places = [
        (micro_step, "trace", "trace"),
        (joint_graph, "rewrite", "rewrite"),
        (joint_graph, "compiled_by_inductor", "compile"),
        (micro_step, "start_compiler", "import"),
        (joint_graph, "Blocks", "cut"),
        (Gradients, "set_aside", "set aside"),
        (Gradients, "put_back", "set aside"),
        (Check, "hold_against", "check"),
        (micro_step, "rehearse", "trial"),
        (micro_step, "CapturedGraph", "record"),
    ]
    before = [getattr(module, name) for module, name, _ in places]
    for (module, name, phase), function in zip(places, before, strict=True):
        setattr(module, name, timed(phase, function))
    try:
        yield spent
    finally:
        for (module, name, _), function in zip(places, before, strict=True):
            setattr(module, name, function)


def child(row: str, windows: int) -> dict[str, Any]:
    """Measure one row in this process."""
    name, way = row.split("/")
    model = MODELS[name]
    import torch

    import wholebatch as wb
    from wholebatch.compile.joint_graph import JointStep

    device = "cuda" if torch.cuda.is_available() else "cpu"
    JointStep.blocks = way == "blocks"
    built = build(model).to(device)
    trained = [p for p in built.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> wb.Loss:
        logits = model(input_ids=batch["x"]).logits
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["y"].flatten(), reduction="sum"
        )
        return wb.Loss(total, batch["y"].numel())

    execute: Any = "graph" if device == "cuda" else "compile"
    generator = torch.Generator().manual_seed(1)
    shape = (model.window, model.length)
    ids = torch.randint(0, model.vocabulary, shape, generator=generator)
    batch = {"x": ids.to(device), "y": ids.roll(-1, 1).to(device)}
    first = None
    with phases_timed(device) as spent:
        began = time.perf_counter()
        train = wb.WholeBatch(
            built, optimizer, loss=loss, micro_batch=model.micro, execute=execute, precision="bf16"
        )
        executor = train._runner.executor
        for _ in range(4):
            step = train.step(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            first = first or time.perf_counter() - began
            if executor.mode.endswith("compile"):
                break
    ready = time.perf_counter() - began
    spent["eager"] = ready - sum(spent.values())
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(windows):
        at = time.perf_counter()
        step = train.step(batch)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - at)
    joint = next(iter(executor._steps.values())).joint if executor._steps else None
    program = getattr(joint, "_run", None)
    return {
        "mode": executor.mode,
        "ready_s": round(ready, 2),
        "first_step_s": round(first or 0.0, 2),
        "phases_s": {phase: round(seconds, 2) for phase, seconds in spent.items()},
        "window_ms": round(1e3 * sorted(times)[len(times) // 2], 2) if times else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else 0,
        "operations": getattr(joint, "operations", None),
        "pieces": [getattr(program, "compiled", 1), getattr(program, "pieces", 1)],
        "loss": float(step.loss),
        "notes": executor.notes.history[-3:],
        "torch": torch.__version__,
    }


# ---------------------------------------------------------------------------------- all of the rows


def measured(row: str, windows: int, caches: str, limit: float) -> dict[str, Any]:
    """Run one process; return what it printed last, or why it failed."""
    environment = dict(os.environ)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches) / "inductor")
    environment["TRITON_CACHE_DIR"] = str(Path(caches) / "triton")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, __file__, "--child", row, "--windows", str(windows)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not ready within {limit:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": done.stderr.strip().splitlines()[-6:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def line(row: str, start: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"| {row} | {start} | failed: {found['failed']} |"
    phases = " | ".join(f"{found['phases_s'][phase]:.1f}" for phase in PHASES)
    compiled, pieces = found["pieces"]
    return (
        f"| {row} | {start} | {found['ready_s']:.1f} | {phases} | {compiled} of {pieces} | "
        f"{found['window_ms']} | {found['peak_gib']} | {found['mode']} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--budget", type=float, default=560.0, help="seconds in all")
    parser.add_argument("--windows", type=int, default=15, help="timed windows of a row")
    parser.add_argument("--cold-only", action="store_true", help="no second process")
    parser.add_argument("--out", type=Path, help="folder for ready.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.windows)), flush=True)
        return 0
    began = time.monotonic()
    print(
        f"| row | start | ready, s | {' | '.join(PHASES)} | compiled | ms a window | GiB | mode |"
    )
    print("|" + "---|" * (len(PHASES) + 7), flush=True)
    found: dict[str, Any] = {}
    for row in options.rows:
        left = options.budget - (time.monotonic() - began)
        if left < MODELS[row.split("/")[0]].seconds / (2 if options.cold_only else 1):
            print(f"| {row} | not begun: {left:.0f} s left |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as caches:
            for start in ("cold",) if options.cold_only else ("cold", "warm"):
                left = options.budget - (time.monotonic() - began)
                one = measured(row, options.windows, caches, max(left, 1.0))
                found[f"{row}/{start}"] = one
                print(line(row, start, one), flush=True)
    text = json.dumps(found, indent=1)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "ready.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
