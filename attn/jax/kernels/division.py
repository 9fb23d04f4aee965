"""Division that rounds as IEEE 754 requires, on every device that XLA compiles for.

XLA divides approximately where that is faster: on NVIDIA GPUs within 2 units in the last place, and by a constant with its
reciprocal. A stored scale or code would then occasionally differ from the one that other frameworks store.
"""

import jax
import jax.numpy as jnp
from jax import lax

_HIDDEN = 1 << 23


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """float32 x / y (of shapes that broadcast), rounded to nearest, ties to even.

    Exact where operands and quotient are normal numbers; elsewhere (zeros, infinities, NaN, subnormal numbers) XLA's
    result.
    """
    x, y = jnp.broadcast_arrays(x, y)
    return corrected(x, y, x / y)


def corrected(x: jax.Array, y: jax.Array, quotient: jax.Array) -> jax.Array:
    """x / y from an approximation within 2 units in the last place."""
    for _ in range(2):  # the second time for one that was, or moved, beyond a power of two, where units change
        quotient = _nearer(x, y, quotient)
    return quotient


def _nearer(x: jax.Array, y: jax.Array, quotient: jax.Array) -> jax.Array:
    """Move the quotient by whole units towards x / y.

    The remainder x - q y, in units of the product's last place, is a difference of two 48-bit integers that is itself less
    than 2^27, so arithmetic modulo 2^32 computes it exactly.
    """
    bits = lax.bitcast_convert_type(quotient, jnp.int32)
    (mx, ex), (my, ey), (mq, eq) = (_significand_and_exponent(v) for v in (x, y, quotient))
    shift = ex - ey - eq + 150
    remainder = (mx << jnp.clip(shift, 0, 31)) - mq * my
    remainder = jnp.where((mq == _HIDDEN) & (remainder < 0), 2 * remainder, remainder)  # below a power of two units are halved
    units = sum(jnp.where(2 * jnp.abs(remainder) > n * my, 1, 0) for n in (1, 3, 5))
    moved = lax.bitcast_convert_type(bits + jnp.sign(remainder) * units, jnp.float32)
    normal = [(e > 0) & (e < 255) for e in (ex, ey, eq)]
    return jnp.where(normal[0] & normal[1] & normal[2], moved, quotient)


def _significand_and_exponent(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(significand with its hidden bit, biased exponent) of float32 numbers, as int32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return (bits & (_HIDDEN - 1)) | _HIDDEN, (bits >> 23) & 255
