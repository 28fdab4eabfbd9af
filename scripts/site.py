"""The order of the documentation's pages, and links that leave it: hooks of mkdocs.

A page that is not named here stands at the end of its folder's part, so that none is forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# Pages that are not here yet are left out; a page's title is its first heading.
ORDER: dict[str, tuple[str, ...]] = {
    "Start": (
        "index.md",
        "install.md",
        "choose.md",
        "gradient-accumulation.md",
        "gallery.md",
        "troubleshooting.md",
        "compatibility.md",
    ),
    "Your trainer": (
        "integrations/own-loop.md",
        "integrations/transformers.md",
        "finetune.md",
        "integrations/accelerate.md",
        "integrations/lightning.md",
        "integrations/keras.md",
        "integrations/jax.md",
    ),
    "Guides": (
        "which-mean.md",
        "several-losses.md",
        "laws.md",
        "speed.md",
        "memory.md",
        "optimizer-state.md",
        "batchnorm.md",
        "contrastive.md",
        "moe.md",
        "diffusion.md",
        "packing.md",
        "noise.md",
        "whole-gradient.md",
        "engines.md",
        "distributed.md",
    ),
    "Commands": (
        "train.md",
        "verify.md",
        "lint/README.md",
        "plan.md",
        "scaling.md",
        "tune.md",
        "recipes.md",
    ),
    "Lint rules": (),
    "Reference": (
        "reference/index.md",
        "reference/training.md",
        "reference/losses.md",
        "reference/proof.md",
        "reference/memory.md",
        "reference/tools.md",
        "reference/transformers.md",
        "reference/accelerate.md",
        "reference/lightning.md",
        "reference/keras.md",
        "reference/jax.md",
    ),
    "Measured": ("does-it-matter.md", "comparison.md"),
    "How it is built": ("architecture.md",),
}
TITLES = {
    "index.md": "Home",
    "benchmarks/speed.md": "Speed on an H200",
    "benchmarks/gradient_memory.md": "Memory by category",
    "reference/memory.md": "Memory prediction",
    "reference/tools.md": "Tuning",
    "lint/README.md": "lint",
    "train.md": "train",
    "verify.md": "verify",
    "plan.md": "plan",
    "scaling.md": "scale",
    "tune.md": "tune",
    "recipes.md": "recipes",
}
"""Names in the sidebar of pages whose first heading is not enough there."""
FOLDERS = {
    "": "Guides",
    "integrations": "Your trainer",
    "lint": "Lint rules",
    "reference": "Reference",
    "benchmarks": "Measured",
}
"""Where a page of this folder stands if `ORDER` does not name it."""

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```[^\n]*$", re.M | re.S)
# A search for a word of the field finds the page about all of it first, and not its list.
WEIGHT = {"gradient-accumulation.md": 8, "memory.md": 4}
INTERNAL = "internals"
"""The folder of notes for developers, which the site leaves out (`exclude_docs` in mkdocs.yml)."""


def navigation(docs: Path) -> list[dict[str, list[str]]]:
    """The parts of the site with the pages that there are."""
    paths = (path.relative_to(docs) for path in docs.rglob("*.md"))
    there = sorted(path.as_posix() for path in paths if path.parts[0] != INTERNAL)
    named = {page for pages in ORDER.values() for page in pages}
    parts = {title: [page for page in pages if page in there] for title, pages in ORDER.items()}
    for page in there:
        if page not in named:
            folder = page.partition("/")[0] if "/" in page else ""
            parts[FOLDERS.get(folder, "Guides")].append(page)
    return [{title: pages} for title, pages in parts.items() if pages]


def titled(pages: list[str]) -> list[str | dict[str, str]]:
    """The pages as mkdocs takes them, with a name where the page's own heading is not enough."""
    return [{TITLES[page]: page} if page in TITLES else page for page in pages]


def inside(markdown: str, page: Path, docs: Path) -> str:
    """The page's text; links to files of the repository that the site does not have become names.

    >>> docs = Path("/r/docs")
    >>> inside("see [it](../examples/train_ddp.py).", docs / "ranks.md", docs)
    'see it (`examples/train_ddp.py` in the repository).'
    """

    def kept(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        file = Path(page.parent / target).resolve()
        if file.is_relative_to(docs.resolve()) and INTERNAL not in file.parts:
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


def on_config(config: Any) -> Any:
    """Called by mkdocs: the order of the pages."""
    parts = navigation(Path(config.docs_dir))
    config.nav = [{name: titled(pages) for name, pages in part.items()} for part in parts]
    return config


def on_post_build(*, config: Any) -> None:
    """Called by mkdocs: a page that is opened as a file asks for the index in this form."""
    search = Path(config.site_dir) / "search"
    index = (search / "search_index.json").read_text(encoding="utf-8")
    (search / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for each page."""
    page.meta["search"] = {"boost": WEIGHT.get(page.file.src_uri, 1)}
    return inside(markdown, Path(page.file.abs_src_path), Path(config.docs_dir))
