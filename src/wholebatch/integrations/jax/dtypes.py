"""Dtypes of sums, and the mesh axes of a value."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def is_16_bit(dtype: Any) -> bool:
    """True if sums of this floating dtype are kept in float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < 4


def sum_dtype(dtype: Any) -> Any:
    """Return the dtype in which sums of this dtype are kept: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def mesh_axes(aval: Any) -> frozenset[str]:
    """Return the mesh axes a value varies over in `shard_map`; the attribute differs by version."""
    manual = getattr(aval, "manual_axis_type", None)
    found = getattr(aval, "vma", None) if manual is None else manual.varying
    return frozenset(found or ())
