"""fp8 windows beside bf16 and torchao on one GPU: time, memory, distance to float64, and loss.

    python benchmarks/gpu_fp8.py speed                    # ms and GiB per window, both models
    python benchmarks/gpu_fp8.py speed --profile --rows 4x4096/fp8 4x4096/torchao-rowwise
    python benchmarks/gpu_fp8.py products                 # their matrix products by themselves
    python benchmarks/gpu_fp8.py splits                   # what depends on the number of rows
    python benchmarks/gpu_fp8.py distance                 # gradient and update against float64
    python benchmarks/gpu_fp8.py curve --out FILE         # bytes-gpt at 126 M, bf16 and fp8
    python benchmarks/gpu_fp8.py draw FILE IMAGE          # the picture of it

The models of `speed` and `distance` are Llamas of Transformers with random weights and tokens, in
texts of 1,024 tokens, with fused AdamW on float32 weights. torchao comes from its package, or from
the folder in $DOORS: its rows are a hand-written loop over torch.compile. Rows of `speed` are
processes that get ready side by side; while one is timed the others are stopped. `distance` takes
the gradient of one micro-batch in eager code, and the update of one window over different splits.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speed.device_time import mark, milliseconds, profiled_windows, shown
from speed.plan import Expected
from speed.together import Child, run_rows
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.window import linear_layers
from wholebatch.window import precision as precisions

sys.path += [str(Path(__file__).resolve().parents[1])]
sys.path += [os.environ[name] for name in ("DOORS",) if name in os.environ]

from tests.gpu import test_fp8

VOCABULARY, LENGTH = 32_000, 1024
WARM, MEASURED = 4, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama, and its window and micro-batch in texts."""

    layers: int
    width: int
    inner: int
    heads: int
    window: int
    micro: int

    def build(self, layers: int | None = None) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
        with torch.device(DEVICE):
            return LlamaForCausalLM(config).train()


MODELS = {
    "4x4096": Llama(4, 4096, 14336, 32, window=16, micro=2),
    "22x2048": Llama(22, 2048, 5632, 32, window=32, micro=4),
    "tiny": Llama(2, 128, 256, 2, window=4, micro=2),
}
WAYS = ("bf16", "fp8", "torchao-tensorwise", "torchao-rowwise")


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    logits = model(micro["x"]).logits
    return wb.cross_entropy(logits.flatten(0, 1).float(), micro["y"].flatten())


def units(micro: dict[str, Tensor]) -> int:
    return micro["y"].numel()


def tokens(texts: int, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (texts, LENGTH), generator=generator).to(DEVICE)
    return {"x": ids, "y": ids.roll(-1, 1)}


def with_torchao(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )
    return model


# ----------------------------------------------------------------------------- speed


def windows_of_ours(llama: Llama, precision: str) -> tuple[Callable[[], Any], Callable[[], str]]:
    model = llama.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=DEVICE == "cuda")
    options: dict[str, Any] = {"micro_batch": llama.micro, "precision": precision, "units": units}
    window = wb.WholeBatch(model, optimizer, loss=loss, execute="graph", **options)
    batch = tokens(llama.window)
    executor = window._runner.executor
    return lambda: window.step(batch), lambda: executor.mode


def windows_of_torchao(llama: Llama, recipe: str) -> tuple[Callable[[], Any], Callable[[], str]]:
    model = with_torchao(llama.build(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), fused=DEVICE == "cuda")
    batch = tokens(llama.window)
    count = units(batch)

    @torch.compile
    def total(micro: dict[str, Tensor]) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return loss(model, micro).total / count

    def window() -> None:
        for start in range(0, llama.window, llama.micro):
            total({k: v[start : start + llama.micro] for k, v in batch.items()}).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return window, lambda: "torch.compile"


def timed_row(name: str, *, profiles: bool) -> str:
    """Return what one row comes to; it waits for a word before it times its windows."""
    which, way = name.split("/")
    llama, began = MODELS[which], time.perf_counter()
    if way.startswith("torchao"):
        window, mode = windows_of_torchao(llama, way.removeprefix("torchao-"))
    else:
        window, mode = windows_of_ours(llama, way)
    for _ in range(WARM):
        window()
    ready = time.perf_counter() - began
    print("READY", flush=True)
    sys.stdin.readline()
    if DEVICE == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    marks = [mark()]
    for _ in range(MEASURED):
        window()
        marks.append(mark())
    times = milliseconds(marks)
    # What a recorded graph holds is reserved, and not allocated.
    peak = torch.cuda.max_memory_reserved() / 2**30 if DEVICE == "cuda" else 0.0
    lines = [
        f"{name:28s} {statistics.median(times):7.1f} ms ({min(times):.1f} to {max(times):.1f})  "
        f"{peak:5.1f} GiB  {mode()}  ready in {ready:.0f} s"
    ]
    if profiles:
        lines.append(shown(profiled_windows(window)))
    return "\n".join(lines)


def child(name: str, *, profiles: bool) -> None:
    """Print the row of this process."""
    row = {"model": name, "mode": "speed"}
    try:
        row["found"] = timed_row(name, profiles=profiles)
    except Exception as problem:  # Another row may run.
        row["error"] = f"{name:28s} {type(problem).__name__}: {str(problem)[:300]}"
    print(f"ROW {json.dumps(row)}", flush=True)


def speed(rows: Sequence[str], budget: float, *, profiles: bool) -> None:
    """Print the rows, as they come."""
    script, paths = Path(__file__).resolve(), os.environ.get("PYTHONPATH", "")
    options = ["--profile"] if profiles else []
    run_rows(
        [(name, "speed", 0) for name in rows],
        lambda spec, gib: Child(script, spec, options, paths, gib),
        lambda _: Expected(30.0 if DEVICE == "cuda" else 5.0, 40.0),
        until=time.monotonic() + budget,
        together=3,
        warm_up=budget,
        rounds=1,
        report=lambda row: print(row.get("found", row.get("error")), flush=True),
    )


def free() -> None:
    gc.collect()
    torch.compiler.reset()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------- products


def microseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the time of one call: a CUDA graph of all, on data that is not in the cache."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(6):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(1000 * before.elapsed_time(after) / len(calls))
    return float(statistics.median(times))


def products() -> None:
    """Print the time of each product in bf16 and fp8, and if a row depends on their number."""
    print("rows x in x out        bf16      fp8  (us)   error to float64   half the rows alone")
    for name in ("22x2048", "4x4096"):
        llama = MODELS[name]
        rows = llama.micro * LENGTH
        for inner, outer in (
            (llama.width, llama.width),
            (llama.width, llama.inner),
            (llama.inner, llama.width),
        ):
            xs = [torch.randn(rows, inner, device=DEVICE).bfloat16() for _ in range(8)]
            ws = [torch.randn(outer, inner, device=DEVICE) * 0.02 for _ in range(8)]
            low = [w.bfloat16() for w in ws]
            eight = [linear_layers.Quantised(*linear_layers.quantise_weight()(w)) for w in ws]
            pairs = [linear_layers.quantise(x) for x in xs]

            def fp8(q: Any, w: Any) -> Tensor:
                made: Tensor = w.linear(*q, torch.bfloat16)
                return made

            plain = microseconds(
                [partial(torch.mm, x, w.t()) for x, w in zip(xs, low, strict=True)]
            )
            ours = microseconds([partial(fp8, q, w) for q, w in zip(pairs, eight, strict=True)])
            made, (q, scales) = fp8(pairs[0], eight[0]), pairs[0]
            wide = eight[0].rows.double() * eight[0].row_scales
            exact = (q.double() * scales) @ wide.t()
            error = float((made.double() - exact).norm() / exact.norm())
            half = fp8((q[: rows // 2], scales[: rows // 2]), eight[0])
            same = "the same bits" if torch.equal(half, made[: rows // 2]) else "other bits"
            size = f"{rows} x {inner} x {outer}"
            print(f"{size:20s} {plain:8.1f} {ours:8.1f}        {error:.2e}    {same}", flush=True)


# ----------------------------------------------------------------------------- splits


def other_bits(call: Callable[..., Tensor], *inputs: Tensor) -> str:
    """Return the shares of numbers that change when fewer rows are computed at once."""
    whole, rows = call(*inputs), len(inputs[0])
    shares = []
    for number in (rows // 2, 5 * rows // 12, rows // 3, rows // 12):
        part = call(*(one[:number] for one in inputs))
        shares.append(float((part != whole[:number]).double().mean()))
    return " ".join(f"{share:8.1e}" for share in shares)


def splits() -> None:
    """Print which products depend on the number of rows, and what that does to a gradient."""
    sums()
    print("share of bf16 outputs that differ where 1/2, 5/12, 1/3 and 1/12 of the rows are alone")
    for rows, inner, outer, bias in (
        *((1536, 256, n, bias) for n in (96, 97, 1024) for bias in (False, True)),
        *((1536, 1024, 256, False), (12288, 2048, 5632, False), (12288, 4096, 4096, False)),
        (12288, 14336, 4096, False),
    ):
        x = torch.randn(rows, inner, device=DEVICE).bfloat16()
        w = torch.randn(outer, inner, device=DEVICE) * 0.02
        low, b = w.bfloat16(), torch.randn(outer, device=DEVICE).bfloat16() if bias else None
        found = {"bf16": other_bits(partial(nn.functional.linear, weight=low, bias=b), x)}
        if outer % 16 == 0 and not bias:
            eight = linear_layers.Quantised(*linear_layers.quantise_weight()(w))
            in_bf16 = partial(eight.linear, dtype=torch.bfloat16)
            found["fp8"] = other_bits(in_bf16, *linear_layers.quantise(x))
        for name, shares in found.items():
            size = f"{rows} x {inner} x {outer}{' + bias' if bias else ''}"
            print(f"  {name} {size:28s} {shares}", flush=True)
    print("relative L2 distance of a gradient over 12 texts of 128 tokens to the undivided batch's")
    for outputs, bias in ((96, False), (97, True)):
        model = test_fp8.Net(outputs, bias=bias).to(DEVICE)
        draw = torch.Generator().manual_seed(2)
        batch = {n: torch.randint(outputs, (12, 128), generator=draw).to(DEVICE) for n in "xy"}
        for precision in ("bf16", "fp8"):
            by_size = [
                window_gradient(model, batch, size, precision, test_fp8.loss)
                for size in (12, 6, 5, 4, 1)
            ]
            far = " ".join(f"{apart(one, by_size[0]):.1e}" for one in by_size[1:])
            layer = f"output layer of {outputs}{' with a bias' if bias else ''}"
            print(f"  {precision}, {layer}, micro-batches of 6, 5, 4, 1: {far}", flush=True)


def sums() -> None:
    """Print how far the gradient of a weight, added in parts of the rows, is from float64."""
    print("distance to float64 of a weight's gradient that is added in 1, 2, 4 and 12 parts")
    for rows, inner, outer in ((1536, 256, 1024), (8192, 4096, 4096)):
        g, x = (torch.randn(rows, n, device=DEVICE).bfloat16() for n in (outer, inner))
        exact = g.double().t() @ x.double()
        for dtype in (torch.bfloat16, torch.float32):
            far = []
            for number in (1, 2, 4, 12):
                made = torch.zeros(outer, inner, device=DEVICE)
                pairs = (one.to(dtype).tensor_split(number) for one in (g, x))
                for left, right in zip(*pairs, strict=True):
                    out = {"out_dtype": torch.float32} if dtype is torch.bfloat16 else {}
                    torch.addmm(made, left.t(), right, **out, out=made)  # type: ignore[call-overload]
                far.append(f"{float((made.double() - exact).norm() / exact.norm()):.1e}")
            print(f"  {rows} x {inner} x {outer}, {dtype}: {' '.join(far)}", flush=True)


def window_gradient(
    model: nn.Module, batch: dict[str, Tensor], size: int, precision: str, loss: Any
) -> dict[str, Tensor]:
    """Return the gradient of a window in eager code."""
    options: Any = {"micro_batch": size, "precision": precision, "execute": "eager"}
    wb.WholeBatch(model, None, loss=loss, **options).gradient(batch)
    made = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return made


# ----------------------------------------------------------------------------- distance


def gradients(model: nn.Module, run: Callable[[], wb.Loss]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    made = run()
    (made.total / made.units).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the relative L2 distance over all parameters."""
    pairs = [(found[name.replace("_orig_mod.", "")], one) for name, one in wanted.items()]
    above = sum(float((a.to(b.device) - b).square().sum()) for a, b in pairs)
    return float((above / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def with_e5m2(self: linear_layers.Quantised, dy: Tensor) -> Tensor:
    """Return the input gradient as if that of the output were cast to float8_e5m2."""
    rows = linear_layers.rows_of(dy).float()
    scale = linear_layers.quantise(rows)[1] * 2.0**-7  # The largest is 57344 = 448 x 2^7.
    rounded = (rows / scale).to(torch.float8_e5m2).float() * scale
    weight = (self.columns.float() * self.column_scales).t()
    return (rounded @ weight).to(dy.dtype).reshape(*dy.shape[:-1], weight.shape[1])


def distance(which: str, layers: int) -> None:
    """Print the distance of each arithmetic's gradient to float64, and that between splits."""
    llama, micro = MODELS[which], tokens(1)
    between_splits(llama, layers)
    free()
    model = llama.build(layers)
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.double()
    truth = gradients(model, lambda: loss(model, micro))
    model.float()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(full[name])

    def autocast(run: Any) -> wb.Loss:
        with torch.autocast(DEVICE, torch.bfloat16):
            return loss(run, micro)

    def fp8() -> dict[str, Tensor]:
        chosen = precisions.choose("fp8", DEVICE, models=[model])

        def run() -> wb.Loss:
            with chosen.forward():
                return loss(model, micro)

        return gradients(model, run)

    print(f"{which}, {layers} layers, one text: relative L2 distance of the gradient to float64")
    sixteen = gradients(model, lambda: autocast(model))
    print(f"  bf16 autocast                {apart(sixteen, truth):.4e}")
    print(f"  fp8                          {apart(fp8(), truth):.4e}", flush=True)
    before = linear_layers.Quantised.input_gradient
    linear_layers.Quantised.input_gradient = with_e5m2  # type: ignore[method-assign]
    print(f"  fp8, dy in e5m2 (emulated)   {apart(fp8(), truth):.4e}", flush=True)
    linear_layers.Quantised.input_gradient = before  # type: ignore[method-assign]
    for recipe in ("rowwise", "rowwise_with_gw_hp", "tensorwise"):
        try:
            other = with_torchao(llama.build(layers), recipe)
            found = apart(gradients(other, lambda one=other: autocast(one)), truth)  # type: ignore[misc]
            print(f"  torchao {recipe:20s} {found:.4e}", flush=True)
        except Exception as problem:  # Another row may run.
            print(f"  torchao {recipe}: {type(problem).__name__}: {str(problem)[:200]}")


def between_splits(llama: Llama, layers: int) -> None:
    """Print the distance of a window's gradient over different splits to the undivided batch's."""
    print("relative L2 distance of a window's gradient to that of the undivided batch")
    batch = tokens(8)
    model = llama.build(layers)
    for precision in ("bf16", "fp8"):
        whole: dict[str, Tensor] = {}
        for size in (8, 4, 3, 1):
            made = window_gradient(model, batch, size, precision, loss)
            whole = whole or made
            print(f"  {precision}, micro-batch {size} of 8: {apart(made, whole):.3e}", flush=True)


# ----------------------------------------------------------------------------- curve


def trained(precision: str, options: argparse.Namespace) -> list[float]:
    """Return the losses of bytes-gpt in this precision; weights and batches are always the same."""
    from wholebatch.cli.recipes import bytes_gpt

    bytes_gpt.WIDTH, bytes_gpt.LAYERS, bytes_gpt.HEADS, bytes_gpt.CONTEXT = options.size
    corpus = bytes_gpt.data()
    torch.manual_seed(0)
    model = bytes_gpt.model().to(DEVICE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, weight_decay=0.1, fused=DEVICE == "cuda"
    )
    window = wb.WholeBatch(
        model,
        optimizer,
        loss=bytes_gpt.loss,
        units=bytes_gpt.units,
        micro_batch=options.batch // 2,
        precision=precision,  # type: ignore[arg-type]
        clip_norm=1.0,
        scheduler=bytes_gpt.scheduler(optimizer, options.updates),
        execute="graph" if DEVICE == "cuda" else "eager",
    )
    count = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(2)
    losses, began = [], time.perf_counter()
    for _ in range(options.updates):
        places = torch.randint(len(corpus), (options.batch,), generator=generator).tolist()
        samples = [corpus[place] for place in places]
        batch = {k: torch.stack([one[k] for one in samples]).to(DEVICE) for k in samples[0]}
        losses.append(float(window.step(batch).loss))
        if len(losses) % options.every == 0:
            mean = statistics.fmean(losses[-options.every :])
            sys.stderr.write(f"{precision} {len(losses)} {mean:.4f}\n")
    seconds = time.perf_counter() - began
    mode = window._runner.executor.mode
    print(f"{precision}: {count / 1e6:.0f} M parameters, {seconds:.0f} s, {mode}", flush=True)
    return losses


def curve(options: argparse.Namespace) -> None:
    """Train in all precisions side by side, each in a process of its own, and print the losses."""
    every, means = options.every, dict[str, list[float]]()
    if len(options.precisions) == 1:
        losses = trained(options.precisions[0], options)
        starts = range(0, options.updates - every + 1, every)
        found = [round(statistics.fmean(losses[start : start + every]), 4) for start in starts]
        print(f"MEANS {json.dumps(found)}", flush=True)
        return
    command = [sys.executable, *sys.argv, "--precisions"]
    runs = {
        precision: subprocess.Popen([*command, precision], stdout=subprocess.PIPE, text=True)
        for precision in options.precisions
    }
    for precision, run in runs.items():
        for line in run.communicate()[0].splitlines():
            if line.startswith("MEANS "):
                means[precision] = json.loads(line.removeprefix("MEANS "))
            else:
                print(line, flush=True)
    print("update   " + "".join(f"{name:>10s}" for name in means) + "   (mean since the last)")
    for number, row in enumerate(zip(*means.values(), strict=True), 1):
        print(f"{number * every:6d}   " + "".join(f"{mean:10.4f}" for mean in row))
    if options.out is not None:
        sizes = {"batch": options.batch, "size": options.size, "every": every}
        options.out.write_text(json.dumps({**sizes, "means": means}) + "\n", encoding="utf-8")


def draw(file: Path, image: Path) -> None:
    """Draw the losses that `curve --out` has written."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "wholebatch"
    from matplotlib import pyplot

    found = json.loads(file.read_text(encoding="utf-8"))
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for (name, means), width in zip(found["means"].items(), (2.6, 1.0), strict=True):
        updates = [found["every"] * number for number in range(1, len(means) + 1)]
        axes.plot(updates, means, label=f"{name} ({means[-1]:.3f} in the end)", lw=width)
    axes.set_xlabel("update")
    axes.set_ylabel("loss (nats per byte)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(image, metadata={"Date": None})


def main() -> None:
    if sys.argv[1] == "--child":  # --child speed --models ROW --micro 0
        child(sys.argv[4], profiles="--profile" in sys.argv)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    of_speed = commands.add_parser("speed")
    of_speed.add_argument(
        "--rows",
        nargs="+",
        default=[f"{name}/{way}" for name in ("4x4096", "22x2048") for way in WAYS],
    )
    of_speed.add_argument("--profile", action="store_true", help="print the longest kernels too")
    of_speed.add_argument("--budget", type=float, default=600.0, help="seconds for all rows")
    commands.add_parser("products")
    commands.add_parser("splits")
    of_distance = commands.add_parser("distance")
    of_distance.add_argument("--model", default="4x4096", choices=MODELS)
    of_distance.add_argument("--layers", type=int, default=2)
    of_curve = commands.add_parser("curve")
    of_curve.add_argument("--updates", type=int, default=2000)
    of_curve.add_argument("--every", type=int, default=50)
    of_curve.add_argument("--batch", type=int, default=32)
    of_curve.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    of_curve.add_argument(
        "--size", type=int, nargs=4, default=[896, 13, 14, 256], help="width, layers, heads, length"
    )
    of_curve.add_argument("--out", type=Path, help="where to write the means, as JSON")
    of_draw = commands.add_parser("draw")
    of_draw.add_argument("file", type=Path)
    of_draw.add_argument("image", type=Path)
    options = parser.parse_args()
    if options.command == "speed":
        speed(options.rows, options.budget, profiles=options.profile)
    elif options.command == "products":
        products()
    elif options.command == "splits":
        splits()
    elif options.command == "distance":
        distance(options.model, options.layers)
    elif options.command == "curve":
        curve(options)
    else:
        draw(options.file, options.image)


if __name__ == "__main__":
    main()
