"""What `--fix` does to the labelled public loops, and whether the mended loops train right.

`python benchmarks/lint_fixes.py FOLDER` applies every fix that is offered, safe or not, to a copy
of each labelled file (FOLDER as for lint_public.py; nothing there is changed). A mended file must
still be Python and have no finding of a code that it did not have. Then the mended loop itself, cut
out of its own file, is run in miniature: all around it are stand-ins, the forward is a mean over
random samples in float64, K is 3, and each update is held against that of the undivided batch.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from lint_public import labelled

from wholebatch.lint.check_files import Finding, check_source, lint_files
from wholebatch.lint.fix import fix_text
from wholebatch.lint.lint_settings import Settings
from wholebatch.lint.model import LoopWindow
from wholebatch.lint.model.expressions import is_accumulation_name, number, root, text
from wholebatch.lint.model.loop_windows import read
from wholebatch.lint.model.window_boundary import iterated
from wholebatch.lint.source_files import Source

K, WINDOWS, MICRO = 3, 2, 4
TOLERANCE = 1e-12
LIMITS = (0.1, 6.0)  # Of the gradient's norm: one that clips always, and one above it.


class Trial:
    """One parameter, its batches, and the updates that a loop makes of them."""

    def __init__(self, count: int, limit: float, *, inner: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        samples = torch.randn((WINDOWS * K * MICRO, 5), dtype=torch.float64, generator=generator)
        self.count, self.limit = count, limit
        self.batches = samples.chunk(WINDOWS * count)
        self.weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.updates: list[torch.Tensor] = []
        self.seen = 0
        self.inner = inner

    def loss(self, samples: torch.Tensor) -> torch.Tensor:
        """Return a mean over samples."""
        return (samples @ self.weight).square().mean()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[object]:
        """Yield a stand-in for each micro-batch, and move on to its samples."""
        for _ in range(len(self)):
            self.seen += 1
            yield Stand("batch", self)

    def forward(self) -> Output:
        """Return the loss of the present micro-batch; in an inner loop each is a new one."""
        self.seen += self.inner
        return Output(self.loss(self.batches[self.seen - 1]))

    def parts(self, value: object, shape: list[object]) -> Sequence[object]:
        """Return the values that are unpacked from a forward, a stand-in or a real sequence."""
        part = value if isinstance(value, Output) else Stand("part", self)
        values = value if isinstance(value, (list, tuple)) else [part] * len(shape)
        plain = [v.loss if isinstance(v, Output) else v for v in values]
        nested = zip(shape, values, plain, strict=False)
        return [self.parts(v, s) if isinstance(s, list) else loss for s, v, loss in nested]

    def step(self) -> None:
        """Make an update, and keep its result."""
        self.optimizer.step()
        self.updates.append(self.weight.detach().clone())

    def clip(self) -> torch.Tensor:
        """Clip the gradient."""
        return torch.nn.utils.clip_grad_norm_([self.weight], self.limit)

    def error(self, whole: Trial) -> float:
        """Return the largest relative distance of an update from that of its undivided batch."""
        if len(self.updates) != len(whole.updates) or len(self.updates) != WINDOWS:
            return float("inf")
        pairs = zip(self.updates, whole.updates, strict=True)
        return max(float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs)


class Output:
    """The result of a forward: its loss is `[0]`, `['loss']`, `.loss` or the object itself."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def __getitem__(self, key: object) -> torch.Tensor:
        return self.loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __truediv__(self, by: float) -> torch.Tensor:
        return self.loss / by


class Stand:
    """A stand-in for anything: a call returns the tensor it is handed, a condition is false."""

    def __init__(self, name: str, trial: Trial) -> None:
        self._name, self._trial = name, trial

    def __getattr__(self, name: str) -> Any:
        if name == "iteration":
            return self._trial.seen
        return self[name]

    def __getitem__(self, key: object) -> Any:
        if is_accumulation_name(str(key)):
            return self._trial.count
        return Stand(f"{self._name}.{key}", self._trial)

    def __call__(self, *args: Any, **options: Any) -> Any:
        owner, _, name = self._name.rpartition(".")
        given = [a.loss if isinstance(a, Output) else a for a in (*args, *options.values())]
        handed = [a for a in given if isinstance(a, torch.Tensor)]
        if name == "step" and "sched" not in owner and not owner.endswith(("bar", "pbar")):
            return self._trial.step()
        if name == "zero_grad":
            return self._trial.optimizer.zero_grad()
        if name.startswith("clip_grad"):
            return self._trial.clip()
        if name == "backward" and handed:
            return handed[0].backward()
        if name == "tqdm":
            return args[0]
        return handed[0] if handed else Stand(f"{self._name}()", self._trial)

    def __next__(self) -> object:
        return self

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def _same(self, other: object = None) -> object:
        return other if isinstance(other, torch.Tensor) else self

    def _false(self, *_: object) -> bool:
        return False

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _same
    __rtruediv__ = __floordiv__ = __mod__ = __rmod__ = __pow__ = __neg__ = __matmul__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _false

    def __index__(self) -> int:
        return 1

    def __format__(self, spec: str) -> str:
        return self._name

    __len__ = __index__


def _largest(*values: Any) -> Any:
    unknown = [v for v in values if isinstance(v, Stand)]
    return unknown[0] if unknown else max(*values)


class Names(dict[str, Any]):
    """The names that a loop sees: a number of micro-batches is K, all others are stand-ins."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(__builtins__=builtins, print=lambda *_, **__: None, max=_largest)
        self.trial = trial

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        return self.trial.count if is_accumulation_name(name) else Stand(name, self.trial)


class Cut(ast.NodeTransformer):
    """Puts a stand-in for the forward and the loader into a loop, and `with x as y` as `y = x`."""

    def __init__(self, forwards: set[str], loader: str, counts: set[str]) -> None:
        self.forwards, self.loader, self.counts = forwards, loader, counts

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Let as many values be unpacked from a stand-in as are wanted."""
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Tuple) and not isinstance(node.value, ast.Tuple):
            given = [node.value, _shape(node.targets[0])]
            node.value = ast.Call(ast.Name("__parts__", ast.Load()), given, [])
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        """Unpack the items of a loop in its body, where a stand-in can be unpacked."""
        if isinstance(node.target, ast.Tuple):
            item = ast.Name("__item__", ast.Load())
            node.body.insert(0, ast.Assign([node.target], item))
            node.target = ast.Name("__item__", ast.Store())
        return self.generic_visit(node)

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        """Return nothing for what a generator yields to its caller."""
        return ast.Constant(None)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Replace forwards, the loader and the number of micro-batches."""
        spelled = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if spelled in self.forwards:
            return ast.Call(ast.Name("__forward__", ast.Load()), [], [])
        if spelled and spelled == self.loader:
            return ast.Name("__loader__", ast.Load())
        if spelled in self.counts and isinstance(getattr(node, "ctx", None), ast.Load):
            return ast.Name("__count__", ast.Load())
        return super().generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """Return nothing from a step function: its body is run as that of a loop."""
        return ast.Pass()

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        """Return the body, after the assignments of its items."""
        self.generic_visit(node)
        held = [
            ast.Assign([item.optional_vars], item.context_expr)
            for item in node.items
            if item.optional_vars is not None
        ]
        return [*held, *node.body]


def _shape(target: ast.expr) -> ast.expr:
    """Return a nested list like the tuples of a target."""
    elements = target.elts if isinstance(target, ast.Tuple) else []
    return ast.List([*map(_shape, elements)], ast.Load()) if elements else ast.Constant(0)


def run(window: LoopWindow) -> str:
    """Run a loop in miniature; return "exact", its error, or why it cannot be run."""
    bases = [(root(c.base), c.base_env) for _, c in window.chains if c.base is not None]
    made = [root(d.expr) for b, env in bases for d in env.get(text(b), ())]
    calls = {ast.unparse(c) for c in (*made, *(b for b, _ in bases)) if isinstance(c, ast.Call)}
    if not calls:
        return "not run: its forward is not found"
    code = _cut_out(window, calls)
    error = 0.0
    for limit in LIMITS:
        # The same loop over micro-batches, and over undivided batches.
        trials = [Trial(count, limit, inner=window.shape == "nested") for count in (K, 1)]
        for trial in trials:
            try:
                exec(code, names := _names(window, trial), names)
            except Exception as problem:  # A loop that needs more of its surroundings.
                return f"not run: {type(problem).__name__}: {problem}"
        if not any(bool((update != 1).all()) for update in trials[1].updates):
            return "not run: no update is made of its forward"
        error = max(error, trials[0].error(trials[1]))
    return "exact" if error <= TOLERANCE else f"{error:.1e} off"


def run_at(line: int, source: str, path: str = "") -> str:
    """Run the innermost loop around a line of a file."""
    loops = {w: w.loop.node for w in read(source, path).windows}
    around = [w for w, n in loops.items() if n.lineno <= line <= (n.end_lineno or 0)]
    inner = max(around, key=lambda w: loops[w].lineno, default=None)
    return "not run: no loop there" if inner is None else run(inner)


def _names(window: LoopWindow, trial: Trial) -> Names:
    """Return what a loop sees: literals that were set before it, and stand-ins."""
    names = Names(trial)
    for name, defs in window.loop.entry.items():
        if len(defs) == 1 and name.isidentifier() and (value := number(defs[0].expr)) is not None:
            names[name] = int(value) if value.is_integer() else value
    names |= {text(p.target): 1 for p in window.loop.parents if isinstance(p.target, ast.Name)}
    names |= {"__forward__": trial.forward, "__loader__": trial, "__parts__": trial.parts}
    names["__count__"] = trial.count
    return names


def _cut_out(window: LoopWindow, forwards: set[str]) -> CodeType:
    """Return a loop, or the body of a step function in one, with stand-ins for the rest."""
    over = iterated(window.loop) if window.shape != "nested" else None
    counts = {window.every_name, window.count_name} - {"K"}
    cut = Cut(forwards, "" if over is None else ast.unparse(over), counts)
    loop, outer, head = window.loop.node, window.loop.parents, "range(1)"
    body = loop.body if window.loop.virtual else [loop]
    if window.loop.virtual:
        head = "__loader__"
    elif window.shape == "nested":
        body = outer[-1].node.body if outer else [loop, *(e.stmt for e in window.after)]
        head = f"range({WINDOWS})"
    around = ast.parse(f"for __round__ in {head}:\n    pass")
    visited = [cut.visit(statement) for statement in body]
    inside = itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in visited)
    around.body[0].body = [*inside]  # type: ignore[attr-defined]
    return compile(ast.fix_missing_locations(around), "<loop>", "exec")


def mend(path: Path, offered: list[Finding]) -> tuple[Counter[str], Counter[str]]:
    """Print what fixes make of a file; return the verdicts on its loops, and new findings."""
    source = path.read_text(encoding="utf-8", errors="replace")
    before = Counter(f.code for f in check_source(Source(str(path), source), Settings()))
    fixed, count = fix_text(source, Settings(), path=str(path), unsafe=True)
    after = Counter(f.code for f in check_source(Source(str(path), fixed), Settings()))
    verdicts: Counter[str] = Counter()
    for finding in offered:
        was, verdict = (run_at(finding.line, code, str(path)) for code in (source, fixed))
        verdicts[verdict.partition(":")[0]] += 1
        kind = "unsafe" if finding.unsafe else "safe"
        print(f"{path}:{finding.line} {finding.code} {kind}: {verdict} (before: {was})")
    if count != len(offered) or after - before:
        print(f"{path}: {count} of {len(offered)} fixes made, new: {dict(after - before)}")
    return verdicts, after - before


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per fixable finding and the sums; return 1 if a fix did harm."""
    parser = argparse.ArgumentParser(description="Apply the fixes to labelled public loops.")
    parser.add_argument("folder", type=Path, help="checkouts of the repositories, as owner/name")
    given = parser.parse_args(argv)
    paths = [given.folder / f.repository / f.path for f in labelled()]
    offered: dict[str, list[Finding]] = {}
    for finding in lint_files([str(p) for p in paths if p.is_file()], Settings()):
        if finding.fix:
            offered.setdefault(finding.path, []).append(finding)
    verdicts: Counter[str] = Counter()
    harm: Counter[str] = Counter()
    for path, findings in offered.items():
        found, new = mend(Path(path), findings)
        verdicts, harm = verdicts + found, harm + new
    safe = sum(not f.unsafe for findings in offered.values() for f in findings)
    total = sum(map(len, offered.values()))
    print(f"{total} findings with a fix, {safe} of them safe: {dict(verdicts)}; new: {dict(harm)}")
    return 1 if harm or any("off" in verdict for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
