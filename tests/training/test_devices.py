"""The same step on many devices, and in several processes."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from helpers import relative_error
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from benchmarks.collectives import (
    HEADS,
    LAYOUTS,
    WITHOUT_LABELS,
    compile_head,
    compile_language_model,
    compile_step,
)
from benchmarks.compiled import TARGETS, missing

PROCESS = pathlib.Path(__file__).parents[1] / "two_processes.py"


def loss_fn(params, model_state, batch, rng):
    h = jnp.tanh(batch @ params["w"])
    return jnp.mean((h @ params["v"] - 1) ** 2), (model_state, None)


def start():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((8, 16), (16, 2), (4, 8))
    w, v, x = map(jax.random.normal, keys, shapes)
    return {"w": w / 3, "v": v / 4}, x


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


# Each device rounds its part of a gradient to 16 bits, before the parts are added up.
@pytest.mark.parametrize(("rules", "bound"), [("O0", 1e-5), ("mixed", 0.02)])
@pytest.mark.parametrize("scale", [None, jmp.DynamicLossScale(2.0**10)])
def test_a_step_on_sharded_parameters_is_the_step_on_one_device(
    mesh, scale, rules, bound
):
    """FSDP: parameters, optimizer state and batch are split; jit does the rest."""
    params, x = start()
    init, step = jmp.build_train_step(
        loss_fn, lenient(optax.adam(1e-2)), rules, loss_scale=scale, ema=0.9
    )

    def split(leaf):
        rows = P("data") if jnp.ndim(leaf) and leaf.shape[0] % 2 == 0 else P()
        return jax.device_put(leaf, NamedSharding(mesh, rows))

    alone, sharded = init(params), jax.tree.map(split, init(params))
    before = jax.tree.map(lambda leaf: leaf.sharding, sharded)
    for batch in (x, x.at[0, 0].set(jnp.inf), x):
        alone, expected = jax.jit(step)(alone, batch)
        sharded, metrics = jax.jit(step, out_shardings=(before, None))(
            sharded, split(batch)
        )
        assert bool(metrics["grads_finite"]) == bool(expected["grads_finite"])
    changes = [
        jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), each, params)
        for each in (sharded.params, alone.params)
    ]
    assert relative_error(*changes) < bound
    assert sharded.params["w"].sharding.spec == P("data")
    assert sharded.opt_state.inner_state[0].mu["w"].sharding.spec == P("data")
    assert int(sharded.step) == int(alone.step) == 2


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, jax.vmap])
def test_a_part_on_a_mesh_of_other_axis_types_is_cast_on_its_own_mesh(transform):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    of_matrices = jax.sharding.auto_axes(jnp.matmul, out_sharding=P())

    def fun(w, x):
        return jnp.sum(of_matrices(jnp.sin(x), w) + 1, keepdims=False)

    if transform is jax.vmap:
        transform = lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[None])
    w, x = jnp.eye(8), jnp.linspace(-1, 1, 32).reshape(4, 8)
    expected = transform(lambda w, x: jnp.sum(jnp.sin(x) @ w + 1))(w, x)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, P("data"))
        actual = jax.jit(transform(jmp.autocast(fun)))(w, x)
        jaxpr = str(jax.make_jaxpr(jmp.autocast(fun))(w, x))
    assert "bf16[4,8" in jaxpr
    assert relative_error(jax.device_get(actual), expected) < 0.01


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_micro_batches_of_a_sharded_batch_stay_on_their_devices(kind, accumulate):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    params, _ = start()
    x = jax.random.normal(jax.random.key(1), (96, 8))
    step = {}
    for times in (1, accumulate):
        init, step[times] = jmp.build_train_step(
            loss_fn, lenient(optax.adam(1e-2)), "O0", accumulate=times, ema=0.9
        )
    state = jax.device_put(init(params), NamedSharding(mesh, P()))
    batch = jax.device_put(x, NamedSharding(mesh, P("data")))
    compiled = jax.jit(step[accumulate]).lower(state, batch).compile()
    program = compiled.as_text()
    rows = set(re.findall(r"= f32\[(\d+),\d+\]\S* dot\(", program))
    of_weights = {str(size) for leaf in params.values() for size in leaf.shape}
    assert rows - of_weights == {str(96 // 2 // accumulate)}
    assert "all-gather" not in program

    after, metrics = compiled(state, batch)
    alone, expected = jax.jit(step[1])(init(params), x)
    chex.assert_trees_all_close(metrics["loss"], expected["loss"], rtol=1e-5)
    chex.assert_trees_all_close(after.params, alone.params, rtol=1e-4)
    assert after.params["w"].sharding.is_fully_replicated


def test_micro_batches_that_devices_cannot_share_are_an_error_on_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    params, x = start()
    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1), accumulate=4)
    batch = jax.device_put(x, NamedSharding(mesh, P("data")))
    with pytest.raises(
        ValueError, match="that divide evenly among 2 devices, got 1 rows"
    ):
        jax.eval_shape(step, init(params), batch)


def sent(target, layout, rules):
    with jax.numpy_dtype_promotion("standard"):  # Optax's own promotion.
        program = compile_step(target, layout, rules, width=128, depth=2, rows=64)
    dtypes = program.collectives
    large = {k for k, v in dtypes.items() if v > 0.01 * sum(dtypes.values())}
    return large, sum(dtypes.values())


@pytest.mark.targets
@pytest.mark.parametrize("target", TARGETS)
def test_devices_send_each_other_16_bits_where_xla_sends_gradients(target):
    """Where gradients are averaged by ``axis_name``, devices send float32."""
    if missing(target):
        pytest.skip(missing(target))
    by_hand, by_jit, fsdp = LAYOUTS
    full, full_size = sent(target, by_hand, "O0")
    assert full == {"f32"}
    assert sent(target, by_hand, "mixed") == (full, full_size)
    low, low_size = sent(target, by_jit, "mixed")
    assert low == {"bf16"}
    assert low_size < 0.51 * sent(target, by_jit, "O0")[1]
    low, low_size = sent(target, fsdp, "mixed")
    assert low == {"bf16"}
    assert low_size < 0.9 * sent(target, fsdp, "O0")[1]


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


@pytest.mark.slow
def test_two_processes_skip_together_where_one_overflows():
    address = f"localhost:{free_port()}"
    alone = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), address, "2", str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=alone,
        )
        for i in range(2)
    ]
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        printed.append(
            [json.loads(line) for line in out.splitlines() if line[0] == "{"]
        )
    assert printed[0] == printed[1]
    first, second, third = printed[0]
    assert [s["finite"] for s in (first, second, third)] == [True, False, True]
    assert [s["scale"] for s in (first, second, third)] == [1024.0, 1024.0, 512.0]
    assert second["w"] == first["w"] != third["w"]
    assert [s["step"] for s in (first, second, third)] == [1, 1, 2]


@pytest.mark.targets
@pytest.mark.usefixtures("standard_promotion")
def test_a_mark_on_a_table_halves_the_float32_numbers_that_it_sends():
    if missing("h100"):
        pytest.skip(missing("h100"))
    size = {"width": 256, "heads": 2, "vocabulary": 8192, "depth": 1}

    def wide(variant):
        program = compile_language_model("h100", variant, batch=(16, 256), **size)
        return program.collectives["f32"]

    # The other half is the gradient, which is summed in float32.
    assert wide("mixed, as_low") < 0.55 * wide("mixed")


@pytest.mark.targets
@pytest.mark.parametrize("split", HEADS)
def test_labels_send_nothing_more_whether_rows_or_the_vocabulary_are_split(split):
    if missing("h100"):
        pytest.skip(missing("h100"))
    size = {"rows": 1024, "width": 256, "vocabulary": 8192}
    new, old = (
        compile_head("h100", split, rules, **size)
        for rules in ("mixed", WITHOUT_LABELS)
    )
    assert new.collectives == old.collectives
    assert new.bytes_moved < 0.95 * old.bytes_moved


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_in_shard_map_without_an_axis_warns_that_nothing_is_averaged(
    mesh, check_vma
):
    params, x = start()

    def stepped(**options):
        init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1), "O0", **options)

        def of_shard(x):
            state, metrics = step(init(params), x)
            return jax.tree.map(jnp.atleast_1d, (state.params, metrics["loss"]))

        mapped = jax.shard_map(
            of_shard,
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        return jax.jit(mapped)(x)

    with pytest.warns(
        UserWarning, match="'data' without an axis_name.*axis_name='data'"
    ):
        alone = stepped()
    chex.assert_trees_all_equal(stepped(axis_name=()), alone)
    averaged, loss = stepped(axis_name="data")
    assert loss[0] == loss[1]
    assert averaged["w"].shape == alone[0]["w"].shape
