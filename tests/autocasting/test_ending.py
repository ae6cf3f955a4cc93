"""``while`` loops that run as traced, because 16 bits could change their end."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import W, X

from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain


def ends_by_a_float(goes_on, step, *start, rules="mixed"):
    """Whether a loop runs as traced that starts from ``(*start, X)``."""
    loop = jax.named_scope("loop")(lax.while_loop)
    fun = lambda x: loop(goes_on, step, (*start, x))
    return any(row.code == "iterates" for row in explain(fun, rules)(X).rows)


def layer(h):
    return jnp.tanh(h @ W)


def token(h):
    """The most likely one of the first text."""
    return jnp.argmax(h[0] @ W)


def size(h):
    """A float that a product computes."""
    return jnp.abs(h[0] @ W).max()


# ------------------------------------------------- counts, which bound a choice


def is_bounded(goes_on, count, *start):
    """Whether a condition ``goes_on(n, ...)`` bounds a loop that ends at a token.

    Args:
      goes_on: the condition on the count and on what follows it in the carry.
      count: returns both after a step.
      *start: both at the start.
    """
    return not ends_by_a_float(
        lambda c: goes_on(*c[:-2]) & (c[-2] != 5),
        lambda c: (*count(*c[:-2]), token(c[-1]), layer(c[-1])),
        *(*start, 0),
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_count_bounds_a_loop_in_any_direction_and_through_calls(wrap):
    assert is_bounded(lambda n: n < 9, wrap(lambda n: (n + 1,)), 0)
    assert is_bounded(wrap(lambda n: n < 9), lambda n: (1 + n,), 0)
    assert is_bounded(
        lambda n: lax.gt(9, n), wrap(lambda n: (lax.add(jnp.int32(2), n),)), 0
    )
    assert is_bounded(lambda n: n > 0, wrap(lambda n: (n - 1,)), 9)
    assert is_bounded(lambda t: t < 9.0, lambda t: (t + 0.5,), 0.0)
    # A count is a sum: no other op bounds the loop.
    assert not is_bounded(lambda n: n < 9, wrap(lambda n: (n * 2,)), 1)
    assert not is_bounded(lambda n: n < 9, wrap(lambda n: (n,)), 1)
    # A number from which the count is subtracted alternates: 1, 8, 1, 8.
    assert not is_bounded(lambda n: n < 9, wrap(lambda n: (9 - n,)), 1)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_limit_and_the_step_of_a_count_are_loop_invariant(wrap):
    counts = wrap(lambda n, m: (n + 1, m))
    assert is_bounded(lambda n, m: n < m, counts, 0, 9)
    assert is_bounded(lambda n, m: lax.gt(m, n), counts, 0, 9)
    assert is_bounded(lambda n, m: n < 2 * m + 1, counts, 0, 9)
    assert is_bounded(lambda n, m: n < 9, wrap(lambda n, m: (n + m, m)), 0, 2)
    assert is_bounded(lambda n, m: n < 9, wrap(lambda n, m: (n + 2 * m, m)), 0, 2)
    # A limit that grows may never be reached, and steps that shrink may stop.
    runs_away = wrap(lambda n, m: (n + 1, m + 1))
    assert not is_bounded(lambda n, m: n < m, runs_away, 0, 9)
    assert not is_bounded(lambda n, m: lax.gt(m, n), runs_away, 0, 9)
    for grow in (lambda n, m: n + m, lambda n, m: m + n, lambda n, m: n - m):
        shrinks = wrap(lambda n, m, grow=grow: (grow(n, m), m // 2))
        assert not is_bounded(lambda n, m: n < 9, shrinks, 0, 4)


def test_a_count_bounds_only_what_ends_with_it():
    step = lambda c: (c[0] + 1, token(c[2]), layer(c[2]))
    ends = lambda bound: ends_by_a_float(lambda c: bound(c[0], c[1] != 5), step, 0, 0)
    assert not ends(lambda n, goes_on: (n < 9) & goes_on)
    assert ends(lambda n, goes_on: (n < 9) | goes_on)
    assert ends(lambda n, goes_on: jnp.where(goes_on, True, n < 9))
    # A condition that is no comparison of the count may always be true.
    assert ends(lambda n, goes_on: (jnp.minimum(n, 9) != 10) & goes_on)
    always = lambda n: lax.convert_element_type(jnp.maximum(n, 1), bool)
    assert ends(lambda n, goes_on: always(n) & goes_on)


# ---------------------------------------------------------- choices among floats


def test_the_largest_float_itself_is_a_tolerance_where_it_is_compared():
    def step(c):
        best, _ = lax.top_k(c[2][0] @ W, 1)
        return c[0] + 1, best[0], layer(c[2])

    assert ends_by_a_float(lambda c: (c[0] < 9) & (c[1] > 1e-3), step, 0, 1.0)


def test_a_choice_is_compared_with_what_does_not_change_in_any_step_after_any_op():
    def ends(goes_on, follow, start):
        return ends_by_a_float(
            lambda c: (c[0] < 9) & goes_on(c[1], c[2]),
            lambda c: (c[0] + 1, follow(*c), layer(c[2])),
            *(0, start),
        )

    text, keep = jnp.zeros(9, int), lambda n, one, h: one
    write = lambda n, text, h: text.at[n].set(token(h))
    is_last = lambda text, h: jnp.any(text[:, None] + 1 == jnp.array([5, 6]))
    assert not ends(lambda *c: ~is_last(*c), write, text)
    assert ends(lambda text, h: jnp.all(text != token(h)), write, text)
    # The comparison may be compared in turn, with anything.
    differs = lambda last, h: last != (token(h) == 5)
    assert not ends(differs, lambda n, last, h: token(h) == 5, False)
    low = lambda n, was_low, h: (token(h) < n).astype(int)
    assert not ends(lambda was_low, h: was_low < 1, low, 0)
    # A selection by the choice is compared, or is the condition.
    assert not ends(lambda scores, h: scores[token(h)] < 1, keep, jnp.ones(8))
    assert ends(lambda allowed, h: allowed[token(h)], keep, jnp.ones(8, bool))


def test_choices_in_two_steps_that_are_compared_with_each_other_are_a_tolerance():
    step = lambda c: (c[0] + 1, token(c[3]), c[1], layer(c[3]))
    assert ends_by_a_float(lambda c: (c[0] < 9) & (c[1] != c[2]), step, 0, 0, 1)
    # Without an op in 16 bits they are the choices of float32.
    nearest = lambda h: jnp.argmin(((h[0, :, None] - h[1]) ** 2).sum(0))
    step = lambda c: (c[0] + 1, nearest(c[3]), c[1], 0.9 * c[3])
    assert not ends_by_a_float(lambda c: (c[0] < 9) & (c[1] != c[2]), step, 0, 0, 1)


# -------------------------------------------------- floats that 16 bits change


def test_a_float_that_stays_the_same_is_no_tolerance():
    limit = lambda x: size(x).astype(int) + 3
    step = lambda c: (c[0] + 1, c[1], layer(c[2]))
    assert not ends_by_a_float(lambda c: c[0] < limit(X), step, 0, 0)
    assert not ends_by_a_float(lambda c: c[0] < limit(c[1]), step, 0, X)
    through_a_call = jax.jit(step)
    assert not ends_by_a_float(lambda c: c[0] < limit(c[1]), through_a_call, 0, X)
    assert ends_by_a_float(lambda c: c[0] < limit(c[2]), step, 0, 0)


def test_each_of_several_conditions_is_judged_by_itself():
    """A time in float32 is no tolerance, nor is a number that a product computed."""
    limit = size(X).astype(int) + 3
    step = lambda c: (c[0] + 0.1, c[1] + 1, layer(c[2]))
    goes_on = lambda c: (c[0] < 1) & (c[1] < size(X).astype(int) + limit)
    assert not ends_by_a_float(goes_on, step, 0.0, 0)
    assert ends_by_a_float(lambda c: c[0] < size(X), step, 0.0, 0)


def test_an_op_on_integers_that_a_rule_lowers_changes_no_time():
    def step(c):
        dt = jnp.where(c[1] - 3 > 0, 0.1, 0.2)
        return c[0] + dt, c[1] + 1, layer(c[2])

    rules = get_rules("mixed").low("sub")
    assert not ends_by_a_float(lambda c: c[0] < 9, step, 0.0, 0, rules=rules)
    of_floats = lambda c: (c[0] - (-0.1), c[1] + 1, layer(c[2]))
    assert ends_by_a_float(lambda c: c[0] < 9, of_floats, 0.0, 0, rules=rules)


def once(fun):
    """A function in a loop of one step."""
    return lambda h: lax.scan(lambda h, _: (h, fun(h)), h, None, length=1)[1][0]


def either(fun):
    """A function in a branch."""
    return lambda h: lax.cond(h[0, 0] > 2, lambda h: 0.01, fun, h)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, once, either])
def test_a_rule_for_the_scope_of_a_product_decides_for_the_loop(wrap):
    """Also where the product is in a call, a loop or a branch of the loop's body."""

    def scoped(h):
        with jax.named_scope("error"):
            return size(h)

    def step(c):
        with jax.named_scope("clock"):
            return c[0] + wrap(scoped)(c[1]), 0.9 * c[1]

    rules = get_rules("mixed")
    ends = lambda rules: ends_by_a_float(lambda c: c[0] < 9, step, 0.0, rules=rules)
    assert ends(rules)
    for scope in ("clock", "error", "^loop/clock/.*error"):
        assert not ends(rules.scope(scope, "full"))
    assert ends(rules.scope("^clock", "full"))
    # The same in the condition.
    goes_on, shrink = lambda c: wrap(scoped)(c[0]) > 1e-3, lambda c: (0.9 * c[0],)
    assert ends_by_a_float(goes_on, shrink, rules=rules)
    rules = rules.scope("^loop/.*error", "full")
    assert not ends_by_a_float(goes_on, shrink, rules=rules)


def test_a_time_may_be_counted_beside_a_network_in_a_loop_but_not_with_it():
    network = lambda h: lax.scan(lambda h, _: (layer(h), None), h, None, length=2)[0]
    beside = lambda c: (c[0] + 0.1, network(c[1]))
    assert not ends_by_a_float(lambda c: c[0] < 1, beside, 0.0)

    def together(c):
        step = lambda c, _: ((c[0] + 0.1, layer(c[1])), None)
        return lax.scan(step, c, None, length=2)[0]

    # The analysis takes a loop inside of the loop for one op.
    assert ends_by_a_float(lambda c: c[0] < 1, together, 0.0)
