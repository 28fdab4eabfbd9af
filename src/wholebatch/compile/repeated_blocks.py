"""The joint graph in pieces: equal pieces are compiled once.

Layers repeat, and so do the operations of their forward and backward. One piece of each kind is
compiled, and called for every layer with that layer's tensors:

1. `find_pieces` looks for the period of the operations and cuts where no fused kernel is lost.
2. `_Cutter` writes each piece down as a program of its own: operations and inputs. Views, and
   cheap operations whose inputs are smaller than their results, are computed again where they are
   needed instead of being stored, as a compiler of the whole graph would do. So are cheap results
   that a product reads in the forward and in the backward, if that saves much memory.
3. Two pieces are alike only if these programs are equal: every operation, constant, connection,
   and the shape, strides, dtype and device of every input. They run in the order of the graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from wholebatch.compile.fake_results import fill, kind_of, like
from wholebatch.compile.fusion import (
    OURS,
    base_of,
    fixed,
    hint_of,
    is_cheap,
    is_external,
    is_view,
    readers_of,
    written_by,
)

Compile: TypeAlias = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

_WORTH = 0.7
"""Blocks pay if at most this share of the operations is left to compile."""
_SHORTEST = 12
"""The fewest operations of a block."""
_LEAST = 0.05
"""The least share of the operations that another kind of block must save."""
_WINDOW = 8
"""The number of operations in a row by which a repetition is recognised."""
_CANDIDATES = 8
"""The number of likely periods that are examined."""
_MUCH = 1 / 16
"""The share of the graph's inputs that must be saved if the backward is to compute results again.

That takes 2% of the time of a Llama. With small micro-batches it would save little.
"""
_HOMES = 3
"""A result that more parts need is stored: for example what depends on the positions only."""


@dataclass
class Piece:
    """A part of the graph as a program of its own."""

    nodes: list[fx.Node] = field(default_factory=list)
    """Its operations, in order."""
    inputs: list[fx.Node] = field(default_factory=list)
    own: set[fx.Node] = field(default_factory=set)
    """The nodes that no other piece computes first."""

    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for pieces that may share their compiled code."""
        names = {node: f"%{number}" for number, node in enumerate((*self.inputs, *self.nodes))}

        def named(part: Any) -> Any:
            return names[part] if isinstance(part, fx.Node) else part

        return (
            tuple(kind_of(node.meta["val"]) for node in self.inputs),
            tuple(
                (node.target, fixed(map_aggregate((node.args, node.kwargs), named)))
                for node in self.nodes
            ),
        )

    def module(self, outputs: Sequence[int]) -> fx.GraphModule:
        """Return it as a graph that returns the results of these operations."""
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(self.inputs)}
        for node in self.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            target: Any = node.target
            copies[node] = graph.call_function(target, args, kwargs)
        graph.output(tuple(copies[self.nodes[number]] for number in outputs))
        return fx.GraphModule({}, graph)

    def examples(self) -> list[Any]:
        """Return inputs like those that it is for; they are fake within a fake tensor mode."""
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            if isinstance(value, Tensor)
            else value
            for value in (node.meta["val"] for node in self.inputs)
        ]

    @property
    def is_safe(self) -> bool:
        """True if no operation is of the user, whose kernel may not accept zeros."""
        targets = [node.target for node in self.nodes if node.target is not operator.getitem]
        return all(getattr(target, "namespace", "") in OURS for target in targets)

    def try_out(self, run: Callable[[list[Any]], Any]) -> None:
        """Run its compiled code on zeros, if there is memory for them."""
        with suppress(torch.OutOfMemoryError), torch.no_grad():
            examples = self.examples()
            for example in examples:
                if isinstance(example, Tensor):
                    held = example.untyped_storage().nbytes() // example.element_size()
                    example.as_strided((held,), (1,)).zero_()  # Expanded tensors, too.
            run(examples)


@dataclass(frozen=True)
class Call:
    """One call of a compiled piece; values are known by the nodes of the graph."""

    run: Callable[[list[Any]], Any]
    """It empties the list of its inputs, so that each is freed after its last use."""
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node | None]
    """None for a result that nothing reads."""
    freed: Sequence[fx.Node]
    """The inputs that nothing reads afterwards."""


@dataclass(frozen=True)
class BlockProgram:
    """A graph as calls of compiled pieces: the same signature as the graph itself."""

    inputs: Sequence[fx.Node]
    constants: Sequence[Tensor]
    """The values of the last inputs."""
    calls: Sequence[Call]
    results: Sequence[fx.Node]

    def __call__(self, *arguments: Any) -> list[Any]:
        values: dict[fx.Node | None, Any] = {}
        values.update(zip(self.inputs, (*arguments, *self.constants), strict=True))
        for call in self.calls:
            inputs = [values[node] for node in call.inputs]
            for node in call.freed:
                del values[node]
            results = call.run(inputs)
            values.update(zip(call.outputs, results, strict=True))
            values.pop(None, None)
            del results, inputs
        return [values[node] for node in self.results]


class Blocks:
    """A graph cut into pieces, to be compiled for arguments like these.

    All attributes that the graph refers to must be tensors.
    Without `repeats`, or if the graph does not repeat enough, it is one piece.
    """

    def __init__(
        self, module: fx.GraphModule, arguments: Sequence[Any], *, repeats: bool = True
    ) -> None:
        graph = module.graph
        constants = graph.find_nodes(op="get_attr")
        self._constants = [_attribute(module, node) for node in constants]
        self._inputs = [*graph.find_nodes(op="placeholder"), *constants]
        values = dict(zip(self._inputs, (*arguments, *self._constants), strict=True))
        self._mode = fill_values(graph, values)
        self._results: Any = graph.output_node().args[0]
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        sizes = list(filter(_is_size, self._inputs))
        self._cut(nodes, find_pieces(nodes) if repeats else [Part(0, len(nodes))], sizes)
        if self.operations > _WORTH * len(nodes):
            self._cut(nodes, [Part(0, len(nodes))], sizes)

    def _cut(
        self, nodes: Sequence[fx.Node], parts: Sequence[Part], sizes: Sequence[fx.Node]
    ) -> None:
        cutter = _Cutter(nodes, parts, sizes)
        self._pieces = cutter.pieces()
        if cutter.saved < _MUCH * sum(_size(node.meta["val"]) for node in self._inputs):
            self._pieces = _Cutter(nodes, parts, sizes, saves=False).pieces()
        self._keys = [piece.key() for piece in self._pieces]
        self._kinds: dict[Any, Piece] = {}
        """One piece of each kind."""
        for key, piece in zip(self._keys, self._pieces, strict=True):
            self._kinds.setdefault(key, piece)

    @property
    def operations(self) -> int:
        """The number of operations to compile."""
        return sum(len(piece.nodes) for piece in self._kinds.values())

    def compiled(self, compile_piece: Compile, *, tunes: bool) -> BlockProgram:
        """Compile one piece of each kind, and write the graph as calls of these.

        A kernel is tuned when it first runs. With `tunes`, each piece runs once here, on zeros.
        """
        outputs = _outputs(self._pieces, self._keys, self._results)
        runs: dict[Any, Callable[[list[Any]], Any]] = {}
        for key, piece in self._kinds.items():
            with self._mode:
                examples = piece.examples()
            runs[key] = _taking_a_list(compile_piece(piece.module(outputs[key]), examples))
            if tunes and piece.is_safe:
                piece.try_out(runs[key])
        kept = {*self._inputs, *self._results}
        calls = []
        for piece, key in zip(reversed(self._pieces), reversed(self._keys), strict=True):
            results = [piece.nodes[number] for number in outputs[key]]
            written = [node if node in piece.own and node in kept else None for node in results]
            freed = [node for node in piece.inputs if node not in kept]
            kept.update(freed)
            calls.append(Call(runs[key], piece.inputs, written, freed))
        return BlockProgram(self._inputs, self._constants, calls[::-1], self._results)


def _is_size(node: fx.Node) -> bool:
    """True if its value is a symbolic size, or computed from such."""
    return isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat, torch.SymBool))


def _taking_a_list(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return the function that takes its arguments as a list and empties it, if there is one.

    Inductor's code frees each input after its last use. The function that torch wraps around it
    holds all of them until it returns.
    """
    plain = getattr(run, "_torchdynamo_orig_callable", run)
    inner: Callable[[list[Any]], Any] | None = getattr(plain, "__wrapped__", None)
    if inner is not None and getattr(inner, "_boxed_call", False):
        kinds = [
            parameter.kind
            for parameter in signature(inner, follow_wrapped=False).parameters.values()
        ]
        if kinds == [Parameter.POSITIONAL_OR_KEYWORD]:
            return inner
    return lambda arguments: run(*arguments)


def calls_other_graphs(module: fx.GraphModule) -> bool:
    """True if an attribute that the graph refers to is not a tensor."""
    nodes = module.graph.find_nodes(op="get_attr")
    return not all(isinstance(_attribute(module, node), Tensor) for node in nodes)


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


def _outputs(
    pieces: Sequence[Piece], keys: Sequence[Any], results: Iterable[fx.Node]
) -> dict[Any, list[int]]:
    """Return for each kind of piece the operations whose results some other piece needs."""
    needed = {node for piece in pieces for node in piece.inputs} | set(results)
    outputs: dict[Any, set[int]] = {key: set() for key in keys}
    for piece, key in zip(pieces, keys, strict=True):
        read = needed & piece.own
        outputs[key].update(number for number, node in enumerate(piece.nodes) if node in read)
    return {key: sorted(numbers) for key, numbers in outputs.items()}


def fill_values(graph: fx.Graph, arguments: dict[fx.Node, Tensor]) -> Any:
    """Give a fake value to every node that has none; return their mode."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fakes = (
        argument.fake_mode for argument in arguments.values() if isinstance(argument, FakeTensor)
    )
    mode = next(fakes, None) or FakeTensorMode(shape_env=ShapeEnv())
    for node in graph.nodes:
        if node in arguments:
            node.meta["val"] = like(mode, arguments[node])
        elif node.op == "call_function" and "val" not in node.meta:
            fill(mode, node)
    return mode


def _size(value: Any) -> int:
    """Return the bytes of a tensor, not counting dimensions that are expanded."""
    if not isinstance(value, Tensor):
        return 0
    numbers = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        numbers *= hint_of(size) if hint_of(stride) else 1
    return numbers * value.element_size()


# ---------------------------------------------------------------------------------- find the pieces


@dataclass(frozen=True, order=True)
class Part:
    """A range of the nodes of a graph."""

    start: int
    end: int


def find_pieces(nodes: Sequence[fx.Node]) -> list[Part]:
    """Return the pieces, in order and without gaps."""
    labels = _labels(nodes)
    place = {node: number for number, node in enumerate(nodes)}
    bonds = _bonds(nodes, place)
    taken: list[Part] = []
    while True:
        free = _gaps(taken, len(nodes))
        runs = [_best_run(labels, part.start, part.end) for part in free]
        best = max(runs, key=lambda run: run.saved, default=None)
        if best is None or best.saved < max(_SHORTEST, _LEAST * len(nodes)):
            break
        cut = _best_cut(nodes, place, best, bonds)
        if cut is None:
            break
        pattern = labels[cut : cut + best.period]
        parts = [
            Part(at, at + best.period)
            for part in free
            for at in _occurrences(labels, pattern, part.start, part.end)
            if at not in bonds and at + best.period not in bonds
        ]
        if len(parts) < 2:
            break
        taken = sorted(taken + parts)
    return sorted(taken + _gaps(taken, len(nodes)))


def _labels(nodes: Sequence[fx.Node]) -> list[int]:
    """Return a number for each node that is equal for operations of one kind."""
    known: dict[Any, int] = {}
    labels = []
    for node in nodes:
        arguments = map_aggregate(
            (node.args, node.kwargs),
            lambda part: f"<{part.op}>" if isinstance(part, fx.Node) else part,
        )
        label = (node.target, fixed(arguments), kind_of(node.meta["val"]))
        labels.append(known.setdefault(label, len(known)))
    return labels


def _gaps(taken: Sequence[Part], length: int) -> list[Part]:
    """Return the ranges between those that are taken."""
    edges = [0, *(edge for part in taken for edge in (part.start, part.end)), length]
    return [Part(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


@dataclass(frozen=True)
class _Run:
    """A range in which every operation is of the kind of that one period before."""

    start: int
    end: int
    period: int

    @property
    def saved(self) -> int:
        """The operations that need not be compiled."""
        return ((self.end - self.start) // self.period - 1) * self.period if self.period else 0


def _best_run(labels: Sequence[int], start: int, end: int) -> _Run:
    """Return the run that saves the most in this range."""
    latest: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    for at in range(start, end - _WINDOW + 1):
        window = tuple(labels[at : at + _WINDOW])
        if window in latest:
            distances[at - latest[window]] += 1
        latest[window] = at
    best = _Run(start, start, 0)
    for period, _ in distances.most_common(_CANDIDATES):
        if period < _SHORTEST:
            continue
        began = start
        for at in range(start, end - period + 1):
            if at == end - period or labels[at] != labels[at + period]:
                if at - began >= period:  # It saves something.
                    run = _Run(began, at + period, period)
                    best = max(
                        best, run, key=lambda candidate: (candidate.saved, -candidate.period)
                    )
                began = at + 1
    return best


def _occurrences(
    labels: Sequence[int], pattern: Sequence[int], start: int, end: int
) -> Iterator[int]:
    at = start
    while at + len(pattern) <= end:
        if labels[at] == pattern[0] and labels[at : at + len(pattern)] == pattern:
            yield at
            at += len(pattern)
        else:
            at += 1


def _bonds(nodes: Sequence[fx.Node], place: dict[fx.Node, int]) -> set[int]:
    """Return the places at which no cut is allowed.

    A tuple must not cross a cut, nor a tensor that the graph computes and will still write into.
    """
    last: dict[fx.Node, int] = {}
    for node in nodes:
        if node.target is operator.getitem:
            last[node.all_input_nodes[0]] = place[node]
        for target in written_by(node):
            last[base_of(target)] = place[node]
    return {
        cut
        for source, end in last.items()
        if source in place
        for cut in range(place[source] + 1, end + 1)
    }


def _best_cut(
    nodes: Sequence[fx.Node], place: dict[fx.Node, int], run: _Run, bonds: set[int]
) -> int | None:
    """Return where to cut so that the least is lost; None if a cut is nowhere allowed.

    A compiler fuses the operations between two kernels of libraries. A tensor that such a kernel
    makes is stored in any case, and so is one that was made before it. Only those made since the
    last such kernel would not have been.
    """
    period = run.period
    blocks = (run.end - run.start) // period
    middle = run.start + max(1, blocks // 2) * period
    uses = {
        at: [place[user] for user in readers_of(nodes[at])]
        for at in range(middle - period, min(middle + period, len(nodes)))
        if not is_view(nodes[at])
    }
    best: tuple[int, int, int] | None = None
    for at in range(middle, middle + period):
        offset = run.start + (at - run.start) % period
        if at in bonds or offset in bonds:
            continue
        crossing = [
            position
            for position in range(at - period, at)
            if position in uses and any(at <= user < at + period for user in uses[position])
        ]
        last = next(
            (
                position
                for position in range(at - 1, at - period, -1)
                if is_external(nodes[position])
            ),
            0,
        )
        since = [position for position in crossing if place[_tuple_of(nodes[position])] > last]
        lost = sum(_size(nodes[position].meta["val"]) for position in since)
        cost = (lost, sum(_size(nodes[position].meta["val"]) for position in crossing), offset)
        best = cost if best is None else min(best, cost)
    return None if best is None else best[2]


def _tuple_of(node: fx.Node) -> fx.Node:
    """Return the operation that makes a part of a tuple, and any other node itself."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


# --------------------------------------------------------------------------------- write them down


class _Cutter:
    """Writes the parts of a graph down as programs of their own."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        parts: Sequence[Part],
        sizes: Sequence[fx.Node],
        *,
        saves: bool = True,
    ) -> None:
        self._parts = parts
        self._sizes = sizes
        self._nodes = nodes
        self._home = {node: part for part in parts for node in nodes[part.start : part.end]}
        self._place = {node: place for place, node in enumerate(nodes)}
        written = [
            (base_of(target), at) for at, node in enumerate(nodes) for target in written_by(node)
        ]
        self._written = {node for node, _ in written}
        self._backward = len(nodes)  # where it begins: with the first addition into a buffer
        if saves:
            self._backward = min(
                (at for target, at in written if target not in self._home), default=0
            )
        self._stored: dict[fx.Node, bool] = {}
        self.saved = 0
        """The bytes that are not stored because the backward computes them again."""

    def pieces(self) -> list[Piece]:
        """Return all of them, in order."""
        return [self._piece(part) for part in self._parts]

    def _piece(self, part: Part) -> Piece:
        own = self._nodes[part.start : part.end]
        again = self._computed_again(part, own)
        # Every symbol in the shape of an input must be an input.
        piece = Piece(inputs=[*self._sizes], own=set(own))
        known = set(self._sizes)

        def write(node: fx.Node) -> None:
            known.add(node)
            for source in node.all_input_nodes:
                if source in known:
                    continue
                if source in again:
                    write(source)
                else:
                    known.add(source)
                    piece.inputs.append(source)
            piece.nodes.append(node)

        for node in own:
            write(node)
        return piece

    def _computed_again(self, part: Part, own: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the nodes of other parts that this part computes again instead of reading.

        These are views, and cheap operations if what they read takes no more memory.
        """
        again: set[fx.Node] = set()
        foreign = dict.fromkeys(
            _without_views(source, again)
            for node in own
            for source in node.all_input_nodes
            if self._home.get(source, part) is not part and not _is_size(source)
        )
        later = {node for node in foreign if self._is_for_backward(node, part)}
        read = {node for node in foreign if node not in later and not self._may_repeat(node)}
        for node in sorted(foreign.keys() - read, key=self._place.__getitem__):
            chain: set[fx.Node] = set()
            sources = self._sources(node, read, chain)
            new = [source for source in sources if source in self._home and source not in read]
            size, saves = _size(node.meta["val"]), node in later
            if saves:
                new = [source for source in new if max(self._homes(source)) < part.start]
            if sum(_size(source.meta["val"]) for source in new) <= (0 if saves else size):
                again |= chain
                read.update(new)
                self.saved += size * saves
            else:
                read.add(node)
        again -= read
        open_ = [*own, *again]
        while open_ and self._sizes:
            sizes = {
                size_node for size_node in open_.pop().all_input_nodes if _is_size(size_node)
            } - again
            again |= sizes
            open_ += sizes
        return again.difference(self._sizes)

    def _is_pure(self, node: fx.Node) -> bool:
        """True if it is cheap, and gives the same whenever it is computed."""
        if node not in self._home or not is_cheap(node):
            return False
        return not any(base_of(source) in self._written for source in node.all_input_nodes)

    def _may_repeat(self, node: fx.Node) -> bool:
        """True if a compiler of the whole graph would not have stored this result either."""
        return self._is_pure(node) and not self._is_stored(node)

    def _is_for_backward(self, node: fx.Node, part: Part) -> bool:
        """True if the forward stores this cheap result, and a part of the backward reads it.

        It computes the result again if its sources are stored in any case, for this part or later.
        """
        crosses = self._place.get(node, self._backward) < self._backward <= part.start
        few = crosses and len(self._homes(node)) <= _HOMES
        return few and self._is_pure(node) and self._is_stored(node)

    def _homes(self, node: fx.Node) -> set[int]:
        """Return where the parts begin that read it."""
        return {self._home[reader].start for reader in readers_of(node)}

    def _is_stored(self, node: fx.Node) -> bool:
        """True if a kernel of a library reads it, or all layers do."""
        if node not in self._stored:
            outside = any(map(is_external, readers_of(node)))
            self._stored[node] = outside or len(self._homes(node)) > _HOMES
        return self._stored[node]

    def _sources(
        self, node: fx.Node, read: set[fx.Node], chain: set[fx.Node]
    ) -> dict[fx.Node, None]:
        """Return what must be read to compute this node again; add its operations to the chain.

        Nodes in `read` are read in any case.
        """
        chain.add(node)
        reached: dict[fx.Node, None] = {}
        for argument in node.all_input_nodes:
            source = _without_views(argument, chain)
            if source in chain:
                continue  # Paths that meet again are followed once.
            near = self._home.get(source) is self._home[node] and source not in read
            if near and self._may_repeat(source):
                reached.update(self._sources(source, read, chain))
            else:
                reached[source] = None
        return reached


def _without_views(node: fx.Node, views: set[fx.Node]) -> fx.Node:
    """Return the node that this is a view of, and add the views to the set."""
    while node.op == "call_function" and is_view(node):
        views.add(node)
        node = node.all_input_nodes[0]
    return node
