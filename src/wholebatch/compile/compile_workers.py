"""Processes that compile pieces of a graph beside the training, and fill Inductor's disk cache.

A piece is sent as plain data. A worker compiles it on fake tensors with the options of the training
process, which compiles the same piece afterwards, and finds everything in the cache. So a worker
can never change a result. If it dies, hangs, or cannot read a piece, the training process compiles.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hashlib
import io
import json
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from inspect import unwrap
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.compile.disk_cache import claimed, marks, trim
from wholebatch.compile.fake_results import mapped
from wholebatch.compile.fusion import OURS, versions_of
from wholebatch.compile.inductor import compiled_by_inductor, import_compiler, wait_for_import
from wholebatch.compile.repeated_blocks import PieceProgram
from wholebatch.window.forward_state import replaced_attributes

_LOG = logging.getLogger("wholebatch.compile")
_MOST = 8
"""The most workers."""
_PATIENCE = 300.0
"""Seconds after which a worker that compiles one piece is taken for dead."""
_LATE = 120.0
"""Seconds that jobs may take beyond four times what was expected."""
_IDLE = 20.0
"""Seconds without work after which all processes are ended and give their memory back."""


# ----------------------------------------------------------------------------- a piece as a message


class PlainPickler(pickle.Pickler):
    """Pickles plain data and operations of torch, and nothing else of torch."""

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, torch._ops.OpOverload):
            if part.namespace not in OURS:
                raise pickle.PicklingError(f"{part} belongs to another library")
            return _operation, (part.namespace, part._opname, part._overloadname)
        if isinstance(part, (torch.dtype, torch.layout, torch.memory_format)):
            # By itself pickle would name the first module that has imported torch: the user's.
            return _of_torch, (str(part).removeprefix("torch."),)
        if isinstance(part, torch.SymInt):
            return _open_size, _as_expression(part)
        if isinstance(part, (torch._ops.OperatorBase, torch.SymFloat, torch.Tensor)):
            raise pickle.PicklingError(f"a {type(part).__name__} is not plain data")
        return NotImplemented


def _as_expression(size: torch.SymInt) -> tuple[Any, int, list[tuple[str, int]]]:
    """Return an open size as an expression, its value, and source and value of its symbols."""
    known, expression = size.node.shape_env, size.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    sources = [known.var_to_sources[symbol][0].source_name for symbol in symbols]
    values = [int(known.create_symintnode(one, hint=None).node.hint) for one in symbols]
    return expression, int(size.node.hint), list(zip(sources, values, strict=True))


def _open_size(expression: Any, hint: int, symbols: Sequence[tuple[str, int]]) -> Any:
    """Return this size among those of the piece that is read now."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    known, sources = _open_sizes
    for source, value in symbols:
        if source not in sources:  # A symbol is named by its source.
            one = known.create_symbol(value, ConstantSource(source), DimDynamic.DYNAMIC)
            sources[source] = one
    if not expression.free_symbols <= set(sources.values()):
        raise pickle.UnpicklingError("another version of torch names its symbols in another way")
    return known.create_symintnode(expression, hint=hint)


_open_sizes: tuple[Any, dict[str, Any]] = None, {}


def _of_torch(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise pickle.UnpicklingError(f"torch.{name} is not plain data")
    return found


def _operation(namespace: str, name: str, overload: str) -> Any:
    if namespace == "wholebatch":
        define_operations()
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@cache
def define_operations() -> None:
    """Define this package's operations. The training process defines each when it uses it."""
    from wholebatch.compile import (
        biased_attention,
        cross_entropy,
        fused_weight_grad,
        gelu,
        grouped_products,
        layer_norm,
        recurrent_layers,
    )

    for define in (
        biased_attention._forward_operation,
        biased_attention._backward_operation,
        cross_entropy._operation,
        fused_weight_grad.add_product,
        partial(fused_weight_grad.add_product, gaps=True),
        gelu._operation,
        grouped_products.grouped_product,
        layer_norm._operation,
        recurrent_layers._operations,
    ):
        with contextlib.suppress(ImportError):  # Triton ships with CUDA builds only.
            define()


@dataclass(frozen=True)
class Job:
    """A piece to compile, as bytes; equal bytes give equal code."""

    message: bytes
    operations: int

    @property
    def known(self) -> bool:
        """True if a worker has compiled it before: the disk cache probably still holds it."""
        return _mark(self.message).exists()


def _mark(message: bytes) -> Path:
    """Return the file that says that this message was compiled into the disk cache."""
    versions = f"{torch.__version__} {sys.version}".encode()
    return marks() / hashlib.sha256(versions + message).hexdigest()[:32]


def job_of(program: PieceProgram, options: Mapping[str, Any]) -> Job:
    """Return the job that compiles this piece; raise PicklingError if it is not plain data."""
    wait_for_import()
    from torch._inductor import config

    settings = {
        "options": dict(options),
        "inductor": config.save_config_portable(),
        "torch": {name: get() for name, (get, _) in GLOBALS.items()},
        "convolutions": convolutions_of(program),
    }
    stream = io.BytesIO()
    try:
        PlainPickler(stream).dump((program, settings))
    except (AttributeError, TypeError) as problem:  # A function or class without a name.
        raise pickle.PicklingError(str(problem)) from problem
    return Job(stream.getvalue(), len(program.operations))


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def convolutions_of(program: PieceProgram) -> dict[str, Any]:
    """Return what fake tensors ask the device about the convolutions of a piece, with answers."""
    answers: dict[str, Any] = {}
    backends: dict[Any, None] = {}

    def keep(name: str, ask: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        others = [(one,) for one in backends] if args[2:] else [()]
        # Inductor may change the layout of both, and add the bias by itself.
        options = [kwargs, {**kwargs, "bias": None}] if "bias" in kwargs else [kwargs]
        for images, kernels in product(_layouts(args[0]), _layouts(args[1])):
            for other, more in product(others, options):
                answer = ask(images, kernels, *other, **more)
                answers[_question(name, (images, kernels, *other), more)] = answer
                if not other:
                    backends[answer] = None
        return answers[_question(name, args, kwargs)]

    if any(target in _CONVOLUTIONS for target, _, _ in program.operations):
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode()
        mode.cache_enabled = False  # Who finds a result there asks nothing.
        # With an open size nothing is asked.
        with contextlib.suppress(Exception), answered_by(keep), mode:
            program.module()(*program.examples())
    return answers


def _layouts(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Return this tensor, and copies in the layouts that a convolution may have."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(matrix.dim())
    formats = [torch.contiguous_format, last] if last else []
    return [matrix, *(matrix.contiguous(memory_format=one) for one in formats)]


def _question(name: str, args: Any, kwargs: Any) -> str:
    """Return a question with the layouts of its tensors; what is None may be left out."""

    def kind(part: Any) -> Any:
        is_tensor = isinstance(part, torch.Tensor)
        return (tuple(part.shape), part.stride(), part.dtype) if is_tensor else part

    given = {key: value for key, value in kwargs.items() if value is not None}
    return f"{name} {mapped([args, given], kind)}"


def answered_by(
    reply: Callable[[str, Callable[..., Any], Any, Any], Any],
) -> contextlib.AbstractContextManager[None]:
    """Within this context, `reply` answers what fake tensors ask the device about convolutions."""

    def asked(name: str, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        by_name = [kwargs.pop(one) for one in ("input", "weight") if one in kwargs]
        return reply(name, ask, (*args, *by_name), kwargs)

    names = ("_select_conv_backend", "_conv_determine_backend_memory_format")
    replies = {name: partial(asked, name, getattr(torch._C, name)) for name in names}
    return replaced_attributes(torch._C, **replies)


def check_of(has_kernel: Callable[[torch.device], bool], device: torch.device) -> Job:
    """Return the job that compiles the kernels that a check of this package runs."""
    return Job(pickle.dumps((partial(_check, has_kernel, device), versions_of(device))), _CHECK)


def _check(has_kernel: Callable[[torch.device], bool], device: torch.device) -> bool:
    """Run a check without keeping its answer."""
    return bool(unwrap(has_kernel)(device))


_CHECK = 60
"""Compiling the kernels of a check takes as long as compiling so many operations."""


def _of_products(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    of = torch.backends.cuda.matmul
    return lambda: getattr(of, name), lambda value: setattr(of, name, value)


GLOBALS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "fp32_precision": _of_products("fp32_precision"),
    "fp16 sums": _of_products("allow_fp16_reduced_precision_reduction"),
    "bf16 sums": _of_products("allow_bf16_reduced_precision_reduction"),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
}
"""Settings of torch that are part of Inductor's cache key: how each is read and set."""


# ---------------------------------------------------------------------------------- in the training


@dataclass
class Pending:
    """Jobs that were given to the workers."""

    jobs: Sequence[Job]
    expected: float
    """Seconds that they will probably take."""
    began: float = field(default_factory=time.perf_counter)
    problem: str | None = None
    """The reason why one of them failed, or why nobody waits for them any more."""
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.jobs)

    @property
    def done(self) -> bool:
        """True if every job has been tried, or they take far too long."""
        took = time.perf_counter() - self.began
        late = bool(self.left) and took > _LATE + 4 * self.expected
        if late and self.problem is None:
            self.problem = f"it has taken {took:.0f} s"
        return late or not self.left

    @property
    def seconds_left(self) -> float:
        """The seconds until it is done, as far as they can be known."""
        return max(1.0, self.began + self.expected - time.perf_counter())

    def wait(self) -> None:
        """Wait until it is done."""
        while not self.done:
            time.sleep(0.01)


class CompileWorkers:
    """A few processes that compile the jobs that they are given."""

    def __init__(self, number: int, device: torch.device) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Pending] | None] = queue.SimpleQueue()
        self._server = _Server(device)
        self._counting = threading.Lock()
        self._left = 0  # jobs that were given and not yet done
        self.number = number
        self._threads = [
            threading.Thread(target=self._serve_one, daemon=True) for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all processes after their present job."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._server.end()

    def compile(self, jobs: Sequence[Job]) -> Pending:
        """Give the jobs that are not in the cache to the workers, largest first."""
        jobs = [job for job in jobs if not job.known]
        if jobs:
            with self._counting:
                self._left += len(jobs)
                self._server.start_again()
        longest = max((job.operations for job in jobs), default=0)
        each = sum(job.operations for job in jobs) / self.number
        pending = Pending(jobs, SECONDS_TO_START + max(longest, each) * SECONDS_PER_OPERATION)
        for job in sorted(jobs, key=lambda job: -job.operations):
            self._jobs.put((job, pending))
        return pending

    def _serve_one(self) -> None:
        """Keep one process, and give it one job after the other."""
        worker = _Worker(self._server)
        while True:
            try:
                given = self._jobs.get(timeout=_IDLE)
            except queue.Empty:
                with self._counting:
                    if not self._left:
                        worker.end()
                        self._server.rest()
                continue
            if given is None:
                break
            job, pending = given
            if not pending.done:
                with claimed(_mark(job.message)) as ours:
                    problem = worker.compile(job) if ours else None
                pending.problem = pending.problem or problem
            with self._counting:
                pending.left -= 1
                self._left -= 1
        worker.end()


SECONDS_PER_OPERATION = 0.03
"""Seconds that a worker takes for an operation: Inductor's code and Triton's kernels."""
SECONDS_TO_START = 3.0
"""Seconds that a worker takes to import Inductor."""


class _Server:
    """A process forked from this one, which imports the compiler and forks a worker when asked to.

    So none of them imports torch, which takes seconds. A forked process cannot use a CUDA device
    that its parent has used: it compiles for the device without it.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)  # The fork knows them from now on.
        import_module("torch._dynamo")  # torch needs it too, at the first step of an optimizer.
        self._device = device
        self._fork()
        _running.add(self)

    def _fork(self) -> None:
        self._rests = False
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = _forked(partial(serve, theirs, self._device))

    def rest(self) -> None:
        """End the process until there is work again."""
        if not self._rests:
            with contextlib.suppress(OSError):  # It has ended.
                os.kill(self._process, signal.SIGKILL)
        self._rests = True

    def start_again(self) -> None:
        """Fork it again if it rests or has ended."""
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self._process, 0 if self._rests else os.WNOHANG)[0]:
                self._control.close()
                self._fork()

    def connected(self) -> socket.socket:
        """Have a worker started; return the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def end(self) -> None:
        """End the process and all workers."""
        _running.discard(self)
        for kill in (os.killpg, os.kill):  # Just forked, it is not yet a group of its own.
            with contextlib.suppress(OSError):
                kill(self._process, signal.SIGKILL)
        self._control.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


_running: set[_Server] = set()


@atexit.register
def _end_all() -> None:
    for server in list(_running):
        server.end()


def _forked(run: Callable[[], None]) -> int:
    """Fork a process that does this and nothing else; return its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns that the locks of other threads stay locked.
        process = os.fork()
    if process:
        return process
    try:
        run()
    finally:
        os._exit(0)


class _Worker:
    """One worker; it is started again if it has ended."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._connection: socket.socket | None = None
        with contextlib.suppress(OSError):  # The server has ended; `compile` says so.
            self._connection = server.connected()

    def compile(self, job: Job) -> str | None:
        """Compile it; return the reason if that failed."""
        for _ in range(2):  # Something may have ended it since its last job.
            killer: threading.Timer | None = None
            try:
                self._connection = self._connection or self._server.connected()
                killer = threading.Timer(_PATIENCE, self._connection.shutdown, [socket.SHUT_RDWR])
                killer.daemon = True
                killer.start()
                with contextlib.suppress(OSError):  # It may have said why it ended.
                    self._connection.sendall(len(job.message).to_bytes(8, "little") + job.message)
                with self._connection.makefile("rb") as answers:
                    line = answers.readline()
                if line:
                    answer = json.loads(line)
                    if answer.get("where"):
                        _LOG.debug("a process that compiles failed:\n%s", answer["where"])
                    problem: str | None = answer["problem"]
                    return problem
            except (OSError, ValueError):
                pass
            finally:
                if killer is not None:
                    killer.cancel()
            self.end()
        return "its process ended"

    def end(self) -> None:
        """Let it end when it has done its job."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # It has ended.
                self._connection.shutdown(socket.SHUT_RDWR)  # Whoever else was forked holds it too.
            self._connection.close()
            self._connection = None


def _cores() -> int:
    """Return the number of processor cores for this rank."""
    with contextlib.suppress(AttributeError):  # Not on Linux.
        return max(1, len(os.sched_getaffinity(0)) // _ranks_here())
    return max(1, (os.cpu_count() or 1) // _ranks_here())


def _ranks_here() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))


def _number() -> int:
    return min(_MOST, _cores() // 2)


@cache
def compile_workers(device: torch.device) -> CompileWorkers | None:
    """Return the workers of this process, and start them; None if there is no room for any."""
    number = _number()
    with contextlib.suppress(OSError, AttributeError):  # No process can be started, or not Unix.
        return CompileWorkers(number, device) if number else None
    return None


# ------------------------------------------------------------------------------------ in the worker


def serve(control: socket.socket, device: torch.device) -> None:
    """Fork a worker for every connection that comes over this socket, until it is closed."""
    _leave_the_run(control.fileno())
    problem = None
    try:
        import_compiler(with_processes=False)
        define_operations()
        if device.type == "cuda":
            _leave_the_device(device)
    except BaseException as error:  # Every worker that is asked for says why there is none.
        problem = _answer(error)
    # While it runs, the memory that its parent writes to is there twice.
    while given := socket.recv_fds(control, 1, 1)[1]:
        if problem is None:
            _forked(partial(_work, control, given[0], device))
        else:
            os.write(given[0], problem)
        os.close(given[0])


def _answer(error: BaseException | None) -> bytes:
    """Return what a worker says after a job: the reason if it failed."""
    problem = where = None
    if error is not None:
        problem = f"{type(error).__name__}: {str(error)[:300]}"
        where = "".join(traceback.format_exception(error))[-6000:]
    return json.dumps({"problem": problem, "where": where}).encode() + b"\n"


def _leave_the_run(control: int) -> None:
    """Give up what this process has of its parent: terminal, signals, files, and priority."""
    os.setsid()
    os.nice(10)  # The training goes first.
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # That of the listing itself.
            if int(name) != control:
                os.close(int(name))
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)  # It takes the lowest free number.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")  # Where the run makes errors of warnings, imports would fail.
    gc.freeze()  # An object of the parent would close a file that has another's number now.


def _leave_the_device(device: torch.device) -> None:
    """Let this process compile for a CUDA device that only its parent can use.

    It knows the properties of the device. Kernels are compiled, and not loaded.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor

    passes: tuple[Any, ...] = joint_graph, post_grad
    cuda: Any = torch.cuda
    cuda.is_available, is_available = (lambda: False), cuda.is_available
    for one in passes:
        with contextlib.suppress(RuntimeError):  # The parent has compiled: they are there.
            one.lazy_init(torch.device("cpu"))  # Traces patterns of operations, on any device.
    cuda.is_available = is_available
    constants: Any = joint_graph.UniformValueConstantFolder
    value_of = constants._deduce_value

    def value_by_the_cpu(graph: Any, node: Any) -> Any:
        with _OnTheCPU():  # type: ignore[no-untyped-call]
            return value_of(graph, node)

    replaced: list[tuple[Any, str, Any]] = [
        *((one, "lazy_init", lambda *_, **__: None) for one in passes),
        (constants, "_deduce_value", value_by_the_cpu),
        (cuda, "_is_in_bad_fork", lambda: False),
        (cuda, "current_device", lambda: device.index),
        (cuda, "_exchange_device", lambda index: index),
        (cuda, "_maybe_exchange_device", lambda index: index),
        (cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda *_: None),
        (fake_tensor, "init_gpu_context", lambda *_: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", True),
        (CachingAutotuner, "_make_launchers", lambda _: None),
        (CachingAutotuner, "_dynamic_scale_rblock", lambda _: None),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    # In C++, torch makes the device of a tensor the current one for a moment. A "meta" tensor has
    # none: what torch does for those does nothing.
    torch_core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(torch_core, _GUARDS)
    guards[_CUDA] = guards[_META]


class _OnTheCPU(TorchDispatchMode):
    """Lets tensors be made on the CPU within this context, whatever device is asked for."""

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        moved = {"device": torch.device("cpu")} if kwargs and kwargs.get("device") else {}
        return operation(*args, **{**(kwargs or {}), **moved})


_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META = 1, 14  # c10::DeviceType


def _work(control: socket.socket, file: int, device: torch.device) -> None:
    """Do the jobs that come over a connection, until it is closed."""
    control.close()  # Else the run could still ask for workers when the server has ended.
    connection = os.fdopen(file, "r+b", buffering=0)
    try:
        _prepare(device)
    except BaseException as error:
        connection.write(_answer(error))
        return
    while size := int.from_bytes(_read(connection, 8), "little"):
        problem = None
        try:
            _compile(_read(connection, size))
        except BaseException as error:  # Whatever it is, the training process compiles it itself.
            problem = error
        connection.write(_answer(problem))
    trim()


def _prepare(device: torch.device) -> None:
    """Let Inductor compile in this worker as in a process of its own."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.pool.cache_clear()  # The parent's threads are not here.
    config.worker_start_method = "fork"
    config.compile_threads = max(1, _cores() // 4)
    if device.type == "cuda":
        import_compiler(with_processes=True)


_ANSWERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.allclose.default)
"""Operations that return a number or an answer, which fake tensors do not have."""


class _OnlyCompiled(TorchDispatchMode):
    """Compiles those kernels of this package that would run on fake tensors; all checks pass."""

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in _ANSWERS:
            return True
        if operation.namespace == "wholebatch":
            from torch._library.custom_ops import OPDEFS

            from wholebatch.compile.triton_kernels import only_compiled

            # Another version of Triton or torch: the training process compiles it.
            with contextlib.suppress(Exception), only_compiled():
                OPDEFS[operation.name().removesuffix(".default")]._init_fn(*args, **kwargs or {})
        return operation(*args, **kwargs or {})


def _compile_kernels(run: Callable[[], Any]) -> None:
    """Compile the kernels of this package that `run` would launch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with contextlib.suppress(Exception), FakeTensorMode(), _OnlyCompiled():  # type: ignore[no-untyped-call]
        run()


def _read(stream: Any, size: int) -> bytes:
    """Read exactly so many bytes; b"" at the end."""
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _compile(message: bytes) -> None:
    """Do one job; only the disk cache is left of it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    global _open_sizes
    _open_sizes = ShapeEnv(), {}
    program, settings = pickle.loads(message)
    if isinstance(program, PieceProgram):
        _compile_piece(program, settings)
    else:
        _compile_kernels(program)
    _mark(message).parent.mkdir(parents=True, exist_ok=True)
    _mark(message).touch()


def _compile_piece(program: PieceProgram, settings: Mapping[str, Any]) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensorMode

    counters.clear()
    for name, value in settings["torch"].items():
        get, set_ = GLOBALS[name]
        if get() != value:
            set_(value)
    with FakeTensorMode(shape_env=_open_sizes[0]):
        examples = program.examples()
    beside = threading.Thread(
        target=_compile_kernels, args=(lambda: program.module()(*program.examples()),)
    )
    if not _open_sizes[1]:
        beside.start()
    answers = settings["convolutions"]

    def known(name: str, _: Any, args: Any, kwargs: Any) -> Any:
        return answers[_question(name, args, kwargs)]

    with config.patch(settings["inductor"]), answered_by(known):
        compiled_by_inductor(program.module(), examples, **settings["options"])
    if beside.ident is not None:
        beside.join()
    if counters["inductor"]["fxgraph_cache_bypass"]:
        raise RuntimeError("Inductor does not keep it in its cache")
