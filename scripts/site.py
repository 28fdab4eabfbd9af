"""Hooks of mkdocs: the home's first screen, links that leave the documentation, the search."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```[^\n]*$", re.M | re.S)
# A search for a word of the field finds the page about all of it first, and not its list.
WEIGHT = {"gradient-accumulation.md": 8, "memory.md": 4}
FIRST_SCREEN = "<!-- The site shows the first screen of README.md here. -->"
INTERNAL = {"internals", "benchmarks"}
"""Folders that the site leaves out: notes and records (`exclude_docs` in mkdocs.yml)."""


def inside(markdown: str, page: Path, docs: Path) -> str:
    """The page's text; links to files of the repository that the site does not have become names.

    >>> docs = Path("/r/docs")
    >>> inside("see [it](../examples/train_ddp.py).", docs / "ranks.md", docs)
    'see it (`examples/train_ddp.py` in the repository).'
    """

    def kept(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        file = Path(page.parent / target).resolve()
        if file.is_relative_to(docs.resolve()) and not INTERNAL & {*file.parts}:
            return match[0]
        name = file.relative_to(docs.resolve().parent).as_posix()
        if words.strip("`") == name:
            return f"`{name}`"
        return f"{words} (`{name}` in the repository)"

    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):  # code stays as it is
        parts += [_LINK.sub(kept, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(kept, markdown[at:])])


def first_screen(readme: str) -> str:
    """Return what the README says above its first section, with links as a page of docs/ has them.

    >>> first_screen("# name\\n\\nSee [it](docs/it.md), [a script](examples/a.py).\\n\\n## More")
    'See [it](it.md), [a script](../examples/a.py).'
    """
    screen = readme.partition("\n## ")[0].partition("\n")[2].strip()
    return screen.replace("](docs/", "](").replace("](examples/", "](../examples/")


def on_post_build(*, config: Any) -> None:
    """Called by mkdocs: a page that is opened as a file asks for the index in this form."""
    search = Path(config.site_dir) / "search"
    index = (search / "search_index.json").read_text(encoding="utf-8")
    (search / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for each page."""
    page.meta["search"] = {"boost": WEIGHT.get(page.file.src_uri, 1)}
    docs = Path(config.docs_dir)
    if FIRST_SCREEN in markdown:
        readme = (docs.parent / "README.md").read_text(encoding="utf-8")
        markdown = markdown.replace(FIRST_SCREEN, first_screen(readme))
    return inside(markdown, Path(page.file.abs_src_path), docs)
