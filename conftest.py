"""Settings for every test and doctest, made before JAX starts its backend."""

import os
from importlib import metadata

# The plug-ins of the dependency group `targets` compile for devices that are not
# there: the tests themselves run on the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What takes XLA most of its time on CPUs and changes nothing that is tested: LLVM's
# optimizations, and a compiler of its own for what is fused (0.10 has another one).
# A GPU's programs are tested as users compile them.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = " ".join(
        (
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0",
            "--xla_cpu_parallel_codegen_split_count=1",
            "--xla_cpu_use_fusion_emitters=false"
            if metadata.version("jaxlib").startswith("0.10.")
            else "",
        )
    )

import hypothesis
import jax
import pytest

# The same examples every time: what fails here fails everywhere, and the other way
# round. To search for more: `pytest --hypothesis-profile=default`.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")

# Two fake devices, for sharding; strict promotion, so that no dtype of ours comes
# about by accident.
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Recording the Python stack of each op takes time, and no test reads it in a compiled
# program.
jax.config.update("jax_traceback_in_locations_limit", 0)


def pytest_configure(config):
    """Keeps compiled programs in pytest's cache: the next run takes half the time."""
    if (cache := getattr(config, "cache", None)) is None:  # -p no:cacheprovider
        return
    jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(items):
    """Marks the tests of the benchmarks."""
    for item in items:
        if item.path.parent.name == "benchmarks":
            item.add_marker(pytest.mark.benchmarks)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Prints the CPU time of all processes, which a busy machine spoils least."""
    if not hasattr(config, "workerinput"):
        seconds = round(sum(os.times()[:4]))
        print(f"CPU time: {seconds // 60} min {seconds % 60} s")


@pytest.fixture
def standard_promotion():
    """JAX's own promotion, which Flax and optax count on (and benchmarks set)."""
    strict = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", strict)
