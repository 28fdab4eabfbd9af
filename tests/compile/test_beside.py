"""Compilation beside the run: the same update, and never a crash or a wait because of a worker."""

from __future__ import annotations

import operator
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.compile.nets import Tagger, loss, mean_of_tokens, mode_of, tagged
from tests.support import Seen, Whole, sgd
from wholebatch.compile import compile_workers, execute_mode, joint_graph, micro_step
from wholebatch.compile.compile_workers import (
    CompileWorkers,
    Pending,
    check_of,
    convolutions_of,
    job_of,
)
from wholebatch.compile.disk_cache import claimed
from wholebatch.compile.execute_mode import ExecutePlan
from wholebatch.compile.joint_graph import JointStep
from wholebatch.compile.layer_norm import can_fuse_norms
from wholebatch.compile.repeated_blocks import PieceProgram, _Input, _Result
from wholebatch.coupled import additivity, adds_up

# Inductor's own imports warn; a compiled piece is collected late.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

aten = torch.ops.aten
MATRIX = ((3, 3), (3, 1), torch.float64, torch.device("cpu"))
OPTIONS: dict[str, Any] = {"more": {}, "whole_rows": 4096}


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU for which "auto" traces at once, and compiles beside the run."""

    def plan(execute: str, device: torch.device) -> ExecutePlan:
        is_auto = execute == "auto"
        return ExecutePlan(eager=False, compiles=True, captures=False, auto=is_auto)

    monkeypatch.setattr(ExecutePlan, "of", staticmethod(plan))
    monkeypatch.setattr(execute_mode, "_TRACE_AFTER", 0.0)
    monkeypatch.setattr(micro_step.Executor, "compiles_beside_on", ("cpu",))
    made: list[CompileWorkers] = []

    def workers(device: torch.device) -> CompileWorkers:
        made.append(CompileWorkers(1, device))
        return made[-1]

    monkeypatch.setattr(micro_step, "compile_workers", workers)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    yield
    for one in made:
        one.close()


@pytest.fixture
def as_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No compiler in this process: pieces run as traced. The operations of each are kept."""
    found: list[int] = []

    def compiled(graph: Any, arguments: Any, **_: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return graph

    monkeypatch.setattr(joint_graph, "compiled_by_inductor", compiled)
    return found


def trained(
    model: nn.Module, *, execute: Any = "auto", patience: float, pause: float = 0.01
) -> wb.WholeBatch:
    """Train until compiled code runs; every update is that of the undivided batch.

    `pause`: seconds between windows. Rounding grows with the number of updates.
    """
    whole = Whole(model, loss=mean_of_tokens)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=3, execute=execute)
    began = time.perf_counter()
    modes: list[str] = []
    while modes[-2:] != ["compile"] * 2 and time.perf_counter() - began < patience:
        for number in (6, 9):
            whole.step(tagged(number))
            train.step(tagged(number))
        modes.append(mode_of(train))
        time.sleep(pause)
    assert modes[-1] == "compile", train._runner.executor.notes.history
    whole.assert_same(model, seen, 1e-12)
    return train


@pytest.mark.slow
def test_a_worker_fills_the_cache_and_the_run_loads_it(beside: None) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    train = trained(Tagger().double(), patience=250.0, pause=2.0)
    assert counters["inductor"]["fxgraph_cache_hit"] >= 1
    assert not counters["inductor"]["fxgraph_cache_miss"]
    history = train._runner.executor.notes.history
    assert history[0].startswith("compiling beside the run, about")
    assert train._runner.executor.progress is None


def answering(answer: bytes | None) -> Callable[[socket.socket, torch.device], None]:
    """Return a server whose only worker answers this to the first bytes that it gets."""

    def serve(control: socket.socket, _: torch.device) -> None:
        with socket.socket(fileno=socket.recv_fds(control, 1, 1)[1][0]) as worker:
            worker.recv(9)
            if answer is not None:
                worker.send(answer)
                worker.recv(1 << 30)
                worker.recv(1)

    return serve


WORKERS: dict[str, Callable[[socket.socket, torch.device], Any]] = {
    "ends at once": lambda *_: None,
    "ends in the middle": answering(None),
    "says nonsense": answering(b"half\n"),
    "hangs": lambda *_: time.sleep(600),
    "fails": answering(b'{"problem": "no"}\n'),
}


@pytest.mark.parametrize("worker", WORKERS)
def test_the_run_goes_on_without_its_workers(
    worker: str, beside: None, as_traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_workers, "serve", WORKERS[worker])
    monkeypatch.setattr(compile_workers, "_PATIENCE", 0.5)
    train = trained(Tagger().double(), patience=30.0)
    assert as_traced
    said = [line for line in train._runner.executor.notes.history if "this one compiles" in line]
    assert len(said) == 1


def test_a_server_that_has_ended_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(control: socket.socket, _: torch.device) -> None:
        with socket.socket(fileno=socket.recv_fds(control, 1, 1)[1][0]) as worker:
            worker.recv(1 << 20)
            worker.send(b'{"problem": null}\n')

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_workers, "serve", serve)
    workers = CompileWorkers(1, torch.device("cpu"))
    servers = set()
    for target in (aten.tanh.default, aten.sin.default):
        job = job_of(PieceProgram([(target, (_Input(0),), {})], [MATRIX], [0]), OPTIONS)
        pending = workers.compile([job])
        pending.wait()
        assert pending.problem is None
        servers.add(workers._server._process)
        os.waitid(os.P_PID, workers._server._process, os.WEXITED | os.WNOWAIT)
    assert len(servers) == 2
    workers.close()


def test_asked_for_it_waits_for_the_workers(
    beside: None, as_traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_workers, "serve", WORKERS["fails"])
    train = trained(Tagger().double(), execute="compile", patience=30.0)
    assert mode_of(train) == "compile"


@pytest.mark.parametrize("kind", ["one total", "32-bit total", "makes a table"])
def test_the_pieces_are_sent_before_the_first_test_of_the_model(
    kind: str, beside: None, as_traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    by_itself = CompileWorkers.compile

    def sent(self: CompileWorkers, jobs: Any) -> Pending:
        order.append("sent")
        return by_itself(self, jobs)

    def looked(*args: Any, **options: Any) -> Any:
        order.append("first test")
        return adds_up.check_adds_up(*args, **options)

    def own_loss(model: nn.Module, micro: Any) -> Any:
        one = loss(model, micro)
        if kind == "32-bit total":
            return wb.Loss(one.total.float(), one.units)
        if kind == "makes a table" and not hasattr(model, "table"):
            model.table = torch.ones(3)
        return one

    monkeypatch.setattr(compile_workers, "serve", WORKERS["fails"])
    monkeypatch.setattr(CompileWorkers, "compile", sent)
    monkeypatch.setattr(additivity, "check_adds_up", looked)
    model = Tagger().double()
    whole = Whole(model, loss=mean_of_tokens)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=own_loss, micro_batch=3, execute="compile")
    for number in (6, 7, 9):
        whole.step(tagged(number))
        train.step(tagged(number))
    wanted = ["sent", "first test"]
    assert order[:2] == (wanted[::-1] if kind == "makes a table" else wanted)
    assert mode_of(train) == "compile"
    whole.assert_same(model, seen, 1e-7 if kind == "32-bit total" else 1e-12)


def test_windows_do_not_wait(
    beside: None, as_traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Pending] = []

    def never(self: CompileWorkers, jobs: Any) -> Pending:
        given.append(Pending(jobs, expected=30.0))
        return given[-1]

    monkeypatch.setattr(compile_workers, "serve", WORKERS["ends at once"])
    monkeypatch.setattr(CompileWorkers, "compile", never)
    model = Tagger().double()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=3)
    for _ in range(4):
        train.step(tagged(6))
        assert mode_of(train) == "eager"
    executor = train._runner.executor
    assert len(given) == 1
    assert executor.progress is not None
    assert executor.progress.startswith("compiling beside the run, about ")
    given[0].left = 0
    train.step(tagged(6))
    train.step(tagged(6))
    assert mode_of(train) == "compile"
    assert executor.progress is None


def test_windows_do_not_wait_for_a_graph_of_open_sizes(
    beside: None, as_traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Pending] = []

    def later(self: CompileWorkers, jobs: Any) -> Pending:
        given.append(Pending(jobs, expected=30.0))
        given[-1].left = len(given) - 1  # The first one is in the cache.
        return given[-1]

    monkeypatch.setattr(compile_workers, "serve", WORKERS["ends at once"])
    monkeypatch.setattr(CompileWorkers, "compile", later)
    model = Tagger().double()
    whole = Whole(model, loss=mean_of_tokens)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=8)
    executor = train._runner.executor
    executor._plan.started -= 1e9
    modes = []
    for length in (6, 6, 6, 7, 7, 7, 8, 8, 7, 7, 8, 8):
        if len(modes) == 8:
            assert len(given) == 2  # of both kinds that share it, one has sent it
            given[1].left = 0
        whole.step(tagged(4, length))
        train.step(tagged(4, length))
        modes.append(mode_of(train))
    assert modes[5:9] == ["operations", "eager", "operations", "eager"]  # eager: the comparison
    assert [one.mode for one in executor._steps.values()] == ["compile"] * 3
    whole.assert_same(model)


def test_a_process_compiles_for_a_device_that_it_cannot_use() -> None:
    ours, theirs = socket.socketpair()

    def compile_for_cuda() -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        try:
            compile_workers._leave_the_device(torch.device("cuda", 0))
            with FakeTensorMode():
                x = torch.tensor([1.0, 2.0], device="cuda:0")
                x[:1].copy_(x[None, 1])
            theirs.send(f"{x.device} {torch.cuda.current_device()}".encode())
        except Exception as problem:
            theirs.send(repr(problem).encode())

    process = compile_workers._forked(compile_for_cuda)
    theirs.close()
    assert ours.recv(999) == b"cuda:0 0"
    ours.close()
    os.waitpid(process, 0)
    assert not torch.cuda.is_available()


def test_a_worker_needs_no_device_for_a_convolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    images = ((2, 3, 8, 8), (192, 1, 24, 3), torch.float64, torch.device("cpu"))
    kernels = ((4, 3, 3, 3), (27, 9, 3, 1), torch.float64, torch.device("cpu"))
    bias = ((4,), (1,), torch.float64, torch.device("cpu"))
    args = (_Input(0), _Input(1), _Input(2), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    program = PieceProgram([(aten.convolution.default, args, {})], [images, kernels, bias], [0])
    without = [name for name in convolutions_of(program) if "'bias'" not in name]
    assert any(name.startswith("_select") for name in without)  # Inductor may add it by itself.
    job = job_of(program, OPTIONS)
    assert job == job_of(program, OPTIONS)  # Whatever is known of it already.

    def unknown(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: initialization error")

    for name in ("_select_conv_backend", "_conv_determine_backend_memory_format"):
        monkeypatch.setattr(torch._C, name, unknown)
    compile_workers._compile(job.message)
    assert job.known
    fewer = ((1, *images[0][1:]), *images[1:])
    unanswered = job_of(PieceProgram(program.operations, [fewer, kernels, bias], [0]), OPTIONS)
    with pytest.raises(Exception, match="_select_conv_backend"):
        compile_workers._compile(unanswered.message)


def test_one_piece_that_fails_leaves_the_others_to_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(control: socket.socket, _: torch.device) -> None:
        answers = iter([b'{"problem": "no"}\n', b'{"problem": null}\n'])
        with socket.socket(fileno=socket.recv_fds(control, 1, 1)[1][0]) as worker:
            for answer in answers:
                worker.recv(1 << 20)
                worker.send(answer)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_workers, "serve", serve)
    workers = CompileWorkers(1, torch.device("cpu"))
    pieces = [
        PieceProgram([(target, (_Input(0),), {})], [MATRIX], [0])
        for target in (aten.tanh.default, aten.sin.default)
    ]
    pending = workers.compile([job_of(one, OPTIONS) for one in pieces])
    pending.wait()
    assert pending.problem == "no"
    assert pending.left == 0
    workers.close()


@pytest.mark.parametrize("who", ["define_operations", "_prepare"])
def test_a_process_that_cannot_begin_says_why(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        warnings.warn("old", stacklevel=1)  # No error there, as it is in this process.
        raise RuntimeError("no room")

    warnings.simplefilter("error")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_workers, who, fail)  # A forked process has it too.
    workers = CompileWorkers(1, torch.device("cpu"))
    try:
        piece = PieceProgram([(aten.tanh.default, (_Input(0),), {})], [MATRIX], [0])
        pending = workers.compile([job_of(piece, OPTIONS)])
        pending.wait()
    finally:
        workers.close()
    assert pending.problem == "RuntimeError: no room"


def test_a_server_keeps_nothing_of_the_run() -> None:
    before = signal.signal(signal.SIGINT, lambda *_: None)
    inherited, kept = socket.socketpair()
    ours, theirs = socket.socketpair()

    def leave() -> None:
        compile_workers._leave_the_run(theirs.fileno())
        print("not on the user's screen", flush=True)
        theirs.send(str(signal.getsignal(signal.SIGINT) is signal.SIG_DFL).encode())
        theirs.recv(1)

    process = compile_workers._forked(leave)
    signal.signal(signal.SIGINT, before)
    theirs.close()
    assert ours.recv(9) == b"True"
    assert os.getsid(process) == process
    kept.close()
    assert inherited.recv(1) == b""  # nobody else holds the other end
    inherited.close()
    ours.close()
    os.waitpid(process, 0)


def test_processes_that_share_a_disk_compile_a_piece_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    job = job_of(PieceProgram([(aten.tanh.default, (_Input(0),), {})], [MATRIX], [0]), OPTIONS)
    entered: list[bool] = []

    def other() -> None:
        with claimed(compile_workers._mark(job.message)) as ours:
            entered.append(ours)

    thread = threading.Thread(target=other)
    with claimed(compile_workers._mark(job.message)) as ours:
        assert ours
        thread.start()
        time.sleep(0.3)
        assert not entered  # It waits.
        compile_workers._mark(job.message).touch()
    thread.join()
    assert entered == [False]
    assert job.known
    compile_workers._mark(job.message).unlink()
    claim = compile_workers._mark(job.message).with_suffix(".busy")
    ended = "import fcntl, os, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX); os._exit(1)"
    subprocess.run([sys.executable, "-c", ended, str(claim)], check=False)
    with claimed(compile_workers._mark(job.message)) as ours:
        assert ours  # Whoever claimed it has ended.


def test_workers_rest_without_work_and_not_while_jobs_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may wait long: for a worker, or for another process that compiles the same piece."""

    def serve(control: socket.socket, _: torch.device) -> None:
        compile_workers._leave_the_run(control.fileno())
        while given := socket.recv_fds(control, 1, 1)[1]:
            with socket.socket(fileno=given[0]) as worker:
                while worker.recv(1 << 20):
                    worker.send(b'{"problem": null}\n')

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_workers, "serve", serve)
    monkeypatch.setattr(compile_workers, "_IDLE", 0.05)
    workers = CompileWorkers(1, torch.device("cpu"))

    def job_that_runs(target: Any) -> Any:
        return job_of(PieceProgram([(target, (_Input(0),), {})], [MATRIX], [0]), OPTIONS)

    servers = set()
    for target in (aten.tanh.default, aten.sin.default):
        job = job_that_runs(target)
        with claimed(compile_workers._mark(job.message)):
            pending = workers.compile([job])
            servers.add(workers._server._process)
            time.sleep(0.5)
            assert not pending.done
        pending.wait()
        assert pending.problem is None
        # Now there is nothing to do: the server ends.
        os.waitid(os.P_PID, workers._server._process, os.WEXITED | os.WNOWAIT)
    assert len(servers) == 2
    workers.close()


def test_jobs_that_take_too_long_have_failed() -> None:
    job = job_of(PieceProgram([(aten.tanh.default, (_Input(0),), {})], [MATRIX], [0]), OPTIONS)
    pending = Pending([job], expected=5.0)
    assert not pending.done
    assert 4.0 < pending.seconds_left <= 5.0
    pending.began -= 200.0
    assert pending.done
    assert pending.problem == "it has taken 200 s"


def test_a_piece_is_plain_data_and_makes_the_same_graph() -> None:
    piece = PieceProgram(
        [
            (aten.mm.default, (_Input(0), _Input(1)), {}),
            (aten._to_copy.default, (_Result(0),), {"dtype": torch.float32}),
            (aten.split.Tensor, (_Result(1), 2), {}),
            (operator.getitem, (_Result(2), 1), {}),
        ],
        [MATRIX, MATRIX],
        [3],
    )
    again, settings = pickle.loads(job_of(piece, OPTIONS).message)
    assert again == piece
    assert settings["options"] == OPTIONS
    assert str(again.module().graph) == str(piece.module().graph)
    assert job_of(piece, OPTIONS) == job_of(again, OPTIONS)


def test_what_is_not_plain_data_is_compiled_here() -> None:
    def own(x: Any) -> Any:
        return x

    for target, argument in ((own, 1), (aten.mul.Scalar, torch.ones(2))):
        piece = PieceProgram([(target, (_Input(0), argument), {})], [MATRIX], [0])
        with pytest.raises(pickle.PicklingError):
            job_of(piece, OPTIONS)


def test_a_kernel_is_checked_by_a_job_and_left_out_if_it_is_wrong(
    beside: None, as_traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_workers, "versions_of", lambda device: "of now")
    job = check_of(can_fuse_norms, torch.device("cpu"))
    assert not job.known
    compile_workers._compile(job.message)
    assert job.known
    monkeypatch.setattr(micro_step, "compile_workers", lambda _: None)
    asked: list[JointStep] = []

    def holds(joint: JointStep) -> Iterator[bool]:
        asked.append(joint)
        yield len(asked) > 1

    monkeypatch.setattr(JointStep, "kernels_hold", holds)
    trained(Tagger().double(), execute="compile", patience=30.0)
    assert asked[0] is not asked[1]  # It was made again.


def test_a_message_names_no_module_of_the_user() -> None:
    """Pickle would name the first module with an attribute `torch`, and the worker import it."""
    kinds = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
    piece = PieceProgram([(aten._to_copy.default, (_Input(0),), kinds)], [MATRIX], [0])
    module = ModuleType("of_the_user")
    module.torch = torch  # type: ignore[attr-defined]
    before = dict(sys.modules)
    sys.modules.clear()
    sys.modules.update({"of_the_user": module, **before})
    try:
        message = job_of(piece, OPTIONS).message
    finally:
        del sys.modules["of_the_user"]
    assert b"of_the_user" not in message
    assert pickle.loads(message)[0].operations[0][2] == kinds
