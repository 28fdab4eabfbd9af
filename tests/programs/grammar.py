"""The grammar: which programs are right, as a Hypothesis strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.programs.description import LOOPS, TOKEN_MODELS, WHOLE_BATCH, Micro, Program
from tests.programs.mistakes import MISTAKES
from tests.programs.models import MODELS

VECTOR_MODELS = tuple(name for name in MODELS if name not in TOKEN_MODELS)


@st.composite
def programs(draw: Any, planted: bool | None = None) -> Program:
    """Draw a program; one of three has a planted mistake."""
    wrong = draw(st.integers(0, 2)) == 2 if planted is None else planted
    return draw(_wrong() if wrong else _right())  # type: ignore[no-any-return]


def _pick(draw: Any, values: Sequence[Any], plain: int = 1) -> Any:
    """Draw one of the values; the first is `plain` times as likely as another."""
    return draw(st.sampled_from([*values[:1] * (plain - 1), *values]))


@st.composite
def _right(draw: Any) -> Program:
    way = _pick(draw, ["step", "backward", "run", "over", "gradient", "more", "announce"])
    model = _pick(draw, list(MODELS))
    loss = _loss(draw, way, model)
    given = _given(draw, way, loss)
    event = _event(draw, way, model)
    windows = draw(_windows(whole=way in WHOLE_BATCH, loss=loss, model=model))
    at = 0
    if event != "none":
        windows = windows if len(windows) > 1 else windows * 2
        at = draw(st.integers(1, len(windows) - 1))
    counts = loss == "terms" and way in WHOLE_BATCH
    if way in WHOLE_BATCH and not counts and loss != "coupled":
        counts = _pick(draw, [False, True], 3)
    batch = _pick(draw, ["dict", "tuple", "dataclass", "namedtuple", "object"])
    if batch == "object" and way in WHOLE_BATCH:
        batch = "dict"  # refused with advice: WholeBatch cannot split an unknown class
    optimizer = "sgd" if model == "sparse" else _optimizer(draw, model)
    return Program(
        model=model,
        windows=windows,
        loss=loss,
        given=given,
        way=way,
        batch=batch,
        loop=_loop(draw, way, event),
        style=_pick(draw, ["module", "main", "closure", "class"]),
        names=_pick(draw, ["short", "long", "strange", "globals"]),
        optimizer=optimizer,
        scheduler=_scheduler(draw, event),
        clip=_clip(draw, model, optimizer),
        close=_close(draw, way, model),
        memory=_pick(draw, ["none", "host"], 6) if way not in ("gradient",) else "none",
        counts=counts,
        precision=_pick(draw, ["float64", "float32", "bf16"], 3),
        event=event,
        at=at,
        seed=draw(st.integers(0, 50)),
    )


def _loss(draw: Any, way: str, model: str) -> str:
    if way == "announce":
        return "terms"
    losses = ["ce", "smooth", "classes", "mse", "weighted"]
    if way == "more":
        return _pick(draw, losses[:3])  # type: ignore[no-any-return]
    if way in WHOLE_BATCH:
        losses += ["terms"] + (["coupled"] if model not in ("batchnorm", *TOKEN_MODELS) else [])
    return _pick(draw, losses)  # type: ignore[no-any-return]


def _given(draw: Any, way: str, loss: str) -> str:
    if loss == "coupled":
        return "total"
    given = ["total", "mean"]
    if loss in ("ce", "smooth", "classes") and way != "more":
        given += ["helper"]
    if loss in ("ce", "smooth", "mse") and way in (*WHOLE_BATCH, "run"):
        given += ["unit"]
    if way == "backward":
        given += ["Loss"]
    return _pick(draw, given)  # type: ignore[no-any-return]


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
        if all(micro.labels == "none" for micro in micros) or loss == "weighted":
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


def _loop(draw: Any, way: str, event: str) -> str:
    if way in WHOLE_BATCH:
        return "over"
    if event in ("raise", "discard") or way == "announce":
        return "last"
    return _pick(draw, ["over", "last", "flush"], 2)  # type: ignore[no-any-return]


def _event(draw: Any, way: str, model: str) -> str:
    events = ["none", "rate", "freeze", "evaluate", "load", "raise", "resume"]
    events += ["nan"] if model not in TOKEN_MODELS and model != "batchnorm" else []
    events += ["discard"] if way in (*LOOPS, "run") and way != "announce" else []
    if way in ("announce", "gradient"):
        events = [event for event in events if event not in ("raise", "resume", "discard")]
    if model in ("tied", "lora", "tokens"):
        events = [event for event in events if event != "freeze"]
    if model == "sparse":
        events = [event for event in events if event != "nan"]
    return _pick(draw, events, 4)  # type: ignore[no-any-return]


def _optimizer(draw: Any, model: str) -> str:
    kinds = ["sgd", "momentum", "decay", "adamw", "adamw fused", "adam foreach", "adagrad"]
    return _pick(draw, [*kinds, "rmsprop", "groups"], 3)  # type: ignore[no-any-return]


def _scheduler(draw: Any, event: str) -> str:
    kinds = ["none", "exponential", "step", "lambda"]
    if event == "rate":
        return "none"
    return _pick(draw, [*kinds, "plateau"] if event == "none" else kinds, 3)  # type: ignore[no-any-return]


def _clip(draw: Any, model: str, optimizer: str) -> str:
    if model == "sparse":
        return "none"
    kinds = ["none", "norm", "value"] + (["groups"] if optimizer == "groups" else [])
    return _pick(draw, kinds, 2)  # type: ignore[no-any-return]


def _close(draw: Any, way: str, model: str) -> tuple[str, ...]:
    if model == "sparse":
        return ()
    kinds = ["zero_units", "nonfinite", "sync", "on_gradient"]
    kinds += ["ema"] if way != "gradient" else []
    return tuple(kind for kind in kinds if draw(st.integers(0, 5)) == 5)


@st.composite
def _wrong(draw: Any) -> Program:
    """Draw a plain program with a mistake in it."""
    mistake = _pick(draw, list(MISTAKES))
    plan = MISTAKES[mistake]
    way = _pick(draw, [way for way in plan.ways if way not in ("announce", "more")])
    model = _pick(draw, [name for name in MODELS if name not in ("batchnorm", "sparse")])
    loss = _pick(draw, list(plan.losses))
    windows = draw(_windows(whole=way in WHOLE_BATCH, loss=loss, model=model, least=2))
    return Program(
        model=model,
        windows=windows,
        loss=loss,
        given=_pick(draw, list(plan.given)),
        way=way,
        batch=_pick(draw, ["dict", "tuple", "dataclass", "namedtuple"]),
        loop=_loop(draw, way, "none"),
        style=_pick(draw, ["module", "main", "closure", "class"]),
        names=_pick(draw, ["short", "long"]),
        optimizer=_pick(draw, ["sgd", "momentum", "adamw"]),
        mistake=mistake,
        seed=draw(st.integers(0, 50)),
    )
