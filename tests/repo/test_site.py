"""The documentation's site: every page has a place, nothing comes from elsewhere, examples run."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"scripts_{name}", ROOT / "scripts" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sidebar() -> dict[str, str]:
    """Every page in mkdocs.yml, with its name in the sidebar: that given there, or its heading."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r"^      - (?:([^:\n]+): )?(\S+\.md)$", text, re.M)
    return {
        page: title or (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        for title, page in pages
    }


def test_every_page_has_its_place() -> None:
    left_out = ("internals/", "benchmarks/")
    assert sorted(sidebar()) == sorted(page for page in PAGES if not page.startswith(left_out))
    assert next(iter(sidebar())) == "index.md"


def test_no_two_pages_have_the_same_name_in_the_sidebar() -> None:
    names = [*sidebar().values()]
    assert [name for name in names if names.count(name) > 1] == []


def test_links_out_of_the_site_become_names() -> None:
    inside = script("site").inside
    page = DOCS / "verify.md"
    assert inside("[t](train.md)", page, DOCS) == "[t](train.md)"
    assert inside("[t](https://x.org/a)", page, DOCS) == "[t](https://x.org/a)"
    assert inside("[Make](../Makefile)", page, DOCS) == "Make (`Makefile` in the repository)"
    internal = "figures (`docs/internals/a.md` in the repository)"
    assert inside("[figures](internals/a.md)", page, DOCS) == internal
    fence = "```\n[Make](../Makefile)\n```"
    assert inside(f"a\n\n{fence}\n", page, DOCS) == f"a\n\n{fence}\n"


@pytest.mark.parametrize("name", ["site", "docstrings"])
def test_examples_of_the_scripts(name: str) -> None:
    if name == "docstrings":
        pytest.importorskip("griffe")
    result = doctest.testmod(script(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_site_loads_nothing_from_elsewhere() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in text  # else material asks Google for Roboto
    assert not re.search(r"https?://", text)
    assert not re.search(r"https?://|@import|url\(", (DOCS / "site.css").read_text("utf-8"))
