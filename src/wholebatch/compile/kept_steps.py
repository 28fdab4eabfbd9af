"""Joint steps on disk: a second process with the same code loads what the first one has made.

The key is a digest of everything that the step depends on. A step that was loaded is compared with
eager code like one that was just made, and that comparison must have something to compare. An entry
that is damaged, foreign or fails is dropped with one line, and the step is made anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import logging
import os
import pickle
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.samples import flatten
from wholebatch.compile.code_digest import CodeDigest, Unknown
from wholebatch.compile.compile_workers import GLOBALS, PlainPickler
from wholebatch.compile.disk_cache import marks
from wholebatch.compile.joint_graph import KeptStep

_LOG = logging.getLogger("wholebatch.compile")
KEEP = "WHOLEBATCH_KEEP_GRAPHS"
"""The environment variable that switches this off with "0"."""
_VARIABLES = ("TORCH", "PYTORCH", "CUDA", "CUBLAS", "NVIDIA")
_PACKAGE = Path(__file__).parents[1]


def entry_of(
    kind: str, model: nn.Module, loss: Any, device: torch.device, *others: Any, batch: Any = ()
) -> Path | None:
    """Return the file for what depends on this code and these values; None if that is unknown.

    The tensors of `batch` count by their contents, all others by their kind.
    """
    if os.environ.get(KEEP) == "0":
        return None
    digest = CodeDigest()
    try:
        digest.add([kind, *_settings(device), *others, *_contents(batch)], "an option")
        digest.add(model, "the model")
        digest.add(loss, "the loss function")
        return marks() / f"{kind}-{digest.hexdigest()[:40]}"
    except Unknown as reason:
        _LOG.debug("nothing is kept for the next process: %s", reason)
    except Exception as problem:  # A class of the user's may raise anything when it is looked at.
        _LOG.debug("nothing is kept for the next process: %r", problem)
    return None


def _contents(batch: Any) -> list[Any]:
    """Return the leaves of a batch by name, and a checksum of each tensor."""
    found: list[Any] = []
    for leaf in flatten(batch)[0]:
        value = leaf.value
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous()
            numbers = ctypes.string_at(flat.data_ptr(), flat.nbytes)
            value = [tuple(value.shape), value.dtype, hashlib.sha256(numbers).hexdigest()]
        found.append([leaf.name, value])
    return found


def _settings(device: torch.device) -> list[Any]:
    """Return the versions, the device and the settings of torch by which a trace may differ."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    hooks = vars(torch.nn.modules.module)
    if any(found for name, found in hooks.items() if name.startswith("_global") and "hook" in name):
        raise Unknown("a hook for all modules")
    kernels = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    kernels += [cuda.cudnn_sdp_enabled(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic]
    with suppress(AttributeError):
        kernels += [int(one) for one in torch._C._get_sdp_priority_order()]
    by_device = [torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)]
    if device.type == "cuda":
        by_device.append(str(torch.cuda.get_device_properties(device)))
    own = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in _PACKAGE.rglob("*.py")]
    variables = [(n, v) for n, v in os.environ.items() if n.startswith(_VARIABLES)]
    return [
        [sys.version, torch.__version__, torch.version.cuda, sorted(own)],
        [(name, get()) for name, (get, _) in GLOBALS.items()],
        [kernels, by_device, sorted(one for one in variables if not one[0].endswith("_DIR"))],
    ]


def load(entry: Path) -> KeptStep | None:
    """Return the step of this entry; None if there is none, or it cannot be read."""
    try:
        content = entry.read_bytes()
    except OSError:
        return None
    try:
        if content[:32] != _checksum(entry, content[32:]):
            raise pickle.UnpicklingError("another checksum")
        kept = _Unpickler(io.BytesIO(content[32:])).load()
        assert isinstance(kept, KeptStep)
    except Exception as problem:  # Pickle may raise anything.
        drop(entry, repr(problem))
        return None
    return kept


_KNOWN = {
    "wholebatch.compile.joint_graph": {"KeptStep"},
    "wholebatch.compile.trace": {"Form"},
    "wholebatch.compile.repeated_blocks": {
        "BlockPlan",
        "Call",
        "PieceProgram",
        "_Input",
        "_Result",
    },
    "wholebatch.compile.compile_workers": {"_of_torch", "_operation"},
    "torch": {"Size", "device"},
    "torch.fx.immutable_collections": {"immutable_dict", "immutable_list"},
    "operator": {"getitem"},
    "_operator": {"getitem"},
    "builtins": {"slice"},
}
"""Everything of which an entry may be made. No other code is run, whatever a file asks for."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def save(entry: Path, kept: KeptStep) -> None:
    """Write the entry for the next process, if the disk cache can be written."""
    stream = io.BytesIO()
    with suppress(OSError, pickle.PicklingError, AttributeError, TypeError):
        PlainPickler(stream).dump(kept)
        entry.parent.mkdir(parents=True, exist_ok=True)
        written, path = tempfile.mkstemp(dir=entry.parent)
        try:
            with os.fdopen(written, "wb") as file:
                file.write(_checksum(entry, stream.getvalue()) + stream.getvalue())
            os.replace(path, entry)
        except OSError:
            os.unlink(path)
            raise


def drop(entry: Path, reason: str) -> None:
    """Remove an entry, and say why."""
    _LOG.warning("an entry of the disk cache is dropped (%s): %s", reason[:200], entry)
    with suppress(OSError):
        entry.unlink()


def _checksum(entry: Path, content: bytes) -> bytes:
    """Return a checksum by which the entry of another key is not taken for this one."""
    return hashlib.sha256(entry.name.encode() + content).digest()
