"""The driver for JAX's own tests, on a checkout of a few tests written here."""

import argparse
import collections

import jax.numpy as jnp
import numpy as np
import pytest
from jax_tests import driver, plugin

import jmp_lite as jmp
from jmp_lite.autocasting.rules.rules import is_identity

TESTS = """
import unittest
import jax
import jax.numpy as jnp
import numpy as np
from jax._src import test_util
from jax.test_util import check_grads

X = jnp.linspace(0.1, 1, 16).reshape(4, 4)
SCOPES = []


def product(x):
    return jnp.sum(x @ x)


class Some(test_util.JaxTestCase):
    def test_is_exact(self):
        assert float(jax.jit(product)(X)) == float(product(X))

    def test_is_near(self):
        actual, expected = jax.jit(product)(X), product(X)
        self.assertAllClose(actual, expected)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        check_grads(product, (X,), order=2)

    def test_is_wrong(self):
        self.assertAllClose(jax.jit(product)(X), 1.2 * product(X))

    def test_asks_for_its_value(self):
        jax.grad(lambda x: x if x > 0 else -x)(1.0)

    def test_asks_for_options(self):
        @jax.jit(static_argnums=1)
        def power(x, n):
            assert n == 2
            return jax.vmap(lambda row: row**n)(x)

        self.assertAllClose(power(X, 2), X * X)
"""
EXACT = "few_test.py::Some::test_is_exact"


@pytest.mark.slow
def test_a_test_that_fails_only_under_autocast_is_reported_unless_it_is_known(
    tmp_path, capsys
):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "few_test.py").write_text(TESTS)
    found = driver.additional(tmp_path, "few", driver.MODES)
    assert {mode: set(failed) for mode, failed in found.failed.items()} == {
        "O0": set(),
        "mixed": {EXACT},
    }
    assert found.passed == {"O0": 3, "mixed": 2}
    assert driver.summarize([found], [], argparse.Namespace(modes=driver.MODES)) == 1
    assert EXACT in capsys.readouterr().out
    known = [driver.Reason("digits", "It compares digits.", {"mixed": [EXACT]})]
    assert driver.summarize([found], known, argparse.Namespace(modes=driver.MODES)) == 0
    known = [driver.Reason("digits", "It compares digits.", {"O0": [EXACT]})]
    assert driver.summarize([found], known, argparse.Namespace(modes=["O0"])) == 1
    assert "passes, but is listed as 'digits'" in capsys.readouterr().out


def test_rules_that_change_nothing_run_the_interpreter():
    assert is_identity(jmp.get_rules("O0"))
    assert not is_identity(plugin.O0)
    explanation = jmp.explain(lambda x: x @ x, plugin.O0)(jnp.ones((2, 2)))
    assert explanation.share_low() == 0


@pytest.mark.parametrize(
    ("actual", "desired", "is_near"),
    [
        ([1.01, 100.0], [1.0, 101.0], True),
        ([0.01], [0.0], True),
        ([1.2], [1.0], False),
        ([np.nan, 1.0], [np.nan, 1.0], True),
        ([np.nan], [1.0], False),
        ([1.0], [np.inf], False),
        ([1.0, 2.0], [1.0, 2.0, 3.0], False),
    ],
)
def test_a_rounding_to_16_bits_is_near_and_a_fault_is_not(actual, desired, is_near):
    actual, desired = (np.asarray(x, np.float32) for x in (actual, desired))
    assert plugin.is_near(actual, desired) is is_near
    assert not plugin.is_near(actual.astype(bool), desired.astype(bool))


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("AssertionError: \nNot equal to tolerance rtol=1e-06, atol=0", "values"),
        ("AssertionError: 'float32' != 'bfloat16' : dtype", "types"),
        ("AssertionError: 2 != 3", "claims"),
        ("TypeError: unhashable type: 'list'", "crashes"),
    ],
)
def test_a_failure_has_a_cause(message, cause):
    assert driver.Failure(message, "").cause == cause


def test_a_test_that_does_not_end_fails(tmp_path):
    outcomes = tmp_path / "outcomes"
    outcomes.write_text(
        '{"test": "a", "outcome": "began"}\n{"test": "a", "outcome": "passed"}\n'
        '{"test": "b", "outcome": "began"}\n'
    )
    found = driver.read_outcomes("few", outcomes, "pytest ended with -11")
    assert found == driver.Run(1, {"b": driver.Failure("pytest ended with -11", "")})


@pytest.mark.parametrize("version", ["0.10", "0.11", "0.12"])
def test_each_known_test_has_one_reason_which_is_a_sentence(version):
    listed = collections.Counter()
    for reason in driver.read_reasons(driver.HERE / "known.toml", version):
        assert reason.why.endswith(".")
        assert set(reason.tests) <= set(driver.MODES)
        for mode, tests in reason.tests.items():
            assert list(tests) == sorted(tests)
            listed.update((mode, test) for test in tests)
    assert not [test for test, count in listed.items() if count > 1]
