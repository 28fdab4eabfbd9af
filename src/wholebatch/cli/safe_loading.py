"""Load files of tensors without running code from them."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from wholebatch.errors import StateError
from wholebatch.plain_files import open_file, reason

_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    EOFError,
    RuntimeError,  # RecursionError too: of lists in lists
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    AssertionError,
    NotImplementedError,  # zipfile, of a compression method that no torch.save writes
)
_ASKED_FOR = re.compile(r"GLOBAL ([\w.]+)")  # in torch's message


def load_tensors(path: Path) -> Any:
    """Load a `torch.save` archive of tensors and plain values, on the CPU.

    No code of the file is run: a file that needs a function or a class is refused, and the
    StateError names it. Every byte is checked against the checksums of the archive first.
    """
    try:
        with open_file(path) as file:
            with zipfile.ZipFile(file) as archive:
                broken = archive.testzip()  # torch.load does not look at the checksums of tensors
            if broken is not None:
                raise zipfile.BadZipFile(f"the checksum of {broken} is wrong")
            file.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a pickle protocol that torch.save does not use
                return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {reason(error)}") from error
    except pickle.UnpicklingError as error:  # not torch's words: it advises to run the code
        asked = _ASKED_FOR.search(str(error))
        what = f"would run {asked[1]}" if asked else "needs more than tensors and plain values"
        raise StateError(
            f"{path} is not a checkpoint of wholebatch, or it is unsafe: loading it {what}. It was "
            "not loaded, and none of its code was run"
        ) from None
    except _DAMAGE as error:
        raise StateError(f"{path} is damaged: {reason(error)}") from error
