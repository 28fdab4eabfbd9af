"""A loop out of a file, with the file's own model and data where it has them.

```python
def train(model, optimizer, micro_batches): ...      # one window, in your own way

# Optional; without them the built-in models are used:
def model(): ...
def loss(model, micro): ...                          # wb.Loss(total, units): what is right
def data(): ...                                      # samples, as in a recipe
def micro_batches(): ...                             # or: a list of micro-batches, a window's worth
def optimizer(model): ...                            # default: SGD
steps = 8                                            # what the loop calls a full window
micro_batch = 4                                      # samples in each, with data()
```
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from wholebatch.cli.recipes import Batches
from wholebatch.cli.recipes.recipe import place_of
from wholebatch.core.splitting import split
from wholebatch.errors import OptionError, RecipeError, WholebatchError
from wholebatch.verification import ZOO, Case, LoopVerdict, verify_loop
from wholebatch.verification.example_models import thinned

__all__ = ["verify_file"]


def verify_file(
    loop: str,
    *,
    model: str,
    steps: int | None,
    clip_norm: float | None,
    uneven: bool,
    ddp: bool,
    seed: int,
    device: torch.device,
) -> LoopVerdict:
    """The verdict on `FILE.py:function`."""
    path, name = _parsed(loop)
    module = _loaded(path)
    function = getattr(module, name, None)
    if not callable(function):
        has = [n for n, value in vars(module).items() if callable(value) and n[:1] != "_"]
        raise RecipeError(
            f"{path} has no function {name}; it has {', '.join(has) or 'none'}. The function takes "
            "(model, optimizer, micro_batches) and trains one window"
        )
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise RecipeError(
            f"{path}: {name}() does not take (model, optimizer, micro_batches), which trains one "
            f"window: {error}"
        ) from None
    except ValueError:  # it has no signature that could be read: it is seen when it is called
        pass
    count = steps if steps is not None else int(getattr(module, "steps", 4))
    try:
        return verify_loop(
            function,
            case=_cases(module, path, model, seed),
            steps=count,
            optimizer=getattr(module, "optimizer", None),
            clip_norm=clip_norm,
            uneven=uneven,
            ddp=ddp,
            device=device,
            name=f"{path.name}:{name}",
        )
    except WholebatchError:
        raise
    except Exception as error:
        place = place_of(error, path)
        if place is None:
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        raise RecipeError(f"{place}: {type(error).__name__}: {said}") from error


def _parsed(loop: str) -> tuple[Path, str]:
    file, _, name = loop.rpartition(":")
    if not file or not name.isidentifier():
        raise OptionError(f"--loop {loop}: must be FILE.py:FUNCTION, such as train.py:one_window")
    path = Path(file)
    if not path.is_file():
        raise OptionError(f"--loop {loop}: there is no file {file}")
    return path.resolve(), name


def _loaded(path: Path) -> ModuleType:
    """The file as a module; its neighbours can be imported, as if Python had been given it."""
    name = f"wholebatch_loop_{path.stem}".replace("-", "_").replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except WholebatchError:
        raise
    except SyntaxError as error:
        raise RecipeError(f"{path}:{error.lineno}: not valid Python: {error.msg}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        raise RecipeError(f"{place_of(error, path) or path}: {said}") from error
    return module


def _cases(module: ModuleType, path: Path, model: str, seed: int) -> list[Case]:
    parts = ("model", "loss")
    there = [name for name in (*parts, "data", "micro_batches") if hasattr(module, name)]
    if not there:
        if model != "all" and model not in ZOO:
            raise OptionError(f"--model {model}: must be one of {', '.join(ZOO)} or all")
        return list(ZOO.values()) if model == "all" else [ZOO[model]]
    if model != "all":
        raise OptionError(f"--model {model}: {path.name} has a model of its own")
    missing = [f"{name}()" for name in parts if name not in there]
    if "data" not in there and "micro_batches" not in there:
        missing.append("data() or micro_batches()")
    if missing:
        has = ", ".join(f"{name}()" for name in there)
        raise RecipeError(
            f"{path} has {has} but no {' nor '.join(missing)}: "
            "give all of model(), loss(model, micro) and data(), or none for the built-in models"
        )

    def build() -> torch.nn.Module:
        torch.manual_seed(seed)
        built = module.model()
        if not isinstance(built, torch.nn.Module):
            raise RecipeError(f"{path}: model() returned {type(built).__name__}, not an nn.Module")
        return built

    return [Case(path.stem, build, module.loss, _window(module, path, seed))]


def _window(module: ModuleType, path: Path, seed: int) -> Callable[[int, bool, int], list[Any]]:
    def window(steps: int, even: bool, rank: int) -> list[Any]:
        torch.manual_seed(seed + rank)
        if hasattr(module, "micro_batches"):
            micros = list(module.micro_batches())
            if len(micros) < steps:
                raise RecipeError(
                    f"{path}: micro_batches() gave {len(micros)}, and a full window has {steps}; "
                    "give that many, or say --steps"
                )
            micros = micros[:steps]
        else:
            size = int(getattr(module, "micro_batch", 4))
            batches = Batches(
                module.data,
                batch_size=size * steps,
                seed=seed + rank,
                collate=getattr(module, "collate", None),
            )
            micros = split(batches.peek(), size)
        return micros if even else thinned(micros)

    return window
