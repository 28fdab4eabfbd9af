"""Inductor, the compiler of torch, with the options that pay for joint graphs."""

from __future__ import annotations

import copyreg
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pickle import UnpicklingError
from typing import Any

import torch

from wholebatch.window.forward_state import replaced_attributes

_LOG = logging.getLogger("wholebatch.compile")


_imports: list[threading.Thread] = []


def start_compiler(*, with_processes: bool) -> None:
    """Import Inductor in a thread, and start its processes for Triton's kernels.

    Both take seconds. Until the processes run, this process compiles one kernel after the other.
    """
    if not _imports:
        import_module("torch._dynamo")  # torch needs it too, at the first step of an optimizer.
        _imports.append(threading.Thread(target=import_compiler, args=(with_processes,)))
        _imports[0].start()


def wait_for_import() -> None:
    """Wait until that thread has imported Inductor. Call it before anything that imports a part.

    The modules of Inductor import each other in circles. If two threads enter such a circle at
    different places, Python gives one of them a module that is not complete. Where warnings are
    errors, the thread's import ends at torch's own deprecations; this one ignores them.
    """
    for thread in _imports:
        thread.join()
    if _imports and "torch._inductor.compile_fx" not in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("torch._inductor.compile_fx")


def is_imported() -> bool:
    """True if nobody has to wait for that import."""
    return not any(thread.is_alive() for thread in _imports)


def import_compiler(with_processes: bool) -> None:
    """Import all of Inductor, and start its processes for Triton's kernels."""
    # Every operation of torch lets another thread run, for 5 ms by default.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    # Another version of Inductor, or a warning that is an error: `wait_for_import` tries again.
    with suppress(Exception):
        hashing = _hashing_triton()
        # torch.compile enters here too: a user's own call of it just waits for this import.
        for name in ("compile_fx", "choices"):
            import_module(f"torch._inductor.{name}")
        from torch._inductor.async_compile import maybe_warm_pool
        from torch._inductor.codecache import torch_key

        if with_processes:
            maybe_warm_pool()
        torch_key()  # A hash of all of torch's files.
        hashing.join()
    sys.setswitchinterval(interval)


def _hashing_triton() -> threading.Thread:
    """Return a thread that hashes Triton's files, of which every cache key of Inductor has a hash.

    These are hundreds of megabytes, and Python runs on meanwhile.
    """
    thread = threading.Thread(target=lambda: None)
    if find_spec("triton") is not None:
        import_module("triton")
        from torch._inductor.runtime.triton_compat import triton_key

        thread = threading.Thread(target=triton_key)
    thread.start()
    return thread


def compiled_by_inductor(
    graph: Any, arguments: list[Any], *, more: Mapping[str, Any], whole_rows: int
) -> Callable[..., Any]:
    """Compile `graph` for arguments like these; `more` are options of Inductor.

    A kernel that reduces rows of up to `whole_rows` numbers reads each row once and keeps it.
    """
    wait_for_import()
    from torch._inductor import config  # Slow to import: paid only when compiling.
    from torch._inductor.utils import fresh_cache

    # Inductor would compute the gradients of a layer norm's weights, as partial sums, in the kernel
    # of its input's gradient. On an H200 that slowed a window of a GPT (64 sequences in
    # micro-batches of 8) by 2 ms of 132.
    # Inductor's cache key includes its options, but none of the choices below. This option is for
    # exported models, and does nothing here.
    ours = {"wholebatch": f"rows of {whole_rows}, parts in place, padded by rule"}
    options = {"triton.mix_order_reduction": False, "aot_inductor.metadata": ours, **more}
    of_this_version = vars(config)["_config"]
    known = {name: value for name, value in options.items() if name in of_this_version}
    choices = _whole_rows(whole_rows), _parts_written_in_place(), _products_padded_by_rule()
    with ExitStack() as stack:
        for context in (torch.no_grad(), config.patch(known), *choices, _keys_of_all_programs()):
            stack.enter_context(context)
        try:
            return _compiled(deepcopy(graph), arguments)
        except Exception as problem:  # A compiler may raise anything.
            if not _may_be_the_cache(problem):
                raise
            reason = f"{type(problem).__name__}: {str(problem)[:200]}"
        _LOG.warning("the disk cache cannot be used (%s); compiling without it", reason)
        with fresh_cache(delete=False):
            return _compiled(graph, arguments)


def _compiled(graph: Any, arguments: list[Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = import_module("torch._inductor").compile(graph, arguments)
    return compiled


_OF_FILES = (OSError, EOFError, UnpicklingError, SyntaxError, AttributeError, NameError)
"""Errors by which a file shows that is damaged, foreign, or cannot be written."""


def _may_be_the_cache(problem: BaseException | None) -> bool:
    """True if a damaged, foreign, read-only or full cache may be the cause."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    while problem is not None:
        if cache_dir() in str(problem):
            return True
        inner = getattr(problem, "inner_exception", None)
        if isinstance(problem, _OF_FILES) or isinstance(inner, _OF_FILES):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


@contextmanager
def _keys_of_all_programs() -> Iterator[None]:
    """Within this context, Inductor's cache keys do not depend on the program that compiles.

    A memory format is pickled into a key under the name of the first module that has imported
    torch: that of the user's own package, for example. A worker would look for another key.
    """
    kind = torch.memory_format
    before = copyreg.dispatch_table.get(kind)
    copyreg.pickle(kind, _by_name)
    try:
        yield
    finally:
        del copyreg.dispatch_table[kind]
        if before is not None:
            copyreg.dispatch_table[kind] = before


def _products_padded_by_rule() -> AbstractContextManager[None]:
    """Within this context, Inductor decides by the shapes which products it pads.

    By itself it measures both ways, which takes time, needs the device, and can give another answer
    in another process: then the code that a worker has compiled would not be found.
    """
    from torch._inductor.fx_passes import pad_mm

    def decide(match: Any, first: torch.Tensor, second: torch.Tensor, *_: Any) -> bool:
        return pads(first, second) and not reads_memory(match.output_node().graph)

    return _replaced_if_there(pad_mm, "_should_pad", decide)


def _replaced_if_there(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Replace a private part of Inductor within a context; another version may not have it."""
    return replaced_attributes(owner, **({name: value} if hasattr(owner, name) else {}))


_INTENSITY = 100
"""A product that does fewer operations per number is bound by memory: padding it costs more."""
_BOUNDARY = 16
"""Matrix units are fast where every row of a matrix begins at a multiple of so many bytes."""


def pads(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if the product of these matrices is probably faster after padding."""
    (rows, inner), columns = first.shape[-2:], second.shape[-1]
    sizes = [_known(size) for size in (rows, inner, columns)]
    if 0 in sizes or 1 / sum(1 / size for size in sizes) < _INTENSITY:
        return False
    made = sizes[2] * first.element_size() % _BOUNDARY == 0
    return not (made and aligned(first) and aligned(second))


def aligned(matrix: torch.Tensor) -> bool:
    """True if every row of this matrix, or every column, begins at such a boundary."""
    step = _known(max(matrix.stride()[-2:], key=_known))
    return step * matrix.element_size() % _BOUNDARY == 0


def reads_memory(graph: torch.fx.Graph) -> bool:
    """True if an operation reads the memory behind a result by strides, as if it had no gaps.

    Inductor does so for an operation that changes a view of another shape. After padding, it would
    read other numbers.
    """
    views = graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    sources = [node.args[0] for node in views]
    changes = torch.ops.higher_order.auto_functionalized_v2
    for node in graph.find_nodes(op="call_function", target=changes):
        names = [name.removesuffix("_stride") for name in node.kwargs if name.endswith("_stride")]
        places = [node.kwargs.get(f"{name}_base_index") for name in names]
        bases: Any = node.kwargs["_all_bases"]
        sources += [bases[place] for place in places if isinstance(place, int)]
    return any(source.op != "placeholder" for source in sources)


def _known(size: int | torch.SymInt) -> int:
    """Return a size, or the present value of an open one, without fixing it."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _by_name(one: torch.memory_format) -> tuple[Callable[[str], Any], tuple[str]]:
    return memory_format, (str(one).removeprefix("torch."),)


def memory_format(name: str) -> Any:
    """Return the memory format of this name."""
    return getattr(torch, name)


def _whole_rows(longest: int) -> AbstractContextManager[None]:
    """Raise Inductor's limit for persistent reductions from 1024 to `longest` within this context.

    Longer rows are read two or three times.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    name = "should_use_persistent_reduction"
    by_itself = getattr(InductorChoices, name, None)

    def decide(features: Any, cooperative_reduction: bool) -> bool:
        if by_itself is not None and by_itself(features, cooperative_reduction):
            return True
        if features.get_reduction_hint() != ReductionHint.INNER:
            return False
        return bool(V.graph.sizevars.statically_known_leq(features.reduction_numel, longest))

    return _replaced_if_there(InductorChoices, name, staticmethod(decide))


def _parts_written_in_place() -> AbstractContextManager[None]:
    """Let the kernel of each part of a concatenation write it where it belongs, in this context.

    Inductor would compute every part for every number of the result, and take the one that counts.
    On an H200 that took 66 µs for the gradients of queries, keys and values (4,096 rows of 768),
    where moving them takes 10. It still does so if the parts are in memory already, and if only
    pointwise operations read the result.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.utils import is_pointwise_use
    from torch._inductor.virtualized import V

    by_itself: Any = getattr(lowering, "pointwise_cat", None)

    def decide(inputs: Any, dim: int = 0) -> Any:
        copies = all(map(ir.is_storage_and_layout, inputs))
        if copies or all(is_pointwise_use(use, _may_be_inlined) for use in V.current_node.users):
            return by_itself(inputs, dim)
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim))

    return _replaced_if_there(lowering, "pointwise_cat", decide)


def _may_be_inlined(operation: Any) -> bool:
    return operation in (torch.ops.aten.cat.default, torch.ops.aten.constant_pad_nd.default)
