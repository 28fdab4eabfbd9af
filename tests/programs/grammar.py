"""The grammar: which programs are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from tests.programs import draws as st
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


@st.composite
def programs(draw: Any, device: str = "cpu", kind: str = "all") -> Program:
    """Draw a program; one of three has a planted mistake, unless all are of one kind."""
    if kind != "all":
        return draw(KINDS[kind]())  # type: ignore[no-any-return]
    share = draw(st.integers(0, 99))
    if device == "cuda":
        of_kind = _wrong() if share < 25 else _compiled() if share < 35 else _right()
        return replace(draw(of_kind), device=device)
    if share < 57:
        return draw(_right())  # type: ignore[no-any-return]
    if share < 60:
        return draw(_on_ranks())  # type: ignore[no-any-return]
    if share < 63:
        return draw(_in_host())  # type: ignore[no-any-return]
    if share < 66:  # Inductor is asked for by --kind compiled
        return draw(_traced())  # type: ignore[no-any-return]
    return draw(_wrong())  # type: ignore[no-any-return]


def _pick(draw: Any, values: Sequence[Any], plain: int = 1) -> Any:
    """Draw one of the values; the first is `plain` times as likely as another."""
    return draw(st.sampled_from([*values[:1] * (plain - 1), *values]))


@st.composite
def _right(draw: Any) -> Program:
    way = _pick(draw, ["step", "backward", "run", "over", "gradient", "more", "announce"])
    if draw(st.integers(0, 29)) == 7:
        return draw(_structured())  # type: ignore[no-any-return]
    model = _pick(draw, [name for name in MODELS if name not in STRUCTURED])
    loss = _loss(draw, way, model)
    given = _given(draw, way, loss)
    event = _event(draw, way, model, loss)
    windows = draw(_windows(whole=way in WHOLE_BATCH, loss=loss, model=model))
    at = 0
    if event != "none":
        windows = windows if len(windows) > 1 else windows * 2
        at = draw(st.integers(1, len(windows) - 1))
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
        counts = _pick(draw, [False, True], 3)
    batch = _pick(draw, ["dict", "tuple", "dataclass", "namedtuple", "object", "nested", "list"])
    if is_next:
        batch = "dict"
    if batch == "object" and is_whole:
        batch = "dict"  # refused with advice: WholeBatch cannot split an unknown class
    if event == "oom" and loss == "coupled":
        event = "none"
    optimizer = "sgd" if model == "sparse" else _optimizer(draw, model)
    precision = _precision(draw, model)
    if optimizer == "adafactor" and (precision != "float64" or model not in ("linear", "mlp")):
        optimizer = "nadam"  # it amplifies what is zero but for rounding
    if event == "swap" and optimizer == "adamw fused":  # torch's kernel takes one memory layout
        optimizer = "adamw"
    if event == "resume" and optimizer == "nadam":  # torch rounds its state when it is loaded
        optimizer = "adamw"
    if event == "group" and optimizer == "adagrad":  # torch's own fails: no state for the group
        optimizer = "sgd"
    call = "plain" if is_next else _call(draw, way, model, event)
    may_be_two = event == "none" and way != "gradient" and model not in ("tied", "sparse")
    if may_be_two and draw(st.integers(0, 9)) == 5:
        optimizer = "two"
    loop = _loop(draw, way, event, windows)
    loads = way == "over" or (loop == "over" and not is_whole)
    # A list of micro-batches is no steps= schedule: the second epoch goes on after the first.
    lengths = [1] if is_whole else [*map(len, windows)]
    again = loads and event == "none" and len({*lengths[:-1], max(lengths)}) == 1
    close = _close(draw, way, model, event)
    if event == "empty" and "zero_units" not in close:
        close = (*close, "zero_units")
    if call == "pair" or optimizer == "two":
        close = tuple(name for name in close if name != "ema")
    precise = precision != "fp16" and model not in ("random", "batchnorm")
    joint = way == "backward" and not is_next and loop == "over" and event == "none" and precise
    joint = joint and optimizer != "two" and "ema" not in close and draw(st.booleans())
    return Program(
        model=model,
        windows=windows,
        loss=loss,
        given=given,
        way=way,
        joint=joint,
        call=call,
        criterion=loss in ("ce", "smooth", "classes", "mse") and draw(st.booleans()),
        numbers=loss != "terms" and draw(st.integers(0, 3)) == 2,
        batch=batch,
        loader=_loader_of(draw, way, event, batch) if loads else "list",
        epochs=_pick(draw, [1, 2]) if again else 1,
        loop=loop,
        style=_pick(draw, STYLES),
        names="long" if is_next else _pick(draw, ["short", "long", "strange", "globals"]),
        optimizer=optimizer,
        scheduler="none" if optimizer == "two" else _scheduler(draw, event, optimizer, way, model),
        clip=_clip(draw, way, model, optimizer, event),
        close=close,
        memory="none" if way == "gradient" or optimizer in ("hooked", "two") else _memory(draw),
        counts=counts,
        precision=precision,
        # The second of the terms counts padding, so trimming changes it.
        tokens=is_whole
        and model in TOKEN_MODELS
        and loss != "terms"
        and batch != "nested"
        and draw(st.booleans()),
        event=event,
        at=at,
        seed=draw(st.integers(0, 50)),
    )


def _loader_of(draw: Any, way: str, event: str, batch: str) -> str:
    kinds = ["list", "samples", "batches"]
    if way not in WHOLE_BATCH and event not in ("resume", "left", "nan") and batch != "object":
        kinds += ["reused"]
    return "list" if event == "left" else _pick(draw, kinds, 2)  # type: ignore[no-any-return]


@st.composite
def _structured(draw: Any) -> Program:
    """Draw a loop whose micro-batches are one example each: a graph with its nodes."""
    loss = _pick(draw, ["ce", "mse"])
    windows = _labelled(draw(_windows(whole=False, loss=loss, model="graph")))
    return Program(
        model="graph",
        windows=windows,
        loss=loss,
        given=_pick(draw, ["total", "mean"]),
        way="backward",
        batch=_pick(draw, CONTAINERS),
        loop=_loop(draw, "backward", "none"),
        optimizer=_pick(draw, ["sgd", "adamw"]),
        clip=_pick(draw, ["none", "norm"]),
        seed=draw(st.integers(0, 50)),
    )


def _call(draw: Any, way: str, model: str, event: str) -> str:
    calls = ["plain", "forward", "twice"]
    calls += ["teacher"] if event not in ("resume", "thaw") else []
    calls += ["output"] if event != "group" else []
    calls += ["parts"] if model not in ("batchnorm", "counter", "remembers") else []
    calls += ["pair"] if event not in ("group", "evaluate", "raise") else []
    calls += ["vmapped"] if model in ("linear", "mlp", "lora", "tied", "complex") else []
    calls += ["in place"] if _may_be_in_place(way, model, event) else []
    return "plain" if model == "random" else _pick(draw, calls, 6)


def _may_be_in_place(way: str, model: str, event: str) -> bool:
    """True if the loss may write to the floats that it is given: no forward sees them again."""
    again = way == "more" or event in ("raise", "oom", "discard", "evaluate", "resume")
    return not again and model not in (*TOKEN_MODELS, "batchnorm")


def _loss(draw: Any, way: str, model: str) -> str:
    if way == "announce":
        return "terms"
    losses = ["ce", "smooth", "classes", "mse", "weighted"]
    if way == "more":
        return _pick(draw, losses[:3])  # type: ignore[no-any-return]
    losses += list(ROW_LOSSES) if draw(st.integers(0, 2)) == 1 else []
    if model in TOKEN_MODELS:
        losses += NEXT_TOKEN
    if way in WHOLE_BATCH:
        losses += ["terms"] + (["coupled"] if model not in ("batchnorm", *TOKEN_MODELS) else [])
    return _pick(draw, losses)  # type: ignore[no-any-return]


def _given(draw: Any, way: str, loss: str) -> str:
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
    return _pick(draw, kinds)  # type: ignore[no-any-return]


@st.composite
def _windows(draw: Any, whole: bool, loss: str, model: str, least: int = 1) -> Any:
    """Draw the micro-batches of each window; every window has a label that counts."""
    number = draw(st.integers(1, 3))
    size = draw(st.integers(1, 4))
    windows = []
    for _ in range(number):
        many = draw(st.integers(least, 4))
        micros = []
        for place in range(many):
            rows = (
                size if whole and place < many - 1 else draw(st.integers(1, size if whole else 4))
            )
            labels = _pick(draw, ["all", "some", "one", "none"], 2)
            micros.append(Micro(rows, "all" if loss == "coupled" else labels))
        if all(micro.labels == "none" for micro in micros) or loss in ("weighted", "next"):
            filled = draw(st.integers(0, many - 1))
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


def _loop(draw: Any, way: str, event: str, windows: Any = ()) -> str:
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
    return _pick(draw, kinds, 3)  # type: ignore[no-any-return]


def _event(draw: Any, way: str, model: str, loss: str) -> str:
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
    return _pick(draw, events, 8)  # type: ignore[no-any-return]


def _optimizer(draw: Any, model: str) -> str:
    kinds = ["sgd", "momentum", "decay", "adamw", "adamw fused", "adam foreach", "adagrad"]
    kinds += ["rmsprop", "groups", "nadam", "adafactor", "own", "hooked"]
    return _pick(draw, kinds, 3)  # type: ignore[no-any-return]


def _scheduler(draw: Any, event: str, optimizer: str, way: str, model: str) -> str:
    kinds = ["none", "exponential", "step", "lambda", "cosine", "restarts", "one cycle", "cyclic"]
    kinds += ["polynomial", "several", "warmup", "chained"]
    kinds += ["list"] if way != "gradient" and event != "resume" else []
    kinds += ["momentum cycle"] if optimizer in ("momentum", "adamw", "adamw fused") else []
    if event == "rate":
        return "none"
    if event == "group":  # torch's LambdaLR fails: no function for the new group
        return _pick(draw, ["none", "exponential", "step"])  # type: ignore[no-any-return]
    kinds += ["plateau"] if event == "none" and model != "random" else []  # it reads the loss
    return _pick(draw, kinds, 3)  # type: ignore[no-any-return]


def _precision(draw: Any, model: str) -> str:
    kinds = ["float64", "float32", "bf16", "fp16"]  # torch has no LSTM in fp16 on a CPU
    if model == "batchnorm":  # of two samples it keeps little but their rounding
        return _pick(draw, kinds[:2])  # type: ignore[no-any-return]
    return _pick(draw, kinds[:3] if model == "lstm" else kinds, 4)  # type: ignore[no-any-return]


def _clip(draw: Any, way: str, model: str, optimizer: str, event: str) -> str:
    if model == "sparse":
        return "none"
    # A limit for each group: a new group has none.
    grouped = optimizer == "groups" and way != "gradient" and event != "group"
    kinds = ["none", "norm", "loose", "value"] + (["groups"] if grouped else [])
    return _pick(draw, kinds, 2)  # type: ignore[no-any-return]


def _memory(draw: Any) -> str:
    return _pick(draw, ["none", "host"], 6)  # type: ignore[no-any-return]


def _close(draw: Any, way: str, model: str, event: str) -> tuple[str, ...]:
    if model == "sparse":
        return ()
    kinds = ["zero_units", "sync", "on_gradient"] + (["nonfinite"] if event != "nan" else [])
    kinds += ["ema"] if way != "gradient" else []
    return tuple(kind for kind in kinds if draw(st.integers(0, 5)) == 5)


@st.composite
def _wrong(draw: Any) -> Program:
    """Draw a plain program with a mistake in it."""
    mistake = _pick(draw, list(MISTAKES))
    plan = MISTAKES[mistake]
    given = _pick(draw, list(plan.given))
    way = _way_of(draw, plan, given)
    model = _pick(draw, models_of(plan))
    loss = _pick(draw, list(plan.losses))
    if plan.wide:
        windows = draw(_wide_windows(whole=way in WHOLE_BATCH, least=plan.windows or 1))
    else:
        windows = draw(_windows(whole=way in WHOLE_BATCH, loss=loss, model=model, least=2))
    if mistake == "divided by steps":
        windows = tuple(window[: len(windows[0])] for window in windows)
        windows = tuple(window for window in windows if len(window) == len(windows[0]))
    if way in HOSTS:
        windows = _labelled(_full(draw, windows, len(windows[0])))
    return Program(
        model=model,
        windows=windows,
        loss=loss,
        given=given,
        way=way,
        batch=_pick(
            draw, ["dict", "tuple", "dataclass", "namedtuple"] if way not in HOSTS else ["dict"]
        ),
        loop=_loop(draw, way, "none"),
        style=_pick(draw, STYLES),
        names=_pick(draw, ["short", "long"]),
        optimizer=_pick(draw, ["sgd", "momentum", "adamw"]),
        counts=plan.counts,
        mistake=mistake,
        seed=draw(st.integers(0, 50)),
    )


def _way_of(draw: Any, plan: Mistake, given: str) -> str:
    """Draw a way in that the mistake can be planted in; rarely a loop that a library owns."""
    if draw(st.integers(0, 59)) == 30 and given != "helper":
        hosts = ["lightning", "trainer"] if "run" in plan.ways and given == "mean" else []
        hosts += ["accelerate", "fabric"] if "backward" in plan.ways else []
        if hosts := [way for way in hosts if way in INSTALLED]:
            return _pick(draw, hosts)  # type: ignore[no-any-return]
    ways = [way for way in plan.ways if way not in ("announce", "more")]
    return _pick(draw, ways)  # type: ignore[no-any-return]


def models_of(plan: Mistake) -> list[str]:
    """Return the models that a mistake is planted in."""
    never = ("batchnorm", "sparse", "random", "graph")
    return list(plan.models) or [name for name in MODELS if name not in never]


@st.composite
def _wide_windows(draw: Any, whole: bool, least: int) -> Any:
    """Draw windows whose samples can be compared: all have labels, and the first are several."""
    size = draw(st.integers(4, 7))
    windows = []
    for _ in range(draw(st.integers(least, max(least, 2)))):
        further = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 2)))]
        rows = [size, *further] if not whole else [size, size, further[0]]
        windows.append(tuple(Micro(number) for number in rows))
    return tuple(windows)


def _full(draw: Any, windows: Any, many: int) -> Any:
    """Return windows of `many` micro-batches each; only the last may be shorter."""
    full = []
    for window in windows[:-1]:
        more = tuple(Micro(draw(st.integers(1, 3))) for _ in range(many - len(window)))
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


@st.composite
def _on_ranks(draw: Any) -> Program:
    """Draw a program on 2 or 3 ranks, of which some have fewer micro-batches at the end."""
    ranks = draw(st.integers(2, 3))
    way = _pick(draw, ["over", "backward", "run"])
    if draw(st.integers(0, 5)) == 3:
        return draw(_in_host_on_ranks())  # type: ignore[no-any-return]
    sharded = _pick(draw, ["ddp", "fsdp", "hsdp", "every", "gathered"], 3)
    model = _pick(
        draw,
        [name for name in MODELS if name not in ("batchnorm", "sparse", "lora", "random", "graph")],
    )
    if model == "shared":  # fully_shard takes no scalar parameter
        sharded = "ddp"
    loss = _pick(draw, ["ce", "smooth", "classes", "mse"])
    whole = way == "over"
    windows = draw(_windows(whole=whole, loss=loss, model=model))
    windows = _labelled(_full(draw, windows, ranks * draw(st.integers(1, 2))))
    if sharded != "ddp":  # what is noted, all ranks gather
        windows = (*windows[:-1], (windows[-1] * ranks)[: max(ranks, len(windows[-1]))])
    if sharded == "gathered" and not whole:  # nor is a rank's last Step after its loop
        windows = _full(draw, (*windows, ()), len(windows[0]))[:-1]
    if whole:
        size = windows[0][0].rows
        windows = tuple(tuple(Micro(size, m.labels) for m in window) for window in windows)
    program = Program(
        model=model,
        windows=windows,
        loss=loss,
        given=_pick(draw, ["total", "mean"]),
        way=way,
        batch=_pick(draw, CONTAINERS),
        names=_pick(draw, ["short", "long"]),
        optimizer=_pick(draw, ["sgd", "momentum", "adamw"]),
        scheduler=_pick(draw, ["none", "exponential"]),
        clip=_pick(draw, ["none", "norm"]),
        ranks=ranks,
        sharded=sharded,
        seed=draw(st.integers(0, 50)),
    )
    has_graph = way != "backward" and _has_a_graph(program) and sharded in ("ddp", "gathered")
    return replace(program, execute="traced") if has_graph and draw(st.booleans()) else program


@st.composite
def _in_host(draw: Any) -> Program:
    """Draw a program whose loop another library owns."""
    way = _pick(draw, [way for way in INSTALLED if way != "pipeline"])
    whole = way in ("keras", "jax")
    model = "linear" if whole else _pick(draw, RUN_ANYWHERE)
    loss = "ce" if whole else _pick(draw, ["ce", "smooth", "classes", "mse", "weighted"])
    windows = draw(_windows(whole=whole, loss=loss, model=model))
    windows = _labelled(_full(draw, windows, draw(st.integers(1, 3))))
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
        given="mean" if means else _pick(draw, ["total", "mean"]),
        way=way,
        batch=_pick(draw, ["dict"] if whole or way == "trainer" else ["dict", "tuple"]),
        names=_pick(draw, ["short", "long"]),
        optimizer="sgd" if whole or model == "sparse" else _pick(draw, ["sgd", "adamw"]),
        clip=_pick(draw, ["none", "norm"]) if clips else "none",
        precision="float32" if way == "keras" else "float64",  # Keras's rate is a float32
        seed=draw(st.integers(0, 50)),
    )


@st.composite
def _in_host_on_ranks(draw: Any) -> Program:
    """Draw a program on two ranks whose loop another library owns, or a pipeline of two stages."""
    ways = [way for way in ("pipeline", "trainer") if way in INSTALLED]
    way = _pick(draw, ways)
    steps = 2 * draw(st.integers(1, 2))
    windows = tuple(
        tuple(Micro(draw(st.integers(1, 3)), _pick(draw, ["all", "some"])) for _ in range(steps))
        for _ in range(draw(st.integers(1, 2)))
    )
    windows = tuple((Micro(window[0].rows), *window[1:]) for window in windows)
    is_pipeline = way == "pipeline"
    return Program(
        model="mlp" if is_pipeline else _pick(draw, ["linear", "mlp", "attention", "heads"]),
        windows=windows,
        loss="ce" if is_pipeline else _pick(draw, ["ce", "classes", "mse"]),
        given="mean",
        way=way,
        names="short" if is_pipeline else _pick(draw, ["short", "long"]),
        optimizer="sgd" if is_pipeline else _pick(draw, ["sgd", "adamw"]),
        clip=_pick(draw, ["none", "norm"]),
        ranks=2,
        seed=draw(st.integers(0, 50)),
    )


@st.composite
def _traced(draw: Any) -> Program:
    """Draw a program whose micro-steps are one graph, which runs as it was traced."""
    while True:
        program = draw(_right())
        # "compile" is for one model and a loss that adds up, and is refused for others.
        is_plain = program.loss != "coupled" and program.call not in ("pair", "parts")
        is_plain = is_plain and program.way in ("step", "over", "run")
        if is_plain and (_has_a_graph(program) or draw(st.integers(0, 99)) == 50):
            return replace(program, execute="traced")


def _has_a_graph(program: Program) -> bool:
    """Return whether no size and no branch of a program depends on what the data holds."""
    by_mask = program.given == "unit" or program.loss in (*ROW_LOSSES, "mse")
    by_mask |= program.loss == "classes" and program.given != "helper"
    is_eager = program.model in (*EAGER, *_EAGER_BY_CODE)
    return not (by_mask or is_eager or program.numbers or program.batch == "object")


@st.composite
def _compiled(draw: Any) -> Program:
    """Draw a program whose micro-steps Inductor compiles: most of a minute each."""
    return replace(draw(_traced()), execute="compile")


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
