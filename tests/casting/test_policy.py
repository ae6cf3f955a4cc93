import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite.casting.dtypes import dtype_to_names

DTYPES = st.sampled_from([np.dtype(dtype) for dtype in dtype_to_names])
POLICIES = st.builds(jmp.Policy, DTYPES, DTYPES, DTYPES)


@hypothesis.given(POLICIES)
def test_a_policy_reads_back_from_its_text(policy):
    assert jmp.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("params=float32,compute=float16,output=float32", "p=full,c=f16,o=full"),
        ("p=f32,c=bf16,o=f32", "p=full,c=bf16,o=full"),
        (" p = f32 , c = f16 ", "p=full,c=f16,o=f16"),
        ("c=f16", "p=full,c=f16,o=f16"),
        ("p=bf16", "p=bf16,c=bf16,o=bf16"),
        ("p=bf16,o=f32", "p=bf16,c=bf16,o=full"),
        ("o=f16", "p=full,c=full,o=f16"),
        ("float16", "p=f16,c=f16,o=f16"),
        ("full", "p=full,c=full,o=full"),
        ("mixed_float16", "p=full,c=f16,o=f16"),
        ("mixed_bfloat16", "p=full,c=bf16,o=bf16"),
    ],
)
def test_get_policy_reads_jmp_s_grammar_and_keras_s_names(text, expected):
    assert str(jmp.get_policy(text)) == expected


def test_half_is_the_device_s_half_dtype():
    assert jmp.get_policy("half").compute_dtype == jmp.half_dtype()
    assert jmp.get_policy("c=half").compute_dtype == jmp.half_dtype()


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("compute_float16", "Unknown dtype 'compute_float16'"),
        ("c=bfloat61", "'bfloat61'.*Did you mean 'bfloat16'.*'c=bfloat61'"),
        ("comptue=f16", "Unknown key 'comptue'.*mean 'compute'.*one of p, params"),
        ("c=f16,,p=f32", "Expected key=dtype, got ''"),
        ("c=f16,f32", "Expected key=dtype, got 'f32'"),
        ("c=f16,compute=f32", "compute_dtype is given twice"),
        ("", "Unknown dtype ''"),
    ],
)
def test_a_bad_policy_is_an_error_that_names_the_bad_part_and_the_accepted_ones(
    text, fragment
):
    with pytest.raises(ValueError, match=fragment):
        jmp.get_policy(text)


def test_a_policy_that_is_no_text_is_a_type_error():
    with pytest.raises(TypeError, match="as text, got int"):
        jmp.get_policy(16)


def test_two_spellings_of_one_policy_are_equal_and_have_one_hash():
    a = jmp.Policy("full", "bf16", "float32")
    b = jmp.Policy(jnp.float32, jnp.bfloat16, np.dtype("float32"))
    assert a == b
    assert len({a, b}) == 1
    assert a != a.with_output_dtype("bf16")


def test_a_policy_compares_with_scalar_types_as_in_jmp():
    policy = jmp.Policy(np.float32, jnp.bfloat16, np.float16)
    assert policy.param_dtype == jnp.float32
    assert policy.compute_dtype == jnp.bfloat16
    assert jnp.ones([], dtype=policy.output_dtype).dtype == np.float16


def test_a_policy_is_frozen_and_its_dtypes_must_be_floating():
    policy = jmp.get_policy("half")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = np.float32
    with pytest.raises(ValueError, match="floating-point dtype"):
        jmp.Policy(np.int32, np.float32, np.float32)
    with pytest.raises(ValueError, match="Unknown dtype"):
        policy.with_output_dtype("float61")


def test_each_cast_of_a_policy_uses_its_own_dtype():
    policy = jmp.get_policy("p=f32,c=bf16,o=f16")
    tree = {"w": jnp.ones(2, jnp.float16), "n": 1}
    assert policy.cast_to_param(tree)["w"].dtype == np.float32
    assert policy.cast_to_compute(tree)["w"].dtype == jnp.bfloat16
    assert policy.cast_to_output(tree)["w"].dtype == np.float16
    assert policy.cast_to_compute(tree)["n"] == 1
