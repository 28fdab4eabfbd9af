"""Plant one single-line fault after the other, and count how many the tests find.

    python tests/planted_faults.py             # all of them, with the tests of each one's area
    python tests/planted_faults.py clip shift  # those whose names contain a word
    python tests/planted_faults.py --all-tests # the whole suite where the area finds nothing
    python tests/planted_faults.py --programs 600  # found by `make programs` within 600 s?
    python tests/planted_faults.py --list      # where each one is, or that its line is not there

Each fault replaces a text that occurs exactly once in `src/`; a second spelling of the same fault
is for an older or a newer form of the line. The tree must be clean, and is put back after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A fault: what is replaced by what, and where the tests of that area are."""

    name: str
    spellings: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def place(self) -> tuple[Path, str, str] | None:
        """Return the file and its texts before and after; None if no spelling is there once."""
        for old, new in self.spellings:
            holders = [
                (path, text)
                for path in sorted((ROOT / "src").rglob("*.py"))
                if old in (text := path.read_text(encoding="utf-8"))
            ]
            if len(holders) == 1 and holders[0][1].count(old) == 1:
                path, text = holders[0]
                return path, text, text.replace(old, new)
        return None


PROGRAMS = "tests/programs"
WINDOW = (
    "tests/window",
    "tests/entry_points/test_accumulator.py",
    "tests/entry_points/test_whole_batch.py",
    PROGRAMS,
)
LOSS = ("tests/losses",)
RANKS = ("tests/distributed/test_on_ranks.py", "tests/distributed/test_deepspeed.py", PROGRAMS)
COMPILE = ("tests/compile",)
BATCH = ("tests/batch",)
LOOP = (
    "tests/entry_points/test_accumulator.py",
    "tests/entry_points/test_over.py",
    "tests/window",
    PROGRAMS,
)
COUPLED = ("tests/coupled", PROGRAMS)
ADAPTERS = ("tests/integrations",)

FAULTS = (
    # One update: normalise, clip, step.
    Fault(
        "clip-not-capped",
        (
            ("min(1.0, limit / (norm_of_group + 1e-6))", "limit / norm_of_group"),
            ("(limit / (part + 1e-6)).clamp(max=1.0)", "limit / part"),
        ),
        WINDOW,
    ),
    Fault(
        "clip-by-raw-norm",
        (
            ("norms = [raw * normalise for raw in raw_norms]", "norms = [*raw_norms]"),
            ("norms = norms * normalise\n", "norms = norms * 1.0\n"),
        ),
        WINDOW,
    ),
    Fault(
        "clip-value-one-side",
        (("gradient.clamp_(-here, here)", "gradient.clamp_(max=here)"),),
        WINDOW,
    ),
    Fault(
        "clip-groups-alike",
        (
            ("_multiply(group, normalise * clip)", "_multiply(group, normalise * min(clips))"),
            (
                "torch.where(is_valid, normalise * clip, 1.0)",
                "torch.where(is_valid, normalise * torch.stack(clips).min(), 1.0)",
            ),
        ),
        WINDOW,
    ),
    Fault(
        "no-seed-in-normalise",
        (
            ("return 1.0 / (units * read_scalars([self.seed])[0])", "return 1.0 / units"),
            ("normalise = 1.0 / (divisor * window.seed)", "normalise = 1.0 / divisor"),
        ),
        WINDOW,
    ),
    Fault(
        "term-weight-lost",
        (
            (
                "seed = self.seed * weight / units if units else 0.0",
                "seed = self.seed / units if units else 0.0",
            ),
            ("        seed = self.seed * weight\n", "        seed = self.seed\n"),
        ),
        (*WINDOW, *LOSS),
    ),
    Fault(
        "dummy-counts",
        (
            (
                "value = self.current.seed_of(name, weight) if counts else 0.0",
                "value = self.current.seed_of(name, weight)",
            ),
        ),
        (*RANKS, *LOOP),
    ),
    Fault(
        "one-scheduler-steps",
        (
            (
                "for scheduler in self.target.schedulers:\n            step_scheduler",
                "for scheduler in self.target.schedulers[:1]:\n            step_scheduler",
            ),
            (
                "for scheduler in self._schedulers:\n            if isinstance",
                "for scheduler in self._schedulers[:1]:\n            if isinstance",
            ),
        ),
        WINDOW,
    ),
    Fault(
        "ema-misses-first",
        (
            (
                "target.averaged is not None:\n            target.ema.update",
                "target.scale is not None:\n            target.ema.update",
            ),
        ),
        WINDOW,
    ),
    Fault(
        "skipped-not-counted",
        (
            (
                "self.skipped += decision.skipped is not None",
                "self.skipped += decision.skipped is not None and decision.units > 0",
            ),
        ),
        WINDOW,
    ),
    Fault(
        "loss-scale-in-norm",
        (
            ("normalise / window.loss_scale, self.hooks", "normalise, self.hooks"),
            ("(divisor * window.seed) / window.loss_scale", "(divisor * window.seed)"),
        ),
        (*WINDOW, "tests/window/test_precision.py"),
    ),
    Fault(
        "two-counts-accepted",
        (
            (
                "if not math.isclose(counted, returned[name], rel_tol=1e-6):",
                "if not math.isclose(counted, returned[name], rel_tol=1e-1):",
            ),
        ),
        (*WINDOW, *LOSS),
    ),
    # Losses.
    Fault(
        "ignored-labels-count",
        (("return Loss(total, counted.sum())", "return Loss(total, labels.numel())"),),
        LOSS,
    ),
    Fault(
        "ignored-weights-count",
        (
            ("(weight[places] * counted).sum()", "weight[places].sum()"),
            ("(wide(weight)[places] * counted).sum()", "wide(weight)[places].sum()"),
        ),
        LOSS,
    ),
    Fault(
        "mean-of-nothing",
        (
            (
                "total = torch.where(units == 0, mean.new_zeros(()), mean * units.to(mean.dtype))",
                "total = mean * units.to(mean.dtype)",
            ),
            (
                "total = torch.where((units == 0) & ~is_lost, mean.new_zeros(()), mean * weight)",
                "total = mean * weight",
            ),
        ),
        LOSS,
    ),
    Fault(
        "mask-not-in-labels",
        (('labels = labels.masked_fill(micro["attention_mask"] == 0, -100)', "pass"),),
        (*LOSS, *COMPILE),
    ),
    Fault(
        "labels-not-shifted",
        (
            (
                "cross_entropy(logits[:, : logits.shape[1] - shift], labels[:, shift:], dim=-1)",
                "cross_entropy(logits[:, shift:], labels[:, shift:], dim=-1)",
            ),
            (
                "cross_entropy(logits[:, :-1], labels[:, 1:], dim=-1)",
                "cross_entropy(logits[:, 1:], labels[:, 1:], dim=-1)",
            ),
        ),
        (*LOSS, *COMPILE),
    ),
    Fault(
        "no-float32-sum",
        (
            (
                "values.float() if values.dtype in (torch.float16, torch.bfloat16) else values",
                "values",
            ),
        ),
        (*LOSS, "tests/window/test_precision.py"),
    ),
    # The user's own loop.
    Fault(
        "short-window-lost",
        (
            (
                "                self._end_tail()\n            self._end_epoch()",
                "            self._end_epoch()",
            ),
        ),
        LOOP,
    ),
    Fault(
        "dummy-state-kept",
        (
            (
                "        if self._before is not None:\n            self._before.restore()",
                "        if self._before is None:\n            return",
            ),
        ),
        (*RANKS, *LOOP),
    ),
    Fault(
        "size-one-too-large",
        (
            (
                "self._closes = done >= self._window_size if last is None else last",
                "self._closes = done > self._window_size if last is None else last",
            ),
        ),
        LOOP,
    ),
    # Splitting.
    Fault(
        "last-token-trimmed",
        (
            (
                "places = torch.arange(1, real.shape[1] + 1, device=real.device)",
                "places = torch.arange(0, real.shape[1], device=real.device)",
            ),
        ),
        BATCH,
    ),
    Fault(
        "counted-labels-trimmed",
        (
            (
                "    if not by.trim and not _is_padding_beyond(ends, leaves):",
                "    if not by.trim and not ends:",
            ),
        ),
        BATCH,
    ),
    # Ranks.
    Fault(
        "ddp-added-twice",
        (
            (
                "parameter.grad.copy_(piece.view_as(parameter))",
                "parameter.grad.add_(piece.view_as(parameter))",
            ),
        ),
        RANKS,
    ),
    Fault(
        "ddp-buffers-drift",
        (
            (
                "if model.broadcast_buffers and buffers and self.ranks > 1:",
                "if model.broadcast_buffers and buffers and self.ranks > 2:",
            ),
        ),
        RANKS,
    ),
    Fault("fsdp-divisor", (("    return float(ranks)\n", "    return 1.0\n"),), RANKS),
    Fault(
        "hsdp-no-all-reduce",
        (
            (
                "module.set_requires_all_reduce(over_replicas, recurse=False)",
                "module.set_requires_all_reduce(False, recurse=False)",
            ),
        ),
        RANKS,
    ),
    Fault(
        "unused-everywhere-kept",
        (("if ranks_with_gradient == 0:", "if ranks_with_gradient < 0:"),),
        RANKS,
    ),
    Fault(
        "pipeline-padding-counts",
        (
            (
                "real = max(0, min(self._size, self._samples - place * self._size))",
                "real = self._size",
            ),
        ),
        RANKS,
    ),
    Fault(
        "deepspeed-divides",
        (
            (
                "self._engine.backward(torch.stack(scaled).sum(), scale_wrt_gas=False)",
                "self._engine.backward(torch.stack(scaled).sum())",
            ),
        ),
        RANKS,
    ),
    # Graphs.
    Fault("product-not-transposed", (("if transposed:  # (A B)ᵀ = Bᵀ Aᵀ", "if False:"),), COMPILE),
    Fault(
        "embedding-overwrites",
        (
            (
                "call(aten.index_put_.default, (buffer, [indices], rows, True))",
                "call(aten.index_put_.default, (buffer, [indices], rows, False))",
            ),
        ),
        COMPILE,
    ),
    Fault(
        "padding-row-trained",
        (("if padding >= 0:  # The padding row gets no gradient.", "if padding >= 1:"),),
        COMPILE,
    ),
    Fault(
        "casts-of-last-window",
        (("self.memory.casts.refresh()  # The device casts while the host checks.", "pass"),),
        COMPILE,
    ),
    Fault(
        "written-operations-merged",
        (("if not _is_pure(node) or base_of(node) in written:", "if not _is_pure(node):"),),
        COMPILE,
    ),
    # Coupled samples.
    Fault("replay-without-random", (("restore_random(self._starts[index])", "pass"),), COUPLED),
    Fault(
        "replay-not-checked",
        (
            (
                "    if not distance <= allowed:\n        raise WindowError(",
                "    if distance > 1e9:\n        raise WindowError(",
            ),
        ),
        COUPLED,
    ),
    # Adapters.
    Fault(
        "trainer-counts-one-rank",
        (
            ("counts = self.accelerator.gather(counts.reshape(1, 2)).sum(0)", "pass"),
            ("counted = self.accelerator.gather(counted.reshape(1)).sum()", "pass"),
        ),
        (*RANKS, *ADAPTERS),
    ),
    Fault(
        "jax-means-not-weighted",
        (
            (
                "total = loss if units is None else _scalar(loss) * _scalar(counted, like=loss)",
                "total = loss",
            ),
        ),
        ADAPTERS,
    ),
    Fault(
        "jax-rest-left-out",
        (
            (
                "sums = added if sums is None else jax.tree.map(jnp.add, sums, added)",
                "sums = added if sums is None else sums",
            ),
        ),
        ADAPTERS,
    ),
)


def run(tests: list[str], jobs: int, limit: float) -> tuple[bool, str]:
    """Run tests until the first failure; return whether one failed, and the last line."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-n", str(jobs)] if jobs > 1 else []
    if not tests:  # the machine that writes programs
        command = [sys.executable, "-m", "tests.programs", "--first", "--seed", "1"]
        command += ["--jobs", str(jobs), "--seconds", str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    try:
        ended = subprocess.run(
            [*command, *tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit if tests else limit + 300,
        )
    except subprocess.TimeoutExpired:
        # A suite that hangs has found the fault; the machine may only have been slow.
        return bool(tests), f"did not end within {limit:.0f} s"
    lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    # pytest-xdist ends with 2, as if interrupted, where it stops at the first failure.
    return ended.returncode in (1, 2) and bool(failed), (failed or lines)[-1][:160]


def main() -> int:
    """Plant the faults that were asked for, and print a line for each and the count."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", help="only faults whose names contain one of these")
    parser.add_argument("--all-tests", action="store_true")
    parser.add_argument("--programs", type=float, metavar="SECONDS", help="find by tests/programs")
    parser.add_argument("--list", action="store_true", help="plant nothing; show the places")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one fault")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not arguments.words or any(word in fault.name for word in arguments.words)
    ]
    if arguments.list:
        for fault in chosen:
            place = fault.place()
            where = "NOT THERE" if place is None else place[0].relative_to(ROOT)
            print(f"{fault.name:28} {where}")
        return 0
    results: dict[str, dict[str, object]] = {}
    for number, fault in enumerate(chosen, 1):
        place = fault.place()
        started = time.monotonic()
        if place is None:
            is_found, line = False, "the line is not in src/ any more"
        else:
            path, before, after = place
            path.write_text(after, encoding="utf-8")
            try:
                tests = [name for name in fault.tests if (ROOT / name).exists()]
                if arguments.programs:
                    tests = []
                limit = arguments.programs or arguments.limit
                is_found, line = run(tests, arguments.jobs, limit)
                if not is_found and arguments.all_tests:
                    is_found, line = run(["tests"], arguments.jobs, arguments.limit)
            finally:
                path.write_text(before, encoding="utf-8")
        verdict = "found" if is_found else "NOT FOUND"
        results[fault.name] = {"found": is_found, "by": line}
        took = time.monotonic() - started
        print(
            f"{number:2} of {len(chosen)}  {verdict:9}  {fault.name}  ({took:.0f} s)  {line}",
            flush=True,
        )
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    count = sum(bool(result["found"]) for result in results.values())
    print(f"{count} of {len(chosen)} planted faults found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
