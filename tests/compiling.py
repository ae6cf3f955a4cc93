"""Programs compiled for what they compute: as they stand, and in little time."""

import contextlib
import functools

import jax

# What takes XLA most of its time on CPUs and changes nothing that is tested: LLVM's
# optimizations, and a compiler of its own for what is fused.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@functools.cache
def quick_options():
    """The options of QUICK that XLA has in this version."""
    found = {}
    for name, value in QUICK.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0, compiler_options={name: value})()
            found[name] = value
    return found


def quick_jit(fun):
    """As ``jax.jit``: its program is compiled sooner, and runs more slowly."""
    return jax.jit(fun, compiler_options=quick_options())


def compiled(fun, *args):
    """The results of a compiled program that rounds wherever it says so."""
    options = {"xla_allow_excess_precision": False} | quick_options()
    return jax.jit(fun, compiler_options=options)(*args)
