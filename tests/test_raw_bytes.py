"""Arrays that NumPy's files return as bytes, where bfloat16 or float8 was saved."""

import io

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jmp_lite as jmp

KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
PARAMS = {"dense": {"w": jnp.ones(3, jnp.bfloat16)}}
WRAPPERS = {
    "loss_scaling": lambda: jmp.loss_scaling(SGD),
    "master_weights": lambda: jmp.master_weights(SGD),
    "compensated": lambda: jmp.compensated(SGD),
    "stochastic_rounding": lambda: jmp.stochastic_rounding(SGD, KEY),
    "low_precision_state": lambda: jmp.low_precision_state(SGD),
}
POLICY = jmp.get_policy("params=float32,compute=bfloat16,output=float32")


def loaded(dtype="bfloat16", numbers=(1.0, np.nan, 3.0)):
    file = io.BytesIO()
    np.save(file, np.asarray(numbers, getattr(ml_dtypes, dtype)))
    file.seek(0)
    return {"dense": {"w": np.load(file)}}


def updated(wrapper, *, grads=PARAMS, state=None, params=PARAMS):
    optimizer = wrapper()
    start = optimizer.init(PARAMS)
    kept = start if state is None else state(start)
    return optimizer.update(grads, kept, params)


DOORS = {
    "all_finite": jmp.all_finite,
    "cast_tree": lambda tree: jmp.cast_tree(tree, "float32"),
    "cast_to_full": jmp.cast_to_full,
    "a policy": POLICY.cast_to_compute,
    "apply_updates": lambda tree: jmp.apply_updates(PARAMS, tree),
    "parameters of apply_updates": lambda tree: jmp.apply_updates(tree, PARAMS),
    "numerics_report": jmp.numerics.numerics_report,
    "convert_state": lambda tree: jmp.convert_state((), jmp.loss_scaling(SGD), tree),
    "build_train_step": lambda tree: jmp.build_train_step(
        lambda params, state, batch, rng: (0.0, (state, None)), SGD
    )[0](tree),
    **{
        f"{name}, init": lambda tree, wrapper=wrapper: wrapper().init(tree)
        for name, wrapper in WRAPPERS.items()
    },
    **{
        f"{name}, gradients": lambda tree, wrapper=wrapper: updated(wrapper, grads=tree)
        for name, wrapper in WRAPPERS.items()
    },
}


@pytest.mark.parametrize("door", DOORS)
def test_bytes_without_a_dtype_are_an_error_that_says_what_to_write(door):
    with pytest.raises(
        TypeError, match=r"\|V2\[3\].*\['dense'\]\['w'\].*\.view\(ml_dtypes\.bfloat16\)"
    ):
        DOORS[door](loaded())


def test_a_state_with_bytes_is_an_error_too():
    def with_bytes(state):
        return state._replace(masters=loaded(numbers=(1.0, 2.0, 3.0)))

    with pytest.raises(TypeError, match=r"V2\[3\].*masters"):
        updated(WRAPPERS["master_weights"], state=with_bytes)


def test_float8_has_a_remedy_of_its_own_which_works():
    tree = loaded("float8_e4m3fn", (1.0, 2.0, 3.0))
    with pytest.raises(TypeError, match=r"view\(ml_dtypes\.float8_e4m3fn\)"):
        jmp.cast_to_full(tree)
    viewed = jax.tree.map(lambda x: x.view(ml_dtypes.float8_e4m3fn), tree)
    np.testing.assert_array_equal(jmp.cast_to_full(viewed)["dense"]["w"], [1, 2, 3])
    assert not jmp.all_finite(loaded()["dense"]["w"].view(ml_dtypes.bfloat16))


def test_other_arrays_that_jax_does_not_know_pass_as_before():
    structured = np.zeros(2, [("a", "f4"), ("b", "i4")])
    tree = {"text": np.array(["a"]), "pairs": structured, "none": jax.dtypes.float0}
    found = jmp.cast_tree(tree, "bfloat16")
    assert found["text"] is tree["text"]
    assert found["pairs"] is structured
    zeros = np.zeros(2, jax.dtypes.float0)
    assert jmp.all_finite({"x": zeros})
