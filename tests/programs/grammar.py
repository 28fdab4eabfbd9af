"""The grammar: which programs are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from random import Random
from typing import Any

from tests.programs.description import (
    LOOPS,
    NEXT_TOKEN,
    STRUCTURED,
    TOKEN_MODELS,
    WHOLE_BATCH,
    Micro,
    Program,
)
from tests.programs.hosts import HOSTS
from tests.programs.mistakes import MISTAKES, Mistake
from tests.programs.models import MODELS, ROW_LOSSES

PACKAGES = {"fabric": "lightning", "trainer": "transformers"}
PACKAGES["pipeline"] = "torch"
INSTALLED = [way for way in HOSTS if find_spec(PACKAGES.get(way, way)) is not None]
_EAGER_BY_CODE = ("experts", "random", "batchnorm", "physics", "counter", "remembers")
"""Models whose code branches on data, or changes the model: they run eagerly, with a warning."""
EAGER = ("sparse", "lstm")
"""Models that no graph can be made of."""
STYLES = ["module", "main", "closure", "class", "callable", "criterion", "partial"]
CONTAINERS = ["dict", "tuple", "dataclass", "namedtuple"]
RUN_ANYWHERE = [name for name in MODELS if name not in ("batchnorm", "random", "graph")]


def draw(random: Random, device: str = "cpu", kind: str = "all") -> Program:
    """Draw a program; one of three has a planted mistake, unless all are of one kind."""
    if kind != "all":
        return KINDS[kind](random)
    share = random.randint(0, 99)
    if device == "cuda":
        of_kind = _wrong if share < 25 else _compiled if share < 35 else _right
        return replace(of_kind(random), device=device)
    if share < 57:
        return _right(random)
    if share < 60:
        return _on_ranks(random)
    if share < 63:
        return _in_host(random)
    if share < 66:  # Inductor is asked for by --kind compiled
        return _traced(random)
    return _wrong(random)


def _pick(random: Random, values: Sequence[Any], plain: int = 1) -> Any:
    """Draw one of the values; the first is `plain` times as likely as another."""
    return random.choice([*values[:1] * (plain - 1), *values])


def _right(random: Random) -> Program:
    way = _pick(random, ["step", "backward", "run", "over", "gradient", "more", "announce"])
    if random.randint(0, 29) == 7:
        return _structured(random)
    model = _pick(random, [name for name in MODELS if name not in STRUCTURED])
    loss = _loss(random, way, model)
    given = _given(random, way, loss)
    event = _event(random, way, model, loss)
    windows = _windows(random, whole=way in WHOLE_BATCH, loss=loss, model=model)
    at = 0
    if event != "none":
        windows = windows if len(windows) > 1 else windows * 2
        at = random.randint(1, len(windows) - 1)
    if event == "empty":
        empty = tuple(Micro(micro.rows, "none") for micro in windows[at])
        windows = (*windows[:at], empty, *windows[at + 1 :])
    if event == "nan":  # in a row that counts: micro-batches without units are left out
        planted = (Micro(windows[at][0].rows), *windows[at][1:])
        windows = (*windows[:at], planted, *windows[at + 1 :])
    is_whole = way in WHOLE_BATCH
    is_next = loss in NEXT_TOKEN
    counts = loss == "terms" and is_whole
    if is_whole and not counts and loss != "coupled":
        counts = _pick(random, [False, True], 3)
    batch = _pick(random, ["dict", "tuple", "dataclass", "namedtuple", "object", "nested", "list"])
    if is_next:
        batch = "dict"
    if batch == "object" and is_whole:
        batch = "dict"  # refused with advice: WholeBatch cannot split an unknown class
    if event == "oom" and loss == "coupled":
        event = "none"
    optimizer = "sgd" if model == "sparse" else _optimizer(random, model)
    precision = _precision(random, model)
    if event == "swap" and optimizer == "adamw fused":  # torch's kernel takes one memory layout
        optimizer = "adamw"
    call = "plain" if is_next else _call(random, way, model, event)
    if call == "in place" and loss == "coupled":  # its second pass would see what the first wrote
        call = "plain"
    may_be_two = event == "none" and way != "gradient" and model not in ("tied", "sparse")
    if may_be_two and random.randint(0, 9) == 5:
        optimizer = "two"
    loop = _loop(random, way, event, windows)
    loads = way == "over" or (loop == "over" and not is_whole)
    # A list of micro-batches is no steps= schedule: the second epoch goes on after the first.
    lengths = [1] if is_whole else [*map(len, windows)]
    again = (
        loads and event == "none" and call != "in place" and len({*lengths[:-1], max(lengths)}) == 1
    )
    close = _close(random, way, model, event)
    if event == "empty" and "zero_units" not in close:
        close = (*close, "zero_units")
    if call == "pair" or optimizer == "two":
        close = tuple(name for name in close if name != "ema")
    precise = precision != "fp16" and model not in ("random", "batchnorm")
    joint = way == "backward" and not is_next and loop == "over" and event == "none" and precise
    joint = joint and optimizer != "two" and "ema" not in close and random.random() < 0.5
    return Program(
        model=model,
        windows=windows,
        loss=loss,
        given=given,
        way=way,
        joint=joint,
        call=call,
        criterion=loss in ("ce", "smooth", "classes", "mse") and random.random() < 0.5,
        numbers=loss != "terms" and random.randint(0, 3) == 2,
        batch=batch,
        loader=_loader_of(random, way, event, batch) if loads else "list",
        epochs=_pick(random, [1, 2]) if again else 1,
        loop=loop,
        style=_pick(random, STYLES),
        names="long" if is_next else _pick(random, ["short", "long", "strange", "globals"]),
        optimizer=optimizer,
        scheduler="none"
        if optimizer == "two"
        else _scheduler(random, event, optimizer, way, model),
        clip=_clip(random, way, model, optimizer, event),
        close=close,
        memory="none" if way == "gradient" or optimizer in ("hooked", "two") else _memory(random),
        counts=counts,
        precision=precision,
        # The second of the terms counts padding, so trimming changes it.
        tokens=is_whole
        and model in TOKEN_MODELS
        and loss != "terms"
        and batch != "nested"
        and random.random() < 0.5,
        event=event,
        at=at,
        seed=random.randint(0, 50),
    )


def _loader_of(random: Random, way: str, event: str, batch: str) -> str:
    kinds = ["list", "samples", "batches"]
    if way not in WHOLE_BATCH and event not in ("resume", "left", "nan") and batch != "object":
        kinds += ["reused"]
    return "list" if event == "left" else _pick(random, kinds, 2)  # type: ignore[no-any-return]


def _structured(random: Random) -> Program:
    """Draw a loop whose micro-batches are one example each: a graph with its nodes."""
    loss = _pick(random, ["ce", "mse"])
    windows = _labelled(_windows(random, whole=False, loss=loss, model="graph"))
    return Program(
        model="graph",
        windows=windows,
        loss=loss,
        given=_pick(random, ["total", "mean"]),
        way="backward",
        batch=_pick(random, CONTAINERS),
        loop=_loop(random, "backward", "none"),
        optimizer=_pick(random, ["sgd", "adamw"]),
        clip=_pick(random, ["none", "norm"]),
        seed=random.randint(0, 50),
    )


def _call(random: Random, way: str, model: str, event: str) -> str:
    calls = ["plain", "forward", "twice"]
    calls += ["teacher"] if event not in ("resume", "thaw") else []
    calls += ["output"] if event != "group" else []
    calls += ["parts"] if model not in ("batchnorm", "counter", "remembers") else []
    calls += ["pair"] if event not in ("group", "evaluate", "raise") else []
    calls += ["vmapped"] if model in ("linear", "mlp", "lora", "tied", "complex") else []
    calls += ["in place"] if _may_be_in_place(way, model, event) else []
    return "plain" if model == "random" else _pick(random, calls, 6)


def _may_be_in_place(way: str, model: str, event: str) -> bool:
    """True if the loss may write to the floats that it is given: no forward sees them again."""
    again = way == "more" or event in ("raise", "oom", "discard", "evaluate", "resume")
    return not again and model not in (*TOKEN_MODELS, "batchnorm")


def _loss(random: Random, way: str, model: str) -> str:
    if way == "announce":
        return "terms"
    losses = ["ce", "smooth", "classes", "mse", "weighted"]
    if way == "more":
        return _pick(random, losses[:3])
    losses += list(ROW_LOSSES) if random.randint(0, 2) == 1 else []
    if model in TOKEN_MODELS:
        losses += NEXT_TOKEN
    if way in WHOLE_BATCH:
        losses += ["terms"] + (["coupled"] if model not in ("batchnorm", *TOKEN_MODELS) else [])
    return _pick(random, losses)


def _given(random: Random, way: str, loss: str) -> str:
    if loss == "coupled":
        return "total"
    if loss in NEXT_TOKEN:
        return "helper"
    kinds = ["total", "mean"]
    if loss in ("ce", "smooth", "classes") and way != "more":
        kinds += ["helper"]
    if loss in ("ce", "smooth", "mse", *ROW_LOSSES) and way in (*WHOLE_BATCH, "run"):
        kinds += ["unit"]
    if way == "backward":
        kinds += ["Loss"]
    return _pick(random, kinds)


def _windows(random: Random, whole: bool, loss: str, model: str, least: int = 1) -> Any:
    """Draw the micro-batches of each window; every window has a label that counts."""
    number = random.randint(1, 3)
    size = random.randint(1, 4)
    windows = []
    for _ in range(number):
        many = random.randint(least, 4)
        micros = []
        for place in range(many):
            rows = size if whole and place < many - 1 else random.randint(1, size if whole else 4)
            labels = _pick(random, ["all", "some", "one", "none"], 2)
            micros.append(Micro(rows, "all" if loss == "coupled" else labels))
        if all(micro.labels == "none" for micro in micros) or loss in ("weighted", "next"):
            filled = random.randint(0, many - 1)
            micros[filled] = Micro(micros[filled].rows, "all")
        if model == "batchnorm" and sum(micro.rows for micro in micros) < 2:
            micros.append(Micro(1))
            micros[0] = Micro(size, micros[0].labels)
        if loss == "coupled" and sum(micro.rows for micro in micros) < 2:
            micros.append(Micro(1))
        windows.append(tuple(micros))
    if whole:  # all micro-batches but the last of a window have the size of the largest
        size = max(micro.rows for window in windows for micro in window)
        windows = [
            (*(Micro(size, micro.labels) for micro in window[:-1]), window[-1])
            for window in windows
        ]
    return tuple(windows)


def _loop(random: Random, way: str, event: str, windows: Any = ()) -> str:
    if way in WHOLE_BATCH:
        return "over"
    if event in ("raise", "discard") or way == "announce":
        return "last"
    # A schedule of steps= counts updates: after a skipped window, its entry holds once more.
    if event == "left":
        return "over"
    if event in ("nan", "empty") and len({*map(len, windows)}) > 1:
        return "last"
    kinds = ["over", "last", "flush"]
    kinds += ["steps"] if len({*map(len, windows)}) == 1 else []  # and nothing else ends a window
    return _pick(random, kinds, 3)


def _event(random: Random, way: str, model: str, loss: str) -> str:
    events = ["none", "rate", "freeze", "thaw", "evaluate", "load", "raise", "resume"]
    events += ["nan"] if model not in TOKEN_MODELS and model != "batchnorm" else []
    always = ("coupled", "terms", "weighted", "next unlabelled")  # has units
    if model not in ("sparse", "batchnorm") and loss not in always:
        events += ["empty"]
    events += ["group"] * 6 if model == "frozen" else []
    events += ["oom"] if way in ("step", "over") and model != "batchnorm" else []
    events += ["swap"] if model not in ("tied", "parametrized", "shared") else []
    events += ["gain"] * 6 if model == "gained" else []
    events += ["patch"] * 6 if model == "patched" else []
    events += ["left"] * 2 if way in ("backward", "run") else []
    events += ["discard"] if way in (*LOOPS, "run") and way != "announce" else []
    if way in ("announce", "gradient"):
        events = [event for event in events if event not in ("raise", "resume", "discard")]
    if model in ("tied", "lora", "tokens"):
        events = [event for event in events if event not in ("freeze", "thaw")]
    if model == "sparse":
        events = [event for event in events if event != "nan"]
    return _pick(random, events, 8)


def _optimizer(random: Random, model: str) -> str:
    kinds = ["sgd", "momentum", "decay", "adamw", "adamw fused", "adam foreach"]
    kinds += ["rmsprop", "groups", "own", "hooked"]
    return _pick(random, kinds, 3)


def _scheduler(random: Random, event: str, optimizer: str, way: str, model: str) -> str:
    kinds = ["none", "exponential", "step", "lambda", "cosine", "one cycle", "warmup"]
    kinds += ["list"] if way != "gradient" and event != "resume" else []
    kinds += ["momentum cycle"] if optimizer in ("momentum", "adamw", "adamw fused") else []
    if event == "rate":
        return "none"
    if event == "group":  # torch's LambdaLR fails: no function for the new group
        return _pick(random, ["none", "exponential", "step"])
    kinds += ["plateau"] if event == "none" and model != "random" else []  # it reads the loss
    return _pick(random, kinds, 3)


def _precision(random: Random, model: str) -> str:
    kinds = ["float64", "float32", "bf16", "fp16"]  # torch has no LSTM in fp16 on a CPU
    if model == "batchnorm":  # of two samples it keeps little but their rounding
        return _pick(random, kinds[:2])
    return _pick(random, kinds[:3] if model == "lstm" else kinds, 4)


def _clip(random: Random, way: str, model: str, optimizer: str, event: str) -> str:
    if model == "sparse":
        return "none"
    # A limit for each group: a new group has none.
    grouped = optimizer == "groups" and way != "gradient" and event != "group"
    kinds = ["none", "norm", "loose", "value"] + (["groups"] if grouped else [])
    return _pick(random, kinds, 2)


def _memory(random: Random) -> str:
    return _pick(random, ["none", "host"], 6)


def _close(random: Random, way: str, model: str, event: str) -> tuple[str, ...]:
    if model == "sparse":
        return ()
    kinds = ["zero_units", "sync", "on_gradient"] + (["nonfinite"] if event != "nan" else [])
    kinds += ["ema"] if way != "gradient" else []
    return tuple(kind for kind in kinds if random.randint(0, 5) == 5)


def _wrong(random: Random) -> Program:
    """Draw a plain program with a mistake in it."""
    mistake = _pick(random, list(MISTAKES))
    plan = MISTAKES[mistake]
    given = _pick(random, list(plan.given))
    way = _way_of(random, plan, given)
    model = _pick(random, models_of(plan))
    loss = _pick(random, list(plan.losses))
    if plan.wide:
        windows = _wide_windows(random, whole=way in WHOLE_BATCH, least=plan.windows or 1)
    else:
        windows = _windows(random, whole=way in WHOLE_BATCH, loss=loss, model=model, least=2)
    if mistake == "divided by steps":
        windows = tuple(window[: len(windows[0])] for window in windows)
        windows = tuple(window for window in windows if len(window) == len(windows[0]))
    if way in HOSTS:
        windows = _labelled(_full(random, windows, len(windows[0])))
    return Program(
        model=model,
        windows=windows,
        loss=loss,
        given=given,
        way=way,
        batch=_pick(
            random, ["dict", "tuple", "dataclass", "namedtuple"] if way not in HOSTS else ["dict"]
        ),
        loop=_loop(random, way, "none"),
        style=_pick(random, STYLES),
        names=_pick(random, ["short", "long"]),
        optimizer=_pick(random, ["sgd", "momentum", "adamw"]),
        counts=plan.counts,
        mistake=mistake,
        seed=random.randint(0, 50),
    )


def _way_of(random: Random, plan: Mistake, given: str) -> str:
    """Draw a way in that the mistake can be planted in; rarely a loop that a library owns."""
    if random.randint(0, 59) == 30 and given != "helper":
        hosts = ["lightning", "trainer"] if "run" in plan.ways and given == "mean" else []
        hosts += ["accelerate", "fabric"] if "backward" in plan.ways else []
        if hosts := [way for way in hosts if way in INSTALLED]:
            return _pick(random, hosts)
    ways = [way for way in plan.ways if way not in ("announce", "more")]
    return _pick(random, ways)


def models_of(plan: Mistake) -> list[str]:
    """Return the models that a mistake is planted in."""
    never = ("batchnorm", "sparse", "random", "graph")
    return list(plan.models) or [name for name in MODELS if name not in never]


def _wide_windows(random: Random, whole: bool, least: int) -> Any:
    """Draw windows whose samples can be compared: all have labels, and the first are several."""
    size = random.randint(4, 7)
    windows = []
    for _ in range(random.randint(least, max(least, 2))):
        further = [random.randint(1, 3) for _ in range(random.randint(1, 2))]
        rows = [size, *further] if not whole else [size, size, further[0]]
        windows.append(tuple(Micro(number) for number in rows))
    return tuple(windows)


def _full(random: Random, windows: Any, many: int) -> Any:
    """Return windows of `many` micro-batches each; only the last may be shorter."""
    full = []
    for window in windows[:-1]:
        more = tuple(Micro(random.randint(1, 3)) for _ in range(many - len(window)))
        full.append((*window, *more)[:many])
    return (*full, windows[-1][:many])


def _labelled(windows: Any) -> Any:
    """Give each window a label that counts."""
    return tuple(
        window
        if any(micro.labels != "none" for micro in window)
        else (Micro(window[0].rows), *window[1:])
        for window in windows
    )


def _on_ranks(random: Random) -> Program:
    """Draw a program on 2 or 3 ranks, of which some have fewer micro-batches at the end."""
    ranks = random.randint(2, 3)
    way = _pick(random, ["over", "backward", "run"])
    if random.randint(0, 5) == 3:
        return _in_host_on_ranks(random)
    sharded = _pick(random, ["ddp", "fsdp", "hsdp", "every", "gathered"], 3)
    model = _pick(
        random,
        [name for name in MODELS if name not in ("batchnorm", "sparse", "lora", "random", "graph")],
    )
    if model == "shared":  # fully_shard takes no scalar parameter
        sharded = "ddp"
    loss = _pick(random, ["ce", "smooth", "classes", "mse"])
    whole = way == "over"
    windows = _windows(random, whole=whole, loss=loss, model=model)
    windows = _labelled(_full(random, windows, ranks * random.randint(1, 2)))
    if sharded != "ddp":  # what is noted, all ranks gather
        windows = (*windows[:-1], (windows[-1] * ranks)[: max(ranks, len(windows[-1]))])
    if sharded == "gathered" and not whole:  # nor is a rank's last Step after its loop
        windows = _full(random, (*windows, ()), len(windows[0]))[:-1]
    if whole:
        size = windows[0][0].rows
        windows = tuple(tuple(Micro(size, m.labels) for m in window) for window in windows)
    program = Program(
        model=model,
        windows=windows,
        loss=loss,
        given=_pick(random, ["total", "mean"]),
        way=way,
        batch=_pick(random, CONTAINERS),
        names=_pick(random, ["short", "long"]),
        optimizer=_pick(random, ["sgd", "momentum", "adamw"]),
        scheduler=_pick(random, ["none", "exponential"]),
        clip=_pick(random, ["none", "norm"]),
        ranks=ranks,
        sharded=sharded,
        seed=random.randint(0, 50),
    )
    has_graph = way != "backward" and _has_a_graph(program) and sharded in ("ddp", "gathered")
    return replace(program, execute="traced") if has_graph and random.random() < 0.5 else program


def _in_host(random: Random) -> Program:
    """Draw a program whose loop another library owns."""
    way = _pick(random, [way for way in INSTALLED if way != "pipeline"])
    whole = way in ("keras", "jax")
    model = "linear" if whole else _pick(random, RUN_ANYWHERE)
    loss = "ce" if whole else _pick(random, ["ce", "smooth", "classes", "mse", "weighted"])
    windows = _windows(random, whole=whole, loss=loss, model=model)
    windows = _labelled(_full(random, windows, random.randint(1, 3)))
    if loss == "weighted":
        windows = tuple((Micro(window[0].rows), *window[1:]) for window in windows)
    if whole:
        size = windows[0][0].rows
        windows = tuple(tuple(Micro(size, m.labels) for m in window) for window in windows)
    means = way in ("lightning", "trainer")
    clips = not whole and model != "sparse"
    return Program(
        model=model,
        windows=windows,
        loss=loss,
        given="mean" if means else _pick(random, ["total", "mean"]),
        way=way,
        batch=_pick(random, ["dict"] if whole or way == "trainer" else ["dict", "tuple"]),
        names=_pick(random, ["short", "long"]),
        optimizer="sgd" if whole or model == "sparse" else _pick(random, ["sgd", "adamw"]),
        clip=_pick(random, ["none", "norm"]) if clips else "none",
        precision="float32" if way == "keras" else "float64",  # Keras's rate is a float32
        seed=random.randint(0, 50),
    )


def _in_host_on_ranks(random: Random) -> Program:
    """Draw a program on two ranks whose loop another library owns, or a pipeline of two stages."""
    ways = [way for way in ("pipeline", "trainer") if way in INSTALLED]
    way = _pick(random, ways)
    steps = 2 * random.randint(1, 2)
    windows = tuple(
        tuple(Micro(random.randint(1, 3), _pick(random, ["all", "some"])) for _ in range(steps))
        for _ in range(random.randint(1, 2))
    )
    windows = tuple((Micro(window[0].rows), *window[1:]) for window in windows)
    is_pipeline = way == "pipeline"
    return Program(
        model="mlp" if is_pipeline else _pick(random, ["linear", "mlp", "attention", "heads"]),
        windows=windows,
        loss="ce" if is_pipeline else _pick(random, ["ce", "classes", "mse"]),
        given="mean",
        way=way,
        names="short" if is_pipeline else _pick(random, ["short", "long"]),
        optimizer="sgd" if is_pipeline else _pick(random, ["sgd", "adamw"]),
        clip=_pick(random, ["none", "norm"]),
        ranks=2,
        seed=random.randint(0, 50),
    )


def _traced(random: Random) -> Program:
    """Draw a program whose micro-steps are one graph, which runs as it was traced."""
    while True:
        program = _right(random)
        # "compile" is for one model and a loss that adds up, and is refused for others.
        is_plain = program.loss != "coupled" and program.call not in ("pair", "parts")
        is_plain = is_plain and program.way in ("step", "over", "run")
        if is_plain and (_has_a_graph(program) or random.randint(0, 99) == 50):
            return replace(program, execute="traced")


def _has_a_graph(program: Program) -> bool:
    """Return whether no size and no branch of a program depends on what the data holds."""
    by_mask = program.given == "unit" or program.loss in (*ROW_LOSSES, "mse")
    by_mask |= program.loss == "classes" and program.given != "helper"
    is_eager = program.model in (*EAGER, *_EAGER_BY_CODE)
    return not (by_mask or is_eager or program.numbers or program.batch == "object")


def _compiled(random: Random) -> Program:
    """Draw a program whose micro-steps Inductor compiles: most of a minute each."""
    return replace(_traced(random), execute="compile")


KINDS = {
    "right": _right,
    "wrong": _wrong,
    "ranks": _on_ranks,
    "hosts": _in_host,
    "traced": _traced,
    "compiled": _compiled,
}


def kind_of(program: Program) -> str:
    """Return the kind of which a program is."""
    if program.mistake != "none":
        return "wrong"
    if program.way in HOSTS:
        return "hosts"
    if program.ranks > 1:
        return "ranks"
    return {"traced": "traced", "compile": "compiled"}.get(program.execute, "right")
