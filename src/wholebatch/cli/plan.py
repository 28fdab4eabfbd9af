"""`wholebatch plan`: what fits where, before anything runs."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from wholebatch.cli.options import check, check_recipe
from wholebatch.cli.plan_show import show
from wholebatch.errors import MissingExtraError, OptionError, RecipeError

__all__ = ["plan"]

_MOST_SAMPLES = 16  # so many of the data are looked at; larger batches are made by repeating them
_PARALLEL = ("ddp", "fsdp2")
_PRECISIONS = ("full", "fp32", "bf16", "fp16")


def plan(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|hf:CONFIG.json",
            help="A recipe as for [bold]wholebatch train[/], or a Hugging Face language model "
            "from its configuration alone.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Samples that make one update, on all GPUs.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of each GPU, such as 24GiB; the GPU need not be here. Default: this machine's "
            "GPU, else its main memory.",
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="Data-parallel GPUs.")] = 1,
    parallel: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="ddp: all of the model on every GPU; fsdp2: sharded over them, block by block.",
        ),
    ] = "ddp",
    sync: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With fsdp2, when gradients are reduced: hold (once per update), every (after "
            "each micro-batch). Default: as a run would choose.",
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="full (or fp32), bf16 or fp16.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Sequence length, for hf: only.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what other settings would change.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Predict the peak memory over micro-batch sizes, and recommend one. Nothing is trained."""
    check_recipe(recipe)
    check("batch_size", batch_size, "--batch-size")
    if gpus < 1:
        raise OptionError(f"--gpus {gpus}: must be a whole number, at least 1")
    if precision is not None and precision not in _PRECISIONS:
        raise OptionError(f"--precision {precision}: must be one of {', '.join(_PRECISIONS)}")
    _check_parallel(parallel, sync, gpus)
    if seq is not None and seq < 1:
        raise OptionError(f"--seq {seq}: must be a number of tokens, at least 1")

    # Torch is imported from here on: a wrong option was told at once.
    from wholebatch.memory.plan import make_plan
    from wholebatch.memory.sharding import choose_sync

    if recipe is not None and recipe.startswith("hf:"):
        subject = _from_configuration(Path(recipe[3:]), seq, wide=parallel == "fsdp2")
    elif seq is not None:
        raise OptionError("--seq: is for hf:CONFIG.json; a recipe's data has its own length")
    else:
        subject = _from_recipe(recipe)
    device, budget, where = _budget(gpu_memory)
    size = batch_size or subject.batch_size
    if parallel == "fsdp2":
        sync = sync or choose_sync(subject.model, ranks=gpus, budget=budget)
    console = Console()
    if not as_json:
        over = "" if sync is None else f", sharded by FSDP2 (sync {sync})"
        console.print(
            f"[bold]{subject.name}[/]: {subject.parameters:,} parameters, {subject.sample};"
            f" {gpus} × {where}{over}",
            highlight=False,
            soft_wrap=True,
        )
    with _no_collections():
        made = make_plan(
            subject.model,
            subject.loss,
            subject.batch,
            batch_size=size,
            budget=budget,
            ranks=gpus,
            optimizer=subject.optimizer,
            precision=_known(precision or subject.precision),
            device=device,
            variants=not quick,
            sync=sync,  # type: ignore[arg-type]
        )
    if as_json:
        about = {"subject": subject.name, "parameters": subject.parameters, "device": device}
        print(json.dumps({**about, **asdict(made)}, indent=2))
    else:
        show(console, made)
    raise typer.Exit(0 if made.micro_batch is not None else 1)


def _check_parallel(parallel: str, sync: str | None, gpus: int) -> None:
    if parallel not in _PARALLEL:
        raise OptionError(f"--parallel {parallel}: must be one of {', '.join(_PARALLEL)}")
    if sync is not None and (parallel != "fsdp2" or sync not in ("hold", "every")):
        raise OptionError(f"--sync {sync}: must be hold or every, with --parallel fsdp2")
    if parallel == "fsdp2" and gpus < 2:
        raise OptionError(f"--parallel fsdp2 with --gpus {gpus}: give the number of GPUs, from 2")


@contextmanager
def _no_collections() -> Iterator[None]:
    """Predictions make many small objects and no cycles: looking for some takes a tenth longer."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _known(precision: str) -> str:
    return "full" if precision == "fp32" else precision


# --- what is planned --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    """A model without bytes, with what a step of it needs."""

    name: str
    sample: str
    model: Any
    optimizer: Any
    loss: Any
    batch: Any
    batch_size: int
    precision: str

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def _from_recipe(name: str | None) -> _Subject:
    import torch

    from wholebatch.memory.batches import resize_batch
    from wholebatch.recipes import EMBEDDED, Batches, load_recipe
    from wholebatch.splitting import batch_size_of

    recipe = load_recipe(name or next(iter(EMBEDDED)))
    try:
        with torch.device("meta"):
            model = recipe.build_model()
    except Exception:  # a model() that needs numbers (loads weights, checks values) gets them
        model = recipe.build_model()
    precision = recipe.defaults.get("precision", "full")
    if precision == "bf16-pure":
        model = model.to(torch.bfloat16)
        precision = "full"
    batch_size = recipe.defaults.get("batch_size", 32)
    batches = Batches(
        recipe.build_data,
        batch_size=min(batch_size, _MOST_SAMPLES),
        seed=0,
        collate=recipe.collate,
    )
    batch = batches.peek()
    batch = resize_batch(batch, min(_MOST_SAMPLES, batch_size_of(batch)))
    return _Subject(
        name=recipe.name,
        sample=f"samples like those of {recipe.path.name}",
        model=model,
        optimizer=recipe.build_optimizer(model, lr=None),
        loss=recipe.loss,
        batch=batch,
        batch_size=batch_size,
        precision=precision,
    )


def _from_configuration(path: Path, seq: int | None, *, wide: bool) -> _Subject:
    """A Hugging Face language model: its shapes are in the configuration, no weights.

    Encoders (BERT and its kin) are planned with masked language modelling, all others as causal
    language models. `wide`: with parameters in float32, whatever they are stored in.
    """
    import torch

    from wholebatch.loss import causal_lm, cross_entropy

    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"hf:{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise RecipeError(f"hf:{path}: is not JSON ({error})") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("model_type"), str):
        raise RecipeError(f"hf:{path}: has no model_type, so it is no Hugging Face configuration")
    try:
        from transformers import (  # type: ignore[import-not-found, unused-ignore]
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForMaskedLM,
        )
        from transformers.models.auto.modeling_auto import (  # type: ignore[import-not-found, unused-ignore]
            MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers", "planning hf: models") from error
    options = {name: value for name, value in stored.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(stored["model_type"], **options)
        config.use_cache = False
        is_masked = stored["model_type"] in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
            config, "is_decoder", False
        )
        kind: Any = AutoModelForMaskedLM if is_masked else AutoModelForCausalLM
        if wide:
            config.dtype = torch.float32
        with torch.device("meta"):
            model = kind.from_config(config)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise RecipeError(f"hf:{path}: no language model can be built: {reason}") from error
    most = getattr(config, "max_position_embeddings", None)
    if seq is not None and most is not None and seq > most:
        raise OptionError(f"--seq {seq}: the configuration has {most} positions; give at most that")
    length = seq or most
    if length is None:
        raise OptionError("--seq: the configuration does not say how long sequences are")
    model.train()

    def masked_lm(model: Any, micro: Any) -> Any:
        return cross_entropy(model(input_ids=micro["input_ids"]).logits, micro["input_ids"])

    return _Subject(
        name=f"{path.stem} ({stored['model_type']})",
        sample=f"sequences of {length} tokens",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        loss=masked_lm if is_masked else causal_lm,
        batch={"input_ids": torch.zeros(1, length, dtype=torch.long)},
        batch_size=64,
        precision="full" if config.dtype in (torch.bfloat16, torch.float16) else "bf16",
    )


def _budget(gpu_memory: str | None) -> tuple[str, int, str]:
    """The device to predict for, its bytes, and how it is called."""
    import torch

    from wholebatch.memory.budget import bytes_said, device_memory, parse_memory

    if gpu_memory is not None:
        total = device_memory("cuda") if torch.cuda.is_available() else None
        if total is None and (gpu_memory.strip().endswith("%") or gpu_memory.strip() == "free"):
            raise OptionError(
                f"--gpu-memory {gpu_memory}: there is no GPU here to take a share of; give a size"
            )
        budget = parse_memory(gpu_memory, device="cuda", total=total)
        return "cuda", budget, f"{bytes_said(budget)} of GPU memory"
    if torch.cuda.is_available():
        budget = device_memory("cuda")
        return "cuda", budget, f"{torch.cuda.get_device_name()} with {bytes_said(budget)}"
    budget = device_memory("cpu")
    return "cpu", budget, f"this machine's {bytes_said(budget)} (no GPU; see --gpu-memory)"
