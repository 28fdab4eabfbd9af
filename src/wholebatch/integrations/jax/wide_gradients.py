"""Gradients of 16-bit parameters, before they are rounded to 16 bit.

JAX gives a gradient the dtype of its parameter. A product of 16-bit matrices is summed in float32
and then rounded: once for the undivided batch, but once per micro-batch here. Where the gradients
of micro-batches cancel, these rounding errors do not. `widened` evaluates the same function without
that last rounding. The products and sums that make a gradient, and the operations that only move
their elements, run in float32. Everything before them is computed as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import not_
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

# Names of JAX primitives. These sum in float32 internally, and can return it without rounding:
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# These compute the same in float32, given float32 inputs:
_LINEAR = frozenset(
    {"add", "add_any", "broadcast_in_dim", "concatenate", "copy", "expand_dims", "mul", "neg"}
    | {"pad", "reduce_sum", "reshape", "rev", "slice", "split", "squeeze", "stack", "sub"}
    | {"transpose", "unstack"}
)
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})

Wanted: TypeAlias = Sequence[bool]


def is_narrow(dtype: Any) -> bool:
    """True if sums of this dtype are kept in a wider one."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < 4


def wide(dtype: Any) -> Any:
    """Return the dtype in which sums of this dtype are kept."""
    return jnp.promote_types(dtype, jnp.float32)


def mesh_axes(aval: Any) -> frozenset[str]:
    """Return the mesh axes a value varies over in `shard_map`; the attribute differs by version."""
    manual = getattr(aval, "manual_axis_type", None)
    found = getattr(aval, "vma", None) if manual is None else manual.varying
    return frozenset(found or ())


def widened(function: Callable[..., Any], marks: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the function with those outputs in float32 that `marks(outputs)` has as True."""

    def call(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        wanted = [
            asked and is_narrow(leaf.dtype)
            for asked, leaf in zip(
                jax.tree.leaves(marks(shapes)), jax.tree.leaves(shapes), strict=True
            )
        ]
        made = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), wanted)
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    return call


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], wanted: Wanted) -> list[Any]:
    """Return the outputs of a jaxpr; the wanted ones are not rounded where possible."""
    narrow: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    )
    unrounded: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else narrow[atom]

    def read_wide(atom: Any) -> Any:
        if not isinstance(atom, Literal) and atom in unrounded:
            return unrounded[atom]
        value = jnp.asarray(read(atom))
        return value.astype(jnp.float32) if is_narrow(value.dtype) else value

    for equation, is_wide in zip(jaxpr.eqns, _plan(jaxpr, wanted), strict=True):
        if is_wide is None:  # Nothing needs it.
            continue
        if any(is_wide):
            operands = [(read_wide if _takes_wide(equation) else read)(v) for v in equation.invars]
            made = _bind_wide(equation, operands, is_wide)
        else:
            made = _bind(equation, [read(atom) for atom in equation.invars])
        for var, value, stays in zip(equation.outvars, made, is_wide, strict=True):
            (unrounded if stays else narrow)[var] = value
    return [
        (read_wide if asked else read)(atom)
        for atom, asked in zip(jaxpr.outvars, wanted, strict=True)
    ]


def _plan(jaxpr: Any, wanted: Wanted) -> list[list[bool] | None]:
    """Return for each equation which of its outputs to leave wide; None if none is needed.

    Equations are visited from last to first, so that all uses of an output are known. An output
    that is needed rounded too is not computed twice: the rounded one serves for both.
    """
    asked: dict[bool, set[Any]] = {True: set(), False: set()}  # wide or not

    def ask(atoms: Sequence[Any], is_wide: bool) -> None:
        asked[is_wide].update(atom for atom in atoms if not isinstance(atom, Literal))

    for atom, is_wide in zip(jaxpr.outvars, wanted, strict=True):
        ask([atom], is_wide)
    plan: list[list[bool] | None] = []
    for equation in reversed(jaxpr.eqns):
        as_wide = [var in asked[True] for var in equation.outvars]
        rounded = [var in asked[False] for var in equation.outvars]
        if not equation.effects and not any((*as_wide, *rounded)):
            plan.append(None)
            continue
        can = _can_widen(equation)
        if equation.primitive.name in _LINEAR and any(rounded):
            can = [False] * len(can)  # One call gives all its outputs the same dtype.
        mark = [all(one) for one in zip(can, as_wide, map(not_, rounded), strict=True)]
        plan.append(mark)
        ask(equation.invars, any(mark) and _takes_wide(equation))
    return plan[::-1]


def _takes_wide(equation: Any) -> bool:
    """True if this equation, computed in float32, also needs its operands in float32."""
    name = equation.primitive.name
    return name in _LINEAR or name == "convert_element_type"


def _can_widen(equation: Any) -> list[bool]:
    """Return for each output of an equation whether it can be computed in float32."""
    name = equation.primitive.name
    narrow = [is_narrow(getattr(var.aval, "dtype", int)) for var in equation.outvars]
    if name in _PRODUCTS:  # Only for 16-bit inputs, not for float8 and similar.
        return [narrow[0] and all(var.aval.dtype.itemsize == 2 for var in equation.invars)]
    if name in _LINEAR or name in _CALLS or name in _CHECKPOINTS:
        return narrow
    if name == "convert_element_type":
        return [narrow[0] and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)]
    if name == "scan":  # Only stacked outputs: each iteration rounds a carry to its own dtype.
        carried = equation.params["num_carry"]
        sharded = any(mesh_axes(var.aval) for var in equation.invars)
        return [i >= carried and is_so and not sharded for i, is_so in enumerate(narrow)]
    return [False] * len(narrow)


def _bind(equation: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    parameters = equation.primitive.get_bind_params({**equation.params, **changed})
    functions: Sequence[Any] = ()
    if isinstance(parameters, tuple):  # Returned by older versions of JAX.
        functions, parameters = parameters
    with equation.ctx.manager:
        made = equation.primitive.bind(*functions, *operands, **parameters)
    return list(made) if equation.primitive.multiple_results else [made]


def _bind_wide(equation: Any, operands: Sequence[Any], is_wide: Wanted) -> list[Any]:
    name = equation.primitive.name
    if name in _PRODUCTS:
        return [_product(equation, operands)]
    if name == "convert_element_type":
        return [operands[0].astype(jnp.float32)]
    if name in _CALLS:
        inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
        return _evaluate(inner.jaxpr, inner.consts, operands, is_wide)
    if name in _CHECKPOINTS:  # Keep the checkpoint: its barriers save the memory.
        body = equation.params["jaxpr"]
        made = jax.make_jaxpr(lambda *args: _evaluate(body, (), args, is_wide))(*operands)
        inputs = [*made.jaxpr.constvars, *made.jaxpr.invars]
        body = made.jaxpr.replace(constvars=[], invars=inputs)
        return _bind(equation, [*made.consts, *operands], jaxpr=body)
    if name == "scan":
        turn = equation.params["jaxpr"]
        made = jax.make_jaxpr(lambda *args: _evaluate(turn.jaxpr, turn.consts, args, is_wide))(
            *(
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
                for aval in turn.in_avals
            )
        )
        return _bind(equation, operands, jaxpr=made)
    return _bind(equation, operands)


def _product(equation: Any, operands: Sequence[Any]) -> Any:
    """Return a product of 16-bit arrays in float32, in which it is summed."""
    wanted = jnp.dtype(jnp.float32)

    def mixed(*values: Any) -> Any:
        return _bind(equation, values, preferred_element_type=wanted)[0]

    def cast(*values: Any) -> Any:  # XLA has no mixed product on the CPU, and would cast too.
        return mixed(*(value.astype(wanted) for value in values))

    return jax.lax.platform_dependent(*operands, cpu=cast, default=mixed)
