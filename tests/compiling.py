"""Programs compiled as they stand."""

import jax


def compiled(fun, *args):
    """The results of a compiled program that rounds wherever it says so."""
    options = {"xla_allow_excess_precision": False}
    return jax.jit(fun, compiler_options=options)(*args)
