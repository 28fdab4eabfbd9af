"""What wholebatch costs inside Keras and optax, beside their own accumulation.

    python benchmarks/integrations_speed_keras.py            # all: docs/benchmarks/keras_jax.md
    python benchmarks/integrations_speed_keras.py optax      # one; the other rows are kept

Micro-steps of about 20 ms on one CPU thread, in windows of 4, with Adam and clipping by norm. The
library's own accumulation and wholebatch in it run in turns in one process; a ratio is taken in
every turn, and their median is the result. Measured is the process's own time on the processor, so
that other work on the machine does not count. Fails above 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
LIMIT = 1.03
STEPS, WINDOWS, MICRO, LENGTH, WIDTH = 4, 6, 4, 24, 512
MARK = "row: "
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
LIBRARIES: dict[str, tuple[str, dict[str, str]]] = {
    "tensorflow": ("Keras, TensorFlow", {"KERAS_BACKEND": "tensorflow"}),
    "jax": ("Keras, JAX", {"KERAS_BACKEND": "jax"}),
    "torch": ("Keras, torch", {"KERAS_BACKEND": "torch"}),
    "optax": ("optax MultiSteps", {}),
    "microbatch": ("optax microbatch", {}),
}


def keras_turns() -> tuple[Callable[[], None], Callable[[], None]]:
    """One epoch of `fit`, by Keras's own accumulation and with wholebatch."""
    import keras
    import numpy as np

    from wholebatch.integrations.keras import GradientAccumulateModel

    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    random = np.random.default_rng(0)
    samples = MICRO * STEPS * WINDOWS
    x = random.normal(size=(samples, LENGTH, WIDTH)).astype("float32")
    y = random.integers(0, WIDTH, size=(samples, LENGTH))

    def model_of(cls: Any, **options: Any) -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((LENGTH, WIDTH))
        hidden = keras.layers.Dense(2 * WIDTH, activation="gelu")(inputs)
        hidden = keras.layers.Dense(WIDTH, activation="gelu")(hidden)
        return cls(inputs=inputs, outputs=keras.layers.Dense(WIDTH)(hidden), **options)

    def compiled(model: Any, **options: Any) -> Callable[[], None]:
        model.compile(
            keras.optimizers.Adam(1e-3, global_clipnorm=1.0, **options),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return lambda: model.fit(x, y, batch_size=MICRO, shuffle=False, verbose=0)

    return (
        compiled(model_of(keras.Model), gradient_accumulation_steps=STEPS),
        compiled(model_of(GradientAccumulateModel, accum_steps=STEPS)),
    )


def jax_turns(kind: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Windows of jitted micro-steps (MultiSteps), or of one jitted step (microbatch)."""
    import jax
    import jax.numpy as jnp
    import optax

    from wholebatch.integrations.jax import accumulate, multi_steps

    keys = jax.random.split(jax.random.key(0), 5)
    sizes = [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, WIDTH)]
    start = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, sizes, strict=False)]
    x = jax.random.normal(keys[3], (MICRO * STEPS, LENGTH, WIDTH))
    y = jax.random.randint(keys[4], (MICRO * STEPS, LENGTH), 0, WIDTH)

    def losses(params: Any, batch: Any) -> Any:
        hidden = jax.nn.gelu(jax.nn.gelu(batch[0] @ params[0]) @ params[1]) @ params[2]
        return optax.softmax_cross_entropy_with_integer_labels(hidden, batch[1])

    def mean(params: Any, batch: Any) -> Any:
        return losses(params, batch).mean()

    def total(params: Any, batch: Any) -> Any:
        found = losses(params, batch)
        return found.sum(), found.size

    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    micros = [(x[at : at + MICRO], y[at : at + MICRO]) for at in range(0, MICRO * STEPS, MICRO)]

    def turn(ours: bool) -> Callable[[], None]:
        tx: Any = inner
        if kind == "optax":
            tx = multi_steps(inner, STEPS) if ours else optax.MultiSteps(inner, STEPS)
        extra = {"units": MICRO * LENGTH} if ours and kind == "optax" else {}
        whole: Any = accumulate(total, micro_batch=MICRO)
        if not ours:
            whole = optax.microbatching.microbatch(
                jax.value_and_grad(mean), 1, MICRO, optax.microbatching.AccumulationType.MEAN
            )
        gradient_of = jax.value_and_grad(mean) if kind == "optax" else whole

        def step(params: Any, state: Any, batch: Any) -> Any:
            _, gradient = gradient_of(params, batch)
            updates, state = tx.update(gradient, state, params, **extra)
            return optax.apply_updates(params, updates), state

        jitted = jax.jit(step, donate_argnums=(0, 1))
        params = jax.tree.map(jnp.copy, start)
        held = [params, tx.init(params)]

        def run() -> None:
            for _ in range(WINDOWS):
                for batch in micros if kind == "optax" else [(x, y)]:
                    held[:] = jitted(*held, batch)
            jax.block_until_ready(held)

        return run

    return turn(False), turn(True)


def measured(name: str, turns: int) -> dict[str, Any]:
    own, ours = jax_turns(name) if name in ("optax", "microbatch") else keras_turns()
    for _ in range(2):  # compilation
        own(), ours()
    spent: dict[str, list[float]] = {"own": [], "ours": []}
    ratios = []
    for index in range(turns):
        for which, run in (("own", own), ("ours", ours))[:: 1 if index % 2 else -1]:
            before = time.process_time()
            run()
            spent[which].append((time.process_time() - before) / WINDOWS)
        ratios.append(spent["ours"][-1] / spent["own"][-1])
    return {
        "library": LIBRARIES[name][0],
        "own_ms": 1000 * statistics.median(spent["own"]),
        "ours_ms": 1000 * statistics.median(spent["ours"]),
        "ratio": statistics.median(ratios),
        "turns": turns,
    }


def in_a_process(name: str, turns: int) -> dict[str, Any]:
    environment = {**os.environ, **ONE_THREAD, **LIBRARIES[name][1], "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--in-this-process", name, "--turns", str(turns)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    row: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return row


def page(rows: list[dict[str, Any]], day: str) -> str:
    head = f"""# What wholebatch costs inside Keras and optax

Windows of {STEPS} micro-batches on one CPU thread, Adam, clipped by norm: the library's own
accumulation and wholebatch in it, in turns, medians of the process's own time. Written by
`python benchmarks/integrations_speed_keras.py` on {day}; fails above {LIMIT}.

| library | one micro-step | a window, its own | a window, with wholebatch | ratio |
|---|---:|---:|---:|---:|
"""
    return head + "".join(
        f"| {row['library']} | {row['own_ms'] / STEPS:.1f} ms | {row['own_ms']:.1f} ms "
        f"| {row['ours_ms']:.1f} ms | {row['ratio']:.3f} |\n"
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(LIBRARIES)}; default: all")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--in-this-process", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        print(MARK + json.dumps(measured(options.in_this_process, options.turns)))
        return
    unknown = sorted(set(options.libraries) - set(LIBRARIES))
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(LIBRARIES)}")
    record = FOLDER / "keras_jax.json"
    rows: dict[str, Any] = {}
    if options.libraries and record.exists():
        rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    for name in options.libraries or LIBRARIES:
        rows[name] = in_a_process(name, options.turns)
        row = rows[name]
        print(f"{row['library']:20} {row['own_ms'] / STEPS:5.1f} ms  ratio {row['ratio']:.3f}")
    day = date.today().isoformat()
    record.write_text(json.dumps({"date": day, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    shown = [rows[name] for name in LIBRARIES if name in rows]
    (FOLDER / "keras_jax.md").write_text(page(shown, day), encoding="utf-8")
    above = [row["library"] for row in shown if row["ratio"] > LIMIT]
    if above:
        raise SystemExit(f"above {LIMIT}: {', '.join(above)}")


if __name__ == "__main__":
    main()
