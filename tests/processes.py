"""Start processes that have torch imported already.

Importing torch takes a process 3 to 5 seconds, which is longer than what most tests do in one.
Here every process is forked from a server that has imported torch and has done nothing else.
So it starts without any state of the tests, as a process of its own interpreter would.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import context, forkserver, get_context
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PATH = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
# torch._dynamo: the first step of an optimizer imports it. The package's names are imported where
# they are first used, so its largest modules are named.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "wholebatch.accumulator",
    "wholebatch.whole_batch",
    "wholebatch.audit.adds_up",
    "wholebatch.cli.train_command",
    "wholebatch.cli.train_loop",
]
# A dozen jobs begin with Transformers, if it is installed: those of several processes, which are
# with the first worker of pytest-xdist (`conftest.py`).
if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
    PRELOADED.append("transformers.trainer")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": PATH,
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class Started:
    """A process, and what it has written to its two streams."""

    def __init__(
        self,
        program: str | Path,
        arguments: Sequence[str],
        *,
        folder: Path,
        cwd: Path,
        environment: dict[str, str],
        ranks: int | None = None,
        restarts: int = 0,
    ) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        call = (program, list(arguments), self._out, self._err, cwd, environment, ranks, restarts)
        self._process = _forked_from_the_server().Process(target=_run, args=call)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status; -n after signal n; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait until the process has ended; kill it and all that it has started after `timeout`."""
        self._process.join(timeout)
        status = self.status
        if status is None:
            self.kill()
            raise subprocess.TimeoutExpired(str(self._process), timeout, self._out.read_bytes())
        out, err = (path.read_text(encoding="utf-8") for path in (self._out, self._err))
        return subprocess.CompletedProcess(str(self._process), status, out, err)

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has no group of its own yet
            self._process.kill()
        self._process.join()


def run(
    program: str | Path,
    *arguments: str,
    cwd: Path,
    environment: dict[str, str],
    timeout: float,
    ranks: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script (a Path) or a module (a str) to its end; with `ranks`, under torchrun."""
    with TemporaryDirectory() as folder:
        process = Started(
            program,
            arguments,
            folder=Path(folder),
            cwd=cwd,
            environment=environment,
            ranks=ranks,
        )
        return process.wait(timeout)


def run_code(code: str, *, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end, in `folder`; its warnings are errors."""
    program = folder / "code.py"
    program.write_text(f"import warnings\nwarnings.simplefilter('error')\n{code}", encoding="utf-8")
    return run(program, cwd=folder, environment={**os.environ, **ENVIRONMENT}, timeout=120)


def worker() -> ProcessPoolExecutor:
    """Return one process that calls functions for its caller.

    It has one thread and no state of the tests, so it may fork: a test must not, after another one
    has imported JAX, whose threads hold locks.
    """
    return ProcessPoolExecutor(1, mp_context=_forked_from_the_server())


def _forked_from_the_server() -> context.ForkServerContext:
    server = get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # of the server; each process gets its own
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return server


def _run(
    program: str | Path,
    arguments: list[str],
    out: Path,
    err: Path,
    cwd: Path,
    environment: dict[str, str],
    ranks: int | None,
    restarts: int,
) -> None:
    gc.freeze()  # what is imported: no collection goes through it, or copies its pages
    os.setsid()  # so that a timeout ends the ranks too
    for path, stream in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if ranks is None:
        _main(program, *arguments)
    else:
        _torchrun(program, arguments, ranks, restarts)


def _torchrun(program: str | Path, arguments: list[str], ranks: int, restarts: int) -> None:
    """Do what torchrun does, with ranks that are forked from its agent.

    The agent imports what the script does, once for all ranks. It waits for what each rank returns:
    a script must not end by `os._exit(0)`. No rank ends through its interpreter, where a thread of
    gloo that still releases a tensor would abort it.
    """
    from torch.distributed import run as module
    from torch.distributed.launcher.api import elastic_launch

    options = ["--standalone", "--nproc-per-node", str(ranks), str(program), *arguments]
    parsed = module.parse_args(options)
    parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.rdzv_id = (
        "c10d",
        "localhost:0",
        str(os.getpid()),
    )
    config, _, _ = module.config_from_args(parsed)
    config.start_method, config.max_restarts = "fork", restarts
    if isinstance(program, Path):
        _import_what_it_imports(program)
    elastic_launch(config, _main)(program, *arguments)


def _import_what_it_imports(script: Path) -> None:
    folder = str(script.parent)
    sys.path.insert(0, folder)
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            with contextlib.suppress(ImportError):  # its ranks will say so
                exec(compile(ast.Module([node], []), str(script), "exec"), {})
    sys.path.remove(folder)
    gc.freeze()


def _main(program: str | Path, *arguments: str) -> None:
    """Do what `python program` or `python -m program` does; torchrun wants no `sys.exit(0)`."""
    sys.argv = [str(program), *arguments]
    try:
        if isinstance(program, Path):
            sys.path.insert(0, str(program.parent))
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        atexit._run_exitfuncs()  # a forked process would not
