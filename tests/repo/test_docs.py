"""What the documents say is so: examples run, tables are the benchmarks', links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import wholebatch as wb
from tests import processes

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("docs/**/*.md")])


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)


def test_the_first_example_runs(tmp_path: Path) -> None:
    done = processes.run_code(python_blocks(ROOT / "docs/index.md")[0], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("same update: ")
    assert done.stdout.split()[-2:] == ["100.0", "13"]


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.slow
def test_readme_shows_what_verify_says() -> None:
    """Of examples/usual_script.py, but for the seconds and the digits of rounding."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\$ (wholebatch .*)\n((?:[^`\n].*\n)+)", text, flags=re.M)
    assert [line.split()[1] for line, _ in shown] == ["verify"]
    for line, said in shown:
        done = processes.run(
            "wholebatch.cli",
            *line.split()[1:],
            cwd=ROOT,
            environment={**os.environ, **processes.ENVIRONMENT, "COLUMNS": "90"},
            timeout=240,
        )
        assert done.returncode == 1, done.stderr
        rest = " ".join(done.stdout.split())
        for part in said.splitlines():  # every line of the page, in this order
            words = " ".join(part.split())
            assert words in rest, (words, done.stdout)
            rest = rest[rest.index(words) + len(words) :]


def test_the_pages_stay_short() -> None:
    """Those for users: not records, notes, and the pages of the linter's rules."""
    docs = ROOT / "docs"
    others = [*docs.glob("benchmarks/*"), *docs.glob("internals/*"), *docs.glob("lint/WB*")]
    pages = {*docs.rglob("*.md")} - {*others, docs / "architecture.md"}
    assert len(pages) <= 30, sorted(page.name for page in pages)

    def words(page: Path) -> int:  # the bars of a table are none
        return len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))

    counted = {page.name: words(page) for page in {*pages, ROOT / "README.md"}}
    assert sum(counted.values()) <= 25_300, sorted(counted.items(), key=lambda item: item[1])[-5:]
    assert words(docs / "architecture.md") <= 1_600


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        document = (path.parent / file).resolve() if file else path
        assert document.exists(), f"{path.name}: {target} does not exist"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.M)
            known = {
                re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads
            }
            assert anchor in known, f"{path.name}: {target}: no such heading"


def test_module_map_is_the_tree() -> None:
    """Every path of the map exists, and every package and module at the root is in it."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*(?:/|\.py))`", text))
    package = ROOT / "src" / "wholebatch"
    for name in named:
        assert (package / name).exists() or (ROOT / name).exists(), f"{name}: does not exist"
    for path in package.iterdir():
        if path.name.startswith("__") or not (path.suffix == ".py" or path.is_dir()):
            continue
        name = path.name + ("/" if path.is_dir() else "")
        assert name in named, f"{name}: not in the map of docs/architecture.md"


def test_names_of_the_pages_exist() -> None:
    named = {
        (path.name, name)
        for path in DOCUMENTS
        for name in re.findall(r"\bwb((?:\.[A-Za-z_]+)+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    for page, name in named:
        value: object = wb
        for part in name.strip(".").split("."):
            assert hasattr(value, part), f"{page}: wb{name} does not exist"
            value = getattr(value, part)


# Those of the linter's rules are pieces from the middle of a loop.
@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.parent.name != "lint"], ids=lambda path: path.name
)
def test_code_is_python(path: Path) -> None:
    for block in python_blocks(path):
        compile(block, path.name, "exec")


# What they leave out (the model, a batch) is in the first example of the first page, as they say.
@pytest.mark.parametrize(
    "name",
    [
        *("gradient-accumulation", "choose", "memory", "speed"),
        pytest.param("tune", marks=pytest.mark.slow),
    ],
)
def test_examples_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    beginning = python_blocks(ROOT / "docs/index.md")[0].partition("verdict = ")[0]
    names: dict[str, object] = {}
    exec(beginning + "loader = [batch]\n", names)
    ran = 0
    for block in python_blocks(ROOT / f"docs/{name}.md"):
        elsewhere = 'execute="graph"|DistributedDataParallel|float8'  # GPUs, ranks, an extra
        if not re.search(elsewhere, block):
            exec(compile(block, f"docs/{name}.md", "exec"), names)
            ran += 1
    assert ran


def test_messages_of_troubleshooting_are_in_the_source() -> None:
    """What is quoted in a heading can be found by somebody who has the message."""
    source = "\n".join(
        part.value
        for path in (ROOT / "src").rglob("*.py")
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )
    heads = re.findall(
        r"^### (.*)$", (ROOT / "docs/troubleshooting.md").read_text("utf-8"), flags=re.M
    )
    quoted = [quote for head in heads for quote in re.findall(r'"([^"]+)"', head)]
    assert len(quoted) >= 25
    others = {  # torch's
        "CUDA out of memory",
        "No inf checks were recorded for this optimizer.",
        "SyncBatchNorm layers only work with GPU modules",
    }
    made_from_parts = {
        "the command line needs rich",
        "this loss is divided by 4, and 4 is the number of steps",
    }
    for quote in {*quoted} - others - made_from_parts:
        for part in re.split(r"…|\d+|'mps'", quote):
            assert part.strip() in source, quote
