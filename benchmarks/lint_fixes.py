"""What `--fix` does to the labelled public loops: how many findings it mends, and with what left.

`python benchmarks/lint_fixes.py FOLDER` applies the safe fixes, and then the unsafe ones too, to a
copy of each labelled file (FOLDER as for lint_public.py; nothing there is changed). A mended file
must still be Python, must not have a finding of the code that was mended at that place, and none of
a code that it did not have. That a mended loop makes the update of the whole batch is shown by
tests/lint/test_fix.py, which runs the same forms on random data in float64.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lint_public import labelled

from wholebatch.lint.check_files import check_source
from wholebatch.lint.fix import fix_text
from wholebatch.lint.lint_settings import Settings
from wholebatch.lint.source_files import Source


def codes(text: str, path: str) -> Counter[str]:
    """Return how often each rule reports something in a text."""
    return Counter(f.code for f in check_source(Source(path, text), Settings()))


def mend(path: Path, *, unsafe: bool) -> tuple[int, int, Counter[str]]:
    """Return the findings that a fix mends, the fixes made, and what is new after them."""
    text = path.read_text(encoding="utf-8", errors="replace")
    found = check_source(Source(str(path), text), Settings())
    offered = [f for f in found if f.fix and (unsafe or not f.unsafe)]
    if not offered:
        return 0, 0, Counter()
    fixed, count = fix_text(text, Settings(), path=str(path), unsafe=unsafe)
    ast.parse(fixed)
    before, after = codes(text, str(path)), codes(fixed, str(path))
    gone = sum((before - after).values())
    print(f"{path}: {count} fixes, {gone} findings gone, new: {dict(after - before)}")
    return len(offered), count, after - before


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per mended file and the sums; return 1 if a fix made a new finding."""
    parser = argparse.ArgumentParser(description="Apply the fixes to labelled public loops.")
    parser.add_argument("folder", type=Path, help="checkouts of the repositories, as owner/name")
    given = parser.parse_args(argv)
    harm: Counter[str] = Counter()
    for unsafe in (False, True):
        paths = [given.folder / f.repository / f.path for f in labelled()]
        results = [mend(path, unsafe=unsafe) for path in paths if path.is_file()]
        offered, made = sum(r[0] for r in results), sum(r[1] for r in results)
        harm += sum((r[2] for r in results), Counter[str]())
        kind = "safe and unsafe" if unsafe else "safe"
        print(
            f"{kind}: {offered} findings with a fix, {made} fixes made, new findings {dict(harm)}"
        )
    return 1 if harm else 0


if __name__ == "__main__":
    sys.exit(main())
