"""Seconds from the first step until the recorded graph runs: cold, and in a second process.

    python benchmarks/gpu_ready.py --budget 280                       # as far as the time goes
    python benchmarks/gpu_ready.py --rows llama-12/blocks llama-12/whole
    python benchmarks/gpu_ready.py --rows gpt2/auto gpt2/torch gpt2/eager     # the first 60 s
    python benchmarks/gpu_ready.py --rows llama-12/blocks --timeline  # each stage as it happens
    python benchmarks/gpu_ready.py --rows tiny/blocks --windows 2     # on a CPU, to try it

A row is a model, and a way to run it:

- `blocks` compiles layers that are alike once, `whole` compiles the whole graph. Each runs in two
  processes, one after the other: the first with empty caches, the second with what the first has
  left. The table says how long each phase took, the time of a window and the peak of device memory.
- `auto` (execute="auto"), `torch` (a hand-written loop with torch.compile) and `eager` (the same
  loop without) run for 60 s with empty caches. The table says how many updates were made, the
  longest window, and the seconds until full speed; the timeline is in the JSON below it.

Python's bytecode of every module is written before the first row, into a folder of this command:
pip leaves it at an installation; without it, each process would compile the source of every module.

A row that would not end within the budget is not begun.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
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
    kind: str = "llama"
    seconds: float = 60.0
    """Expected for both processes of a row."""


MODELS = {
    "llama-12": Model(12, 768, 12, 2048),
    "llama-48": Model(48, 768, 12, 2048, seconds=70.0),
    "llama-22": Model(22, 2048, 32, 5632, window=16, seconds=60.0),
    "lora-22": Model(22, 2048, 32, 5632, window=16, lora=True, seconds=70.0),
    "gpt2": Model(12, 768, 12, 3072, vocabulary=50257, kind="gpt2"),
    "vit-b": Model(
        12, 768, 12, 3072, vocabulary=1000, length=224, micro=16, window=128, kind="vit"
    ),
    "narrow-22": Model(22, 64, 4, 128, vocabulary=256, length=32, window=16),
    "narrow-lora": Model(22, 64, 4, 128, vocabulary=256, length=32, window=16, lora=True),
    "narrow-12": Model(12, 64, 4, 128, vocabulary=256, length=32, micro=2, window=4),
    "tiny": Model(6, 32, 4, 64, vocabulary=64, length=16, micro=2, window=4),
}
LOOPS = ("auto", "torch", "eager")
ROWS = [
    "llama-12/blocks",
    "llama-12/whole",
    "llama-48/blocks",
    "llama-22/blocks",
    "lora-22/blocks",
    "llama-22/whole",
    "lora-22/whole",
    "llama-48/whole",
    *(
        f"{name}/{way}"
        for name in ("gpt2", "llama-12", "vit-b")
        for way in ("auto", "torch", "eager")
    ),
]
LOOPS = ("auto", "torch", "eager")
PHASES = (
    "eager",
    "import",
    "trace",
    "fusions",
    "rewrite",
    "cut",
    "workers",
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
    import transformers as tf

    torch.manual_seed(0)
    config: Any
    if model.kind == "gpt2":
        config = tf.GPT2Config(
            n_embd=model.width, n_layer=model.layers, n_head=model.heads, use_cache=False,
            vocab_size=model.vocabulary, n_positions=model.length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return tf.GPT2LMHeadModel(config)
    if model.kind == "vit":
        config = tf.ViTConfig(
            hidden_size=model.width, num_hidden_layers=model.layers, image_size=model.length,
            num_attention_heads=model.heads, intermediate_size=model.inner,
        )  # fmt: skip
        config.num_labels = model.vocabulary
        return tf.ViTForImageClassification(config)
    config = tf.LlamaConfig(
        hidden_size=model.width,
        num_attention_heads=model.heads,
        intermediate_size=model.inner,
        num_hidden_layers=model.layers,
        vocab_size=model.vocabulary,
        max_position_embeddings=model.length,
        use_cache=False,
    )
    built = tf.LlamaForCausalLM(config)
    if model.lora:
        sys.path.append(str(ROOT / "build" / "doors"))  # peft, if it is not installed
        import peft

        options = peft.LoraConfig(r=LORA_RANK, target_modules="all-linear", lora_dropout=0.0)
        return peft.get_peft_model(built, options)
    return built


def data(model: Model, device: str) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    if model.kind == "vit":
        shape: tuple[int, ...] = (model.window, 3, model.length, model.length)
        images = torch.randn(shape, generator=generator)
        classes = torch.randint(0, model.vocabulary, (model.window,), generator=generator)
        return {"x": images.to(device), "y": classes.to(device)}
    shape = (model.window, model.length)
    ids = torch.randint(0, model.vocabulary, shape, generator=generator)
    return {"x": ids.to(device), "y": ids.roll(-1, 1).to(device)}


def total_of(model: Any, batch: dict[str, Any]) -> Any:
    """Return the sum of the losses of all tokens or images."""
    import torch

    logits = model(batch["x"]).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2).float(), batch["y"].flatten(), reduction="sum"
    )


def stage(what: str) -> None:
    """Print a line of the timeline: the seconds since the process began, and what comes next."""
    if os.environ.get("TIMELINE"):
        print(f"{time.perf_counter() - BEGAN:7.2f} {what}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def phases_timed(device: str) -> Iterator[dict[str, float]]:
    """Add up the seconds of each phase of getting ready."""
    import torch

    from wholebatch import runner
    from wholebatch.compile import (
        biased_attention,
        cross_entropy,
        fused_weight_grad,
        joint_graph,
        layer_norm,
        micro_step,
        trace,
    )
    from wholebatch.compile.compile_workers import Pending
    from wholebatch.compile.gradient_buffers import Gradients
    from wholebatch.compile.graph_check import Check

    spent: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            stage(f"{phase} begins")
            began = time.perf_counter()
            result = function(*args, **kwargs)
            if device == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - began
            if phase in spent:
                spent[phase] += took
            stage(f"{phase} took {took:.2f}")
            return result

        return run

    looked_into: list[tuple[Any, str, str]] = [
        (micro_step, "compile_workers", "start of workers"),
        (fused_weight_grad.Adding, "__call__", "eager micro-step"),
        (cross_entropy, "computes_rightly", "kernel of the entropy"),
        (layer_norm, "computes_rightly", "kernel of norms"),
        (biased_attention, "computes_rightly", "kernel of attention"),
        (joint_graph, "can_add_products", "products of graphs"),
        (trace, "wait_for_import", "rest of Inductor's import"),
        (torch.optim.AdamW, "step", "optimizer"),
        (micro_step, "ForwardState", "state"),
        (micro_step, "empty_cache", "empty cache"),
        (micro_step, "entry_of", "digest"),
        (runner, "entry_of", "digest of the first test"),
        (micro_step, "load", "load of the graph"),
    ]
    places = [
        *(looked_into if os.environ.get("TIMELINE") else ()),
        (micro_step, "trace", "trace"),
        (joint_graph.JointStep, "_possible_fusions", "fusions"),
        (joint_graph, "rewrite", "rewrite"),
        (Pending, "wait", "workers"),
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

    stage("imported")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.ones(1, device=device)
    stage("device ready")
    JointStep.blocks = way == "blocks"
    with torch.device(device):
        built = build(model)
    stage("model built")
    trained = [p for p in built.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> wb.Loss:
        return wb.Loss(total_of(model, batch), batch["y"].numel())

    execute: Any = "graph" if device == "cuda" else "compile"
    batch = data(model, device)
    first = None
    with phases_timed(device) as spent:
        began = time.perf_counter()
        train = wb.WholeBatch(
            built, optimizer, loss=loss, micro_batch=model.micro, execute=execute, precision="bf16"
        )
        executor = train._runner.executor
        for number in range(4):
            stage(f"window {number}")
            step = train.step(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            first = first or time.perf_counter() - began
            if executor.mode.endswith("compile"):
                break
    ready = time.perf_counter() - began
    stage(f"ready after {ready:.2f}")
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


def stepper(model: Model, way: str, device: str) -> tuple[Callable[[], Any], Callable[[], str]]:
    """Return the function that makes one update in this way, and one that says how it ran."""
    import torch

    import wholebatch as wb

    with torch.device(device):
        built = build(model)
    trained = [p for p in built.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")
    batch = data(model, device)
    if way == "auto":

        def loss(model: Any, batch: dict[str, torch.Tensor]) -> wb.Loss:
            return wb.Loss(total_of(model, batch), batch["y"].numel())

        train = wb.WholeBatch(
            built, optimizer, loss=loss, micro_batch=model.micro, precision="bf16"
        )
        executor = train._runner.executor
        return lambda: train.step(batch), lambda: f"{executor.mode}; {executor.notes.history[-4:]}"
    run = torch.compile(built) if way == "torch" else built

    def step() -> None:
        for at in range(0, model.window, model.micro):
            micro = {name: one[at : at + model.micro] for name, one in batch.items()}
            with torch.autocast(device, dtype=torch.bfloat16):
                total = total_of(run, micro)
            (total / batch["y"].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: way


def loop(row: str, seconds: float) -> dict[str, Any]:
    """Run one of the loops for so long, with empty caches; return the timeline."""
    name, way = row.split("/")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    step, mode = stepper(MODELS[name], way, device)
    began = time.perf_counter()
    ends = [0.0]
    while ends[-1] < seconds:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter() - began)
    windows = [b - a for a, b in pairwise(ends)]
    best = sorted(windows[-5:])[len(windows[-5:]) // 2]
    slow = [at for at, took in enumerate(windows) if took > 1.1 * best]
    changes = [
        (round(ends[at], 1), round(1e3 * took))
        for at, took in enumerate(windows)
        if at == 0 or not 0.8 < took / windows[at - 1] < 1.25
    ]
    return {
        "mode": mode(),
        "updates": len(windows),
        "longest_s": round(max(windows), 2),
        "longest_after_first_s": round(max(windows[1:], default=0.0), 2),
        "full_speed_after_s": round(ends[slow[-1] + 1], 1) if slow else 0.0,
        "window_ms": round(1e3 * best, 1),
        "timeline": changes[:60],
        "torch": torch.__version__,
    }


# ---------------------------------------------------------------------------------- all of the rows


IMPORTS = (
    "import transformers.models.llama, torch._inductor.compile_fx, wholebatch.compile.micro_step"
)


def write_bytecode(folder: str) -> None:
    """Let all processes keep Python's bytecode there, and write that of torch."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = folder
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=False)


def measured(row: str, windows: int, seconds: float, caches: str, limit: float) -> dict[str, Any]:
    """Run one process; return what it printed last, or why it failed."""
    environment = dict(os.environ)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches) / "inductor")
    environment["TRITON_CACHE_DIR"] = str(Path(caches) / "triton")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, __file__, "--child", row, "--windows", str(windows)]
    command += ["--seconds", str(seconds)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=None if "TIMELINE" in environment else subprocess.PIPE,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not ready within {limit:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": (done.stderr or "").strip().splitlines()[-6:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def line(row: str, start: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"| {row} | {start} | failed: {found['failed']} |"
    if "updates" in found:
        return (
            f"| {row} | loop | {found['updates']} updates | longest window {found['longest_s']} s, "
            f"after the first {found['longest_after_first_s']} s | full speed after "
            f"{found['full_speed_after_s']} s | {found['window_ms']} ms | {found['mode']} |"
        )
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
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a loop's row")
    parser.add_argument("--cold-only", action="store_true", help="no second process")
    parser.add_argument("--timeline", action="store_true", help="print each stage as it happens")
    parser.add_argument("--out", type=Path, help="folder for ready.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if options.child.split("/")[1] in LOOPS:
            print(json.dumps(loop(options.child, options.seconds)), flush=True)
        else:
            print(json.dumps(child(options.child, options.windows)), flush=True)
        return 0
    if options.timeline:
        os.environ["TIMELINE"] = "1"
    began = time.monotonic()
    bytecode = tempfile.TemporaryDirectory()
    write_bytecode(bytecode.name)
    print(
        f"| row | start | ready, s | {' | '.join(PHASES)} | compiled | ms a window | GiB | mode |"
    )
    print("|" + "---|" * (len(PHASES) + 7), flush=True)
    found: dict[str, Any] = {}
    for row in options.rows:
        left = options.budget - (time.monotonic() - began)
        name, way = row.split("/")
        needed = MODELS[name].seconds / (2 if options.cold_only else 1)
        if left < (options.seconds + 20.0 if way in LOOPS else needed):
            print(f"| {row} | not begun: {left:.0f} s left |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as caches:
            alone = options.cold_only or row.split("/")[1] in LOOPS
            for start in ("cold",) if alone else ("cold", "warm"):
                left = options.budget - (time.monotonic() - began)
                one = measured(row, options.windows, options.seconds, caches, max(left, 1.0))
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
