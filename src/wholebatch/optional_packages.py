"""Import optional packages, or raise an error that says what to install."""

from __future__ import annotations

import re
from importlib import metadata

from wholebatch.errors import MissingExtraError


def require(package: str, *, at_least: str, extra: str, purpose: str) -> str:
    """Return the installed version of `package`; raise MissingExtraError if it is too old.

    >>> require("torch", at_least="2.0", extra="cli", purpose="this example")[0]
    '2'
    >>> require("torch", at_least="99.1", extra="cli", purpose="this example")
    Traceback (most recent call last):
    wholebatch.errors.MissingExtraError: this example needs torch>=99.1 ...
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"{package}>={at_least}", extra, purpose) from None
    if _numbers(version) < _numbers(at_least):
        raise MissingExtraError(
            f"{package}>={at_least} (installed is {version})", extra, purpose
        ) from None
    return version


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()
