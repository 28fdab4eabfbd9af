"""Seconds until a compiled graph runs, cold and in a second process; the slowest window of "auto".

    python benchmarks/gpu_start.py                    # Llama 12x768, three processes
    python benchmarks/gpu_start.py --layers 22 --width 2048 --window 32

Every measurement runs in a process of its own. The first two share caches that are empty at first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def train_one(options: argparse.Namespace) -> dict[str, Any]:
    """Train for a while in one way, and return what was measured."""
    import torch
    import transformers

    import wholebatch as wb

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    train = wb.WholeBatch(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        loss=wb.causal_lm,
        micro_batch=4,
        precision="bf16",
        execute=options.execute,
    )
    batch = {"input_ids": torch.randint(0, 32000, (options.window, 1024), device="cuda")}
    began = time.perf_counter()
    windows: list[tuple[str, float]] = []
    ready = None
    while time.perf_counter() - began < options.seconds and len(windows) < 2000:
        at = time.perf_counter()
        train.step(batch)
        torch.cuda.synchronize()
        mode = train._runner.executor.mode
        windows.append((mode, time.perf_counter() - at))
        if ready is None and mode == "graph of compile":
            ready = time.perf_counter() - began
        if ready is not None and options.execute == "graph" and len(windows) > 20:
            break
    modes = [mode for mode, _ in windows]
    captured = next((i for i, mode in enumerate(modes) if mode.startswith("graph")), len(modes))
    later = [seconds for _, seconds in windows[captured + 1 :]]
    return {
        "execute": options.execute,
        "ready_s": ready,
        "first_window_s": windows[0][1],
        "windows": len(windows),
        "median_ms": 1e3 * statistics.median(later) if later else None,
        "slowest_after_capture_ms": 1e3 * max(later) if later else None,
        "last_ms": 1e3 * statistics.median(s for _, s in windows[-5:]),
        "notes": train._runner.executor.notes.history[-4:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--execute", choices=["graph", "auto"], help="measure here, in one process")
    options = parser.parse_args()
    if options.execute is not None:
        print(json.dumps(train_one(options)))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        for name, execute in (("cold", "graph"), ("warm", "graph"), ("auto", "auto")):
            fresh = str(Path(cache) / ("auto" if name == "auto" else "graph"))
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": f"{fresh}/inductor",
                "TRITON_CACHE_DIR": f"{fresh}/triton",
                "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            }
            command = [sys.executable, __file__, "--execute", execute]
            for option in ("layers", "width", "window", "seconds"):
                command += [f"--{option}", str(getattr(options, option))]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True)
            print(name, ran.stdout.strip() or ran.stderr[-2000:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
