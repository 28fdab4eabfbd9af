"""`accumulate`: the value and gradient of the whole batch, computed in micro-batches.

It does the same as this loop:

```
total, units, gradient = 0, 0, 0
for micro in batch:              # a lax.scan, and a smaller last one if it does not divide
    total += loss_sum(micro);  units += its units;  gradient += d loss_sum(micro)     # in fp32
value, gradient = total / units, gradient / units
```

Micro-batch i takes rows i, i + n, i + 2n, ... of the batch (n micro-batches). The sum is the same.
If the batch is sharded over devices by rows, every micro-batch is sharded the same way, and no row
moves between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from wholebatch.errors import LossError, OptionError, SplitError

Units: TypeAlias = Literal["samples"] | Callable[..., Any]
Aux: TypeAlias = Literal["stack", "concat", "sum"]
ValueAndGrad: TypeAlias = Callable[..., tuple[Any, Any]]


def accumulate(
    loss_fn: Callable[..., Any],
    *,
    micro_batch: int,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    units: Units | None = None,
    aux: Aux = "stack",
    axis_name: str | Sequence[str] | None = None,
) -> ValueAndGrad:
    """Return `jax.value_and_grad(loss_fn)` of the whole batch, in the memory of a micro-batch.

    >>> import jax.numpy as jnp
    >>> from wholebatch.integrations.jax import accumulate
    >>> def loss(w, batch):
    ...     return jnp.sum(batch["weight"] * (w * batch["x"] - 1) ** 2), jnp.sum(batch["weight"])
    >>> batch = {"x": jnp.arange(5.0), "weight": jnp.array([1.0, 0.0, 1.0, 1.0, 0.0])}
    >>> value, gradient = accumulate(loss, micro_batch=2)(2.0, batch)
    >>> round(float(value), 4), round(float(gradient), 4)
    (11.6667, 14.0)

    `loss_fn` returns a sum and the units it is a sum over. With `units=` it returns a mean over
    them: `"samples"`, or a function of the batch arguments that counts them. With `has_aux` it
    returns `(that, aux)`. The aux of all micro-batches are stacked (`aux="stack"`), concatenated in
    the order of the batch's rows (`"concat"`: as the undivided batch gives for predictions), or
    added (`"sum"`: as it gives for counts).

    All leaves of the arguments at `batch_argnums` are split by their first axis; the others are
    passed on whole. Gradients of 16-bit parameters, which JAX rounds to 16 bits in every
    micro-batch, are added in float32. The result may be jitted, and its batch sharded over devices.
    Inside `shard_map`, `axis_name` makes it the gradient of all shards, reduced once. A batch
    without any units gives nan, like its mean. A loss that is not finite gives a gradient that is
    not, as `jax.value_and_grad` does: guard the update, for example with `optax.apply_if_finite`.

    Nothing tests that the loss adds up. A loss that compares samples, and units that depend on the
    parameters, give another gradient than the whole batch.
    """
    return _Accumulation(
        loss_fn, micro_batch, argnums, has_aux, batch_argnums, units, aux, axis_name
    ).value_and_grad


@dataclass(eq=False)
class _Accumulation:
    """The options of one `accumulate`, and the function that it returns."""

    loss_fn: Callable[..., Any]
    micro_batch: int
    argnums: int | Sequence[int]
    has_aux: bool
    batch_argnums: int | Sequence[int]
    units: Units | None
    aux: Aux
    axis_name: str | Sequence[str] | None

    def __post_init__(self) -> None:
        micro_batch, units = self.micro_batch, self.units
        if not isinstance(micro_batch, int) or isinstance(micro_batch, bool) or micro_batch < 1:
            raise OptionError(f"micro_batch={micro_batch!r}: must be a positive number of samples")
        if self.aux not in ("stack", "concat", "sum"):
            raise OptionError(f'aux={self.aux!r}: must be "stack", "concat" or "sum"')
        if units is not None and units != "samples" and not callable(units):
            raise OptionError(f'units={units!r}: must be "samples" or a function of the batch')
        self.wanted, self.batched = _as_tuple(self.argnums), _as_tuple(self.batch_argnums)
        if both := set(self.wanted) & set(self.batched):
            raise OptionError(
                f"argnums={self.argnums!r} and batch_argnums={self.batch_argnums!r} share "
                f"{sorted(both)}: an argument is either split or differentiated"
            )

    def value_and_grad(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the value and gradient of the whole batch, as `jax.value_and_grad` does."""
        size, wanted = _batch_size(args, self.batched), self.wanted
        loss_fn = partial(self.loss_fn, **kwargs)
        # 16-bit gradients of a sum may overflow. A power of two is exact, and is divided out.
        seed = 2.0 ** -(size.bit_length() - 1)
        if self.axis_name is not None:  # Otherwise every micro-batch would all-reduce.
            args = tuple(
                _varying(value, self.axis_name) if i in wanted else value
                for i, value in enumerate(args)
            )
        sums, extras = self._sums(partial(self._micro_step, loss_fn, seed), args, size)
        if self.axis_name is not None:
            sums = jax.lax.psum(sums, self.axis_name)
        total, counted, gradient = sums
        factor = 1.0 / (counted * seed)
        single = isinstance(self.argnums, int)
        originals = args[wanted[0]] if single else tuple(args[i] for i in wanted)
        gradient = jax.tree.map(
            lambda leaf, like: (leaf * factor.astype(leaf.dtype)).astype(jnp.result_type(like)),
            gradient,
            originals,
        )
        value = total / counted
        return ((value, _join(extras, self.aux)), gradient) if self.has_aux else (value, gradient)

    def _sums(
        self, micro_step: Callable[[Sequence[Any]], Any], args: Sequence[Any], size: int
    ) -> tuple[Any, list[Any]]:
        """Return the sums over all micro-batches, and their aux."""
        main, rest = _split(args, self.batched, size, self.micro_batch)
        extras: list[Any] = []
        sums: Any = None
        if main is not None:

            def body(carry: Any, micro: list[Any]) -> tuple[Any, Any]:
                added, extra = micro_step(_with_values(args, self.batched, micro))
                return jax.tree.map(jnp.add, carry, added), extra

            first = _with_values(args, self.batched, jax.tree.map(lambda leaf: leaf[0], main))
            zeros = _zeros_like(jax.eval_shape(lambda: micro_step(first)[0]))
            sums, extra = jax.lax.scan(body, zeros, main)
            extras.append(extra)
        if rest is not None:
            added, extra = micro_step(_with_values(args, self.batched, rest))
            sums = added if sums is None else jax.tree.map(jnp.add, sums, added)
            extras.append(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], extra))
        return sums, extras

    def _micro_step(
        self, loss_fn: Callable[..., Any], seed: float, call: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Return total, units and gradient of a micro-batch in float32 or wider, and its aux."""
        (_, (total, counted, weight, extra)), gradient = self._differentiated(loss_fn, seed, call)
        if weight is not None:
            gradient = jax.tree.map(
                lambda leaf: leaf * weight.astype(_sum_dtype(leaf.dtype)), gradient
            )
        sums = (_scalar(total), _scalar(counted, like=total), gradient)
        if self.units is not None:  # The mean over no units is 0/0, and so is its gradient.
            sums = jax.tree.map(lambda leaf: jnp.where(counted == 0, 0, leaf), sums)
        return jax.tree.map(lambda leaf: leaf.astype(_sum_dtype(leaf.dtype)), sums), extra

    def _differentiated(
        self, loss_fn: Callable[..., Any], seed: float, call: Sequence[Any]
    ) -> tuple[Any, Any]:
        def seeded(*call: Any) -> tuple[Any, Any]:
            loss, total, counted, extra = self._read(loss_fn, call)
            if self.units is not None and jnp.dtype(loss.dtype).itemsize < 4:
                # 16 bit would round the units, so weight the gradient of the mean instead.
                return loss, (total, counted, counted * jnp.float32(seed), extra)
            return total * jnp.asarray(seed, total.dtype), (total, counted, None, extra)

        return jax.value_and_grad(seeded, argnums=self.argnums, has_aux=True)(*call)

    def _read(self, loss_fn: Callable[..., Any], call: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Return the loss of a call, as a sum too, its units and its aux."""
        returned, extra, units = loss_fn(*call), (), self.units
        if self.has_aux:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise LossError(
                    f"has_aux=True: loss_fn must return (loss, aux), not {_shape(returned)}"
                )
            returned, extra = returned
        if units is None:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise LossError(
                    f"loss_fn returned {_shape(returned)}, which may be a sum or a mean: return "
                    "(sum, units), or pass units= for a mean"
                )
            loss, counted = map(jnp.asarray, returned)
        else:
            batch = [call[i] for i in self.batched]
            samples = jax.tree.leaves(batch)[0].shape[0]
            loss = jnp.asarray(returned)
            counted = jnp.asarray(samples if units == "samples" else units(*batch))
        for name, value in (("loss", loss), ("number of units", counted)):
            if value.shape:
                raise LossError(f"the {name} has shape {value.shape}: it must be a single number")
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise LossError(f"the loss is of {loss.dtype}: it must be floating point")
        total = loss if units is None else _scalar(loss) * _scalar(counted, like=loss)
        return loss, total, counted, extra


def _as_tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    places = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if not places or any(not isinstance(number, int) or number < 0 for number in places):
        raise OptionError(f"{numbers!r}: must be the position of an argument, 0 or more, or some")
    return places


def _batch_size(args: Sequence[Any], batched: Sequence[int]) -> int:
    sizes: dict[int, str] = {}
    for number in batched:
        if number >= len(args):
            raise SplitError(
                f"batch_argnums names argument {number}, and {len(args)} were given: the batch is "
                "a positional argument"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[number]):
            shape = jnp.shape(leaf)
            name = f"argument {number}{jax.tree_util.keystr(path)}"
            if not shape:
                raise SplitError(
                    f"{name} has no first axis to split: pass what is not part of the batch in a "
                    "separate argument, or repeat it for every sample"
                )
            sizes.setdefault(shape[0], name)
    if len(sizes) != 1:
        listed = ", ".join(f"{name} has {size}" for size, name in sizes.items()) or "no arrays"
        raise SplitError(
            f"the leaves of the batch must have one number of samples: {listed}; "
            "batch_argnums= names the arguments that are split"
        )
    size = next(iter(sizes))
    if size == 0:
        raise SplitError("the batch has no samples")
    return size


def _split(
    args: Sequence[Any], batched: Sequence[int], size: int, micro_batch: int
) -> tuple[list[Any] | None, list[Any] | None]:
    """Return the stacked micro-batches and the single last one; either may be None."""
    batch = jax.tree.map(jnp.asarray, [args[number] for number in batched])
    many, left = divmod(size, micro_batch)
    if many <= 1 and not left:
        return None, batch
    stop = many * micro_batch

    def stacked(leaf: Any) -> Any:
        rows = leaf if stop == size else leaf[:stop]
        return rows.reshape(micro_batch, many, *rows.shape[1:]).swapaxes(0, 1)

    main = jax.tree.map(stacked, batch) if many else None
    rest = jax.tree.map(lambda leaf: leaf[stop:], batch) if left else None
    return main, rest


def _with_values(args: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return the arguments with these values at the places of these numbers."""
    call = list(args)
    for number, value in zip(numbers, values, strict=True):
        call[number] = value
    return call


def _shape(value: Any) -> str:
    return f"a {type(value).__name__}"


def _sum_dtype(dtype: Any) -> Any:
    """Return the dtype in which sums of this dtype are kept: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def _scalar(value: Any, like: Any = None) -> Any:
    value = jnp.asarray(value)
    return value.astype(_sum_dtype(value.dtype if like is None else like.dtype))


def _mesh_axes(aval: Any) -> frozenset[str]:
    """Return the mesh axes a value varies over in `shard_map`; the attribute differs by version."""
    manual = getattr(aval, "manual_axis_type", None)
    axes = getattr(aval, "vma", None) if manual is None else manual.varying
    return frozenset(axes or ())


def _cast(leaf: Any, names: frozenset[str]) -> Any:
    if not names:
        return leaf
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(leaf, tuple(names), to="varying")
    pvary: Callable[..., Any] = vars(jax.lax)["pvary"]  # The name in older versions of JAX.
    return pvary(leaf, tuple(names))


def _varying(tree: Any, axis_name: str | Sequence[str]) -> Any:
    """Mark values as varying between shards, so that their gradients stay local."""
    names = frozenset({axis_name} if isinstance(axis_name, str) else axis_name)
    return jax.tree.map(lambda leaf: _cast(leaf, names - _mesh_axes(jax.typeof(leaf))), tree)


def _zeros_like(shapes: Any) -> Any:
    """Return zeros that vary over the same mesh axes: a scan's carry must keep its type."""
    return jax.tree.map(
        lambda like: _cast(jnp.zeros(like.shape, like.dtype), _mesh_axes(like)), shapes
    )


def _join(extras: list[Any], how: Aux) -> Any:
    """Join the aux of the stacked micro-batches and of the last one."""

    def join(*leaves: Any) -> Any:
        if how == "sum":
            return sum(leaf.sum(axis=0, dtype=leaf.dtype) for leaf in leaves)
        if how == "concat":
            if any(leaf.ndim < 2 for leaf in leaves):
                raise LossError('aux="concat": every aux must have the samples as its first axis')
            rows = [leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[2:]) for leaf in leaves]
            return jnp.concatenate(rows)
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise LossError(
                'aux="stack": the last micro-batch is smaller and its aux has another shape '
                f"({', '.join(str(leaf.shape[1:]) for leaf in leaves)}): use "
                'aux="concat", or a micro_batch that divides the batch'
            )
        return jnp.concatenate(leaves)

    return jax.tree.map(join, *extras)
