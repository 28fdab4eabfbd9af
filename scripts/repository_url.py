"""Write where the project lives into every file that names it.

    python scripts/repository_url.py https://github.com/you/wholebatch

`[project.urls]` of pyproject.toml has the address. All tracked text files that name it are changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def current_url() -> str:
    """Return the address that pyproject.toml has now."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^Repository = "([^"]+)"$', text, flags=re.M)
    assert match is not None, "pyproject.toml: [project.urls] has no Repository"
    return match[1]


def main() -> None:
    if len(sys.argv) != 2 or not re.fullmatch(r"https://[\w.-]+/[\w./-]*\w", sys.argv[1]):
        raise SystemExit(
            "usage: python scripts/repository_url.py https://github.com/you/wholebatch"
        )
    old, new = current_url(), sys.argv[1]
    command = ["git", "grep", "--name-only", "--fixed-strings", old]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        path = ROOT / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
