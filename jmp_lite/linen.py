"""Flax linen: parts of a module in 16 bits, and loss scales in checkpoints.

A module is never changed: each function returns a new one, with the same parameters
under the same names. Importing this module registers the loss scales with
``flax.serialization``.
"""

from jmp_lite.flax.linen import to_float

__all__ = ["to_float"]
