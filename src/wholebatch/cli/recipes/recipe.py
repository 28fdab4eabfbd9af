"""A recipe, read from its file and checked before anything is built.

Its functions, those it must have and those it may have, are listed in `docs/train.md`.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from wholebatch.cli.recipe_files import EMBEDDED, find_recipe
from wholebatch.cli.recipes.recipe_batches import Batches, seed_generators
from wholebatch.cli.run_settings import Config
from wholebatch.errors import RecipeError, WholebatchError

_REQUIRED = {"model": 0, "data": 0, "loss": 2}
_OPTIONAL = {"optimizer": 1, "scheduler": 1, "units": 1, "collate": 1, "tokens": 1}
_OPTIONAL |= {"validation": 0}
_DEFAULTS = [
    "batch_size", "micro_batch", "updates", "precision", "clip_norm", "lr", "seed",
    "checkpoint_every",
]  # fmt: skip
"""The settings that a recipe may put in `defaults`; the command line overrides them."""


@dataclass(frozen=True)
class Recipe:
    """The parts of a training run, as the recipe's file defines them."""

    name: str
    path: Path
    description: str
    digest: str
    defaults: dict[str, Any]
    unit: str
    audit: bool
    loss: Callable[[Any, Any], Any]
    units: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any] | None
    _parts: Mapping[str, Callable[..., Any]] = field(repr=False)

    @property
    def is_embedded(self) -> bool:
        return self.path.parent == Path(__file__).parent

    @property
    def known_as(self) -> str:
        """Return the argument of `wholebatch train` that names this recipe."""
        return self.name if self.is_embedded else str(self.path)

    @property
    def batch_size(self) -> int:
        """The batch size that the recipe's rate was chosen for: its own, or that of the command."""
        return int(self.defaults.get("batch_size", Config.batch_size))

    def build_model(self) -> nn.Module:
        model = self._call("model")
        if not isinstance(model, nn.Module):
            raise RecipeError(f"{self.path}: model() returned {_kind(model)}, not an nn.Module")
        return model

    def build_data(self) -> Any:
        data = self._call("data")
        if data is None:
            raise RecipeError(f"{self.path}: data() returned None; return a dataset or a loader")
        return data

    @property
    def has_validation(self) -> bool:
        """True if the recipe has held-out data."""
        return "validation" in self._parts

    def build_batches(
        self,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        times: Callable[[int], int] = lambda number: 1,
        held_out: bool = False,
    ) -> Batches:
        """Return the batches of `data()`, or of `validation()`; this rank's share of each."""
        return Batches(
            (lambda: self._call("validation")) if held_out else self.build_data,
            batch_size=batch_size,
            seed=seed,
            collate=self.collate,
            rank=rank,
            ranks=ranks,
            times=times,
            name="validation" if held_out else "data",
        )

    def build_optimizer(self, model: nn.Module, *, lr: float | None) -> torch.optim.Optimizer:
        """Return the result of `optimizer(model)`, or AdamW; `lr`, if given, overrides its rate."""
        if "optimizer" not in self._parts:
            rate = lr if lr is not None else self.defaults.get("lr", 1e-3)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if not trained:
                raise RecipeError(f"{self.path}: model() has no parameter that requires a gradient")
            return torch.optim.AdamW(trained, lr=rate)
        optimizer = self._call("optimizer", model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RecipeError(
                f"{self.path}: optimizer(model) returned {_kind(optimizer)}, not a "
                "torch.optim.Optimizer"
            )
        if lr is not None:
            rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
            if len(rates) > 1:
                raise RecipeError(
                    f"--lr {lr:g}: {self.path} gives its parameter groups rates of their own "
                    f"({', '.join(f'{rate:g}' for rate in rates)}); set them in the recipe"
                )
            for group in optimizer.param_groups:
                group["lr"] = lr
        return optimizer

    def build(self, config: Config, where: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model on its device, and its optimizer: the same every time."""
        seed_generators(config.seed)
        model = self.build_model()
        model.to(where, torch.bfloat16 if config.precision == "bf16-pure" else None)
        return model, self.build_optimizer(model, lr=config.lr)

    def build_scheduler(self, optimizer: torch.optim.Optimizer, *, updates: int) -> Any:
        """Return the result of `scheduler(optimizer)` or `scheduler(optimizer, updates)`."""
        if "scheduler" not in self._parts:
            return None
        if _takes(self._parts["scheduler"], 2):
            return self._call("scheduler", optimizer, updates)
        return self._call("scheduler", optimizer)

    def build_tokens(self, budget: int) -> Any:
        """Return the split by a token budget: the recipe's `tokens(budget)`, or the default."""
        if "tokens" in self._parts:
            return self._call("tokens", budget)
        from wholebatch.batch import tokens

        return tokens(budget)

    def _call(self, part: str, *arguments: object) -> Any:
        try:
            return self._parts[part](*arguments)
        except WholebatchError:
            raise
        except Exception as error:
            place = place_of(error, self.path) or str(self.path)
            raise RecipeError(f"{place}: {part}() failed: {_one_line(error)}") from error


def load_recipe(name: str | None) -> Recipe:
    """Load a recipe from a file or by its embedded name; raise RecipeError if it is invalid.

    None is the default recipe.
    """
    path = find_recipe(next(iter(EMBEDDED)) if name is None else name)
    return recipe_of(run_file(path), path)


def recipe_of(module: ModuleType, path: Path) -> Recipe:
    """Return the recipe that a file, run as this module, defines."""
    parts = _parts_of(module, path)
    embedded = {find_recipe(name): name for name in EMBEDDED}
    return Recipe(
        name=embedded.get(path, path.stem),
        path=path,
        description=inspect.cleandoc(module.__doc__ or "").split("\n")[0],
        digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        defaults=_defaults_of(module, path),
        unit=_constant(module, path, "unit", "units", 'a word such as "tokens"'),
        audit=_constant(module, path, "audit", True, "True or False"),
        loss=parts["loss"],
        units=parts.get("units"),
        collate=parts.get("collate"),
        _parts=parts,
    )


def place_of(error: BaseException, path: Path) -> str | None:
    """Return the innermost line of the recipe in the traceback, such as `mine.py:12, in loss`."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename) == path]
    if not inside:
        return None
    last = inside[-1]
    where = "" if last.name == "<module>" else f", in {last.name}"
    return f"{path}:{last.lineno}{where}"


def run_file(path: Path) -> ModuleType:
    """Run the file as a module. It can import its neighbours, as when Python runs it."""
    module_name = f"wholebatch_recipe_{path.stem}".replace("-", "_").replace(".", "_")
    module = ModuleType(module_name)
    module.__file__ = str(path)
    # Register it: dataclasses and pickle look up the module of a class there.
    sys.modules[module_name] = module
    is_embedded = path.parent == Path(__file__).parent
    if not is_embedded and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    linecache.checkcache(str(path))
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except WholebatchError:
        raise
    except SyntaxError as error:
        if error.filename is None or Path(error.filename) != path:  # In a file that it imports.
            raise RecipeError(f"{place_of(error, path) or path}: {_one_line(error)}") from error
        raise RecipeError(f"{path}:{error.lineno}: not valid Python: {error.msg}") from error
    except Exception as error:
        raise RecipeError(f"{place_of(error, path) or path}: {_one_line(error)}") from error
    return module


def _parts_of(module: ModuleType, path: Path) -> dict[str, Callable[..., Any]]:
    missing = [name for name in _REQUIRED if not callable(getattr(module, name, None))]
    if missing:
        has = f"{missing[0]}{'(model, micro)' if missing[0] == 'loss' else '()'}"
        others = f" (nor {' nor '.join(missing[1:])})" if missing[1:] else ""
        raise RecipeError(
            f"recipe {path} has no function {has}{others}; a recipe has model(), data() and "
            "loss(model, micro)"
        )
    parts: dict[str, Callable[..., Any]] = {}
    for name, arguments in (_REQUIRED | _OPTIONAL).items():
        part = getattr(module, name, None)
        if part is None:
            continue
        if not callable(part):
            raise RecipeError(f"recipe {path}: {name} is {_kind(part)}, not a function")
        if not _takes(part, arguments) and not (name == "scheduler" and _takes(part, 2)):
            many = "1 or 2" if name == "scheduler" else str(arguments)
            raise RecipeError(
                f"recipe {path}: {name}{inspect.signature(part)} must take {many} "
                f"argument{'' if many == '1' else 's'}"
            )
        parts[name] = part
    return parts


def _defaults_of(module: ModuleType, path: Path) -> dict[str, Any]:
    defaults = _constant(module, path, "defaults", {}, "a dict")
    for name in defaults:
        if name not in _DEFAULTS:
            raise RecipeError(
                f"recipe {path}: defaults has {name!r}; it may have {', '.join(_DEFAULTS)}"
            )
    return dict(defaults)


def _constant(module: ModuleType, path: Path, name: str, default: Any, allowed: str) -> Any:
    """Return a constant of the recipe, of the type of its default."""
    value = getattr(module, name, default)
    if not isinstance(value, type(default)) or value == "":
        raise RecipeError(f"recipe {path}: {name} is {_kind(value)}, not {allowed}")
    return value


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # A built-in without a signature.
        return True
    return True


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
