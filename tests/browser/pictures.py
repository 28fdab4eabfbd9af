"""The pictures of docs/report.md, taken anew from a page.

python -m tests.browser.pictures report.html docs/images/report
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.browser.chromium import tab

# Section of the page -> the reader it is shown to.
PICTURES = {
    "runs": ("light", 1000),
    "training": ("light", 1000),
    "tuning": ("light", 1000),
    "memory": ("dark", 1000),
    "time": ("light", 1000),
    "verification": ("dark", 390),
}


def main(page: Path, folder: Path) -> None:
    with tab() as browser:
        for name, (scheme, width) in PICTURES.items():
            browser.open(page, scheme=scheme, width=width)
            browser.wait_until_drawn()
            browser.settle()
            print(browser.picture(folder / f"{name}.png", f"#{name}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
