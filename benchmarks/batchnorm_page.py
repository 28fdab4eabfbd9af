"""The page of `gpu_batchnorm.py`: tables of what it measured."""

from __future__ import annotations

from typing import Any

__all__ = ["page"]


def page(found: dict[str, Any]) -> str:
    """The tables of what was measured."""
    ways, about = found["ways"], found["about"]
    whole, plain = ways["whole batch"], ways["plain micro-batches (wrong)"]
    again = ways["plain micro-batches, blocks again (wrong)"]
    lines = [
        "# Exact BatchNorm: time and memory",
        "",
        f"Written by `benchmarks/gpu_batchnorm.py` on {about['date']}: {about['machine']}, torch "
        f"{about['torch']}. A ResNet-50 ({about['norms']} BatchNorms, {about['blocks']} blocks), "
        f"{about['batch']} images of {about['side']} × {about['side']} in micro-batches of "
        f"{about['micro']}, bf16 autocast, channels last; {about['how']}. MiB beyond the "
        "parameters; *allocated* is the peak of PyTorch's allocator, *held* what the process has "
        "taken from the device (its cache and the recording with it).",
        "",
        *([about["note"], ""] if "note" in about else []),
        "| way | ms | × whole batch | × plain | × plain, blocks again | allocated, MiB | × whole "
        "batch | held, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in ways.items():
        if "ms" not in row:
            lines.append(f"| {name} | out of memory | | | | | | |")
            continue
        ratios = [row["ms"] / other["ms"] for other in (whole, plain, again)]
        cells = [f"{row['ms']:.1f}", *(f"{ratio:.2f}" for ratio in ratios)]
        if "allocated" in row:
            cells += [f"{row['allocated']:.0f}", f"{row['allocated'] / whole['allocated']:.2f}"]
            cells += [f"{row['driver']:.0f}" if "driver" in row else ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "*Plain* micro-batches are normalised each by itself, which is another (wrong) update: "
        "they are here for their time and memory. *Recorded* is what `WholeBatch` does from the "
        "third window of a kind on: the window as one CUDA graph. *By threads* is what it does "
        "before, and where a window cannot be recorded.",
    ]
    host = ways.get('exact, hold="host", recorded', {})
    if "out" in host and "link" in found:
        lines += _link(host, found["link"], plain)
    if found.get("peaks"):
        lines += _peaks(found["peaks"], plain)
    return "\n".join(lines) + "\n"


def _link(host: dict[str, Any], measured: dict[str, float], plain: dict[str, Any]) -> list[str]:
    seconds = host["ms"] / 1e3
    rates = {"out": host["out"] / seconds / 1e9, "in": host["back"] / seconds / 1e9}
    both = rates["out"] + rates["in"]
    in_turn = host["out"] / measured["out"] / 1e9 + host["back"] / measured["in"] / 1e9
    return [
        "",
        '## The link to the host under `hold="host"`',
        "",
        "| direction | GB per window | GB/s | GB/s of large copies alone | share |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {way} | {host[key] / 1e9:.2f} | {rates[way]:.1f} | {measured[way]:.1f} | "
            f"{rates[way] / measured[way]:.0%} |"
            for way, key in (("out", "out"), ("in", "back"))
        ),
        f"| both at once | {(host['out'] + host['back']) / 1e9:.2f} | {both:.1f} | "
        f"{measured['both']:.1f} | {both / measured['both']:.0%} |",
        "",
        "A forward mostly sends and a backward mostly fetches, and no backward begins before all "
        "forwards have ended: large copies of these bytes, first all out and then all in, would "
        f"take {1e3 * in_turn:.0f} ms, {in_turn / seconds:.0%} of the window's {host['ms']:.0f} "
        "ms. "
        f"A window takes {host['ms'] / plain['ms']:.2f} times that of plain micro-batches.",
    ]


def _peaks(rows: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    lines = [
        "",
        '## The peak of `hold="host"` as the batch grows',
        "",
        "| images | how | ms | allocated, MiB | × plain micro-batches | held, MiB |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        execute, size = name.split()
        how = "recorded" if execute == "graph" else "by threads"
        cells = [f"{row['ms']:.0f}"]
        if "allocated" in row:
            cells += [f"{row['allocated']:.0f}", f"{row['allocated'] / plain['allocated']:.2f}"]
            cells += [f"{row['driver']:.0f}"]
        lines.append(f"| {size} | {how} | {' | '.join(cells)} |")
    return lines
