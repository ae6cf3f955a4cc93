"""Weights that all steps of a loop multiply with: the same gradients, at less cost."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import (
    compiled,
    initialized,
    live_equations,
    live_equations_of,
    mostly_slow,
    products,
    relative_error,
)
from jax import export, lax
from jax.sharding import PartitionSpec as P
from programs import LSTM, LSTM_PARAMS, B, W, X

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.rules.presets import get_rules

H = X[:2]  # Fewer numbers than the weight has.
XS = jax.random.normal(jax.random.key(5), (6, 2, 8))


def recurrent(w, h, xs, **options):
    """A state that every step multiplies with the same weight."""

    def step(carry, x):
        h, count = carry
        h = jnp.tanh(x + h @ w + B)
        return (h, count + 1), h * count

    (h, count), ys = lax.scan(step, (h, 0), xs, **options)
    return h + ys.sum(0), count


def weight_first(w, h, xs):
    step = lambda h, x: (jnp.tanh(w @ h + x.T), None)
    return lax.scan(step, h.T, xs)[0]


def transposed(w, h, xs):
    step = lambda h, x: (jnp.tanh(h @ w.T + x), None)
    return lax.scan(step, h, xs)[0]


def twice(w, h, xs):
    """The same weight for the state and for the input."""
    step = lambda h, x: (jnp.tanh(h @ w + x @ w), None)
    return lax.scan(step, h, xs)[0]


def many_heads(w, h, xs):
    """A batch dimension on the weight."""
    heads = jnp.stack([w, -w])
    step = lambda h, x: (jnp.tanh(jnp.einsum("nh,nhk->nk", h, heads) + x), h)
    h, ys = lax.scan(step, h, xs)
    return h + ys.sum(0)


def read_elsewhere(w, h, xs):
    """The weight is also an operand of another op than a product."""
    step = lambda h, x: (jnp.tanh(h @ w + x) + w.mean() * x, jnp.sum(w**2))
    h, ys = lax.scan(step, h, xs)
    return h * ys.sum()


def counted(w, h, xs):
    step = lambda i, h: jnp.tanh(h @ w + xs[i])
    return lax.fori_loop(0, 6, step, h)


def nested(w, h, xs):
    outer = lambda h, x: (recurrent(w, h, xs + x)[0], None)
    return lax.scan(outer, h, xs[:2])[0]


CASES = {
    "recurrent": recurrent,
    "reversed": functools.partial(recurrent, reverse=True),
    "unrolled": functools.partial(recurrent, unroll=4),
    "of no step": lambda w, h, xs: recurrent(w, h, xs[:0])[0] + h @ w,
    "weight first": weight_first,
    "transposed": transposed,
    "twice": twice,
    "many heads": many_heads,
    "read elsewhere": read_elsewhere,
    "counted": counted,
    "nested": nested,
    "in jit": jax.jit(recurrent),
    "in remat": jax.checkpoint(recurrent),
    "mapped": lambda w, h, xs: jax.vmap(
        lambda h, xs: recurrent(w, h[None], xs[:, None])[0], (0, 1)
    )(h, xs),
    "mapped weights": lambda w, h, xs: jax.vmap(lambda w: recurrent(w, h, xs)[0])(
        jnp.stack([w, w.T])
    ),
}


QUICK = ("unrolled", "weight first", "many heads", "nested", "mapped weights")
ELSEWHERE = ("many heads", "read elsewhere", "nested")


def first(out):
    return out[0] if isinstance(out, tuple) else out


def total(fun, *args):
    out = first(fun(*args))
    return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))


def first_order(fun, *args):
    """Backward, with regard to all arguments, and forward."""
    loss = functools.partial(total, fun)
    directions = tuple(map(jnp.cos, args))
    return jax.grad(loss, (0, 1, 2))(*args), jax.jvp(loss, args, directions)[1]


def one_by_one(fun, *args):
    """Backward, with regard to the weight alone, and to the state alone."""
    loss = functools.partial(total, fun)
    return jax.grad(loss, 0)(*args), jax.grad(loss, 1)(*args)


def second_order(fun, *args):
    """Twice backward, and forward over backward."""
    of_weight = lambda w: jax.grad(functools.partial(total, fun))(w, *args[1:])
    return (
        jax.grad(lambda w: jnp.sum(of_weight(w) ** 2))(args[0]),
        jax.jvp(of_weight, args[:1], (jnp.cos(args[0]),))[1],
    )


TOLERANCES = {
    first_order: (1e-5, 1e-4),
    one_by_one: (1e-5, 1e-5),
    second_order: (1e-4, 1e-4),
}


@pytest.mark.parametrize(
    ("name", "derivatives"),
    mostly_slow(
        [
            *((name, first_order) for name in CASES),
            *(
                (name, derivatives)
                for name in ("recurrent", "many heads")
                for derivatives in (one_by_one, second_order)
            ),
        ],
        [
            *((name, first_order) for name in QUICK),
            *(("many heads", each) for each in (one_by_one, second_order)),
        ],
    ),
)
def test_derivatives_are_those_of_float32(name, derivatives):
    """In float32 there is nothing but the order of a sum between the two."""
    fun = CASES[name]
    exact = autocast(fun, compute_dtype="float32")
    (out, found), (expected_out, expected) = (
        compiled(lambda *a, f=f: (first(f(*a)), derivatives(f, *a)), W, H, XS)
        for f in (exact, fun)
    )
    # Beside its gradients, XLA may add a result up in another order.
    assert relative_error(out, expected_out) < 1e-6
    for one, other, tolerance in zip(
        found, expected, TOLERANCES[derivatives], strict=True
    ):
        assert relative_error(one, other) < tolerance


@pytest.mark.parametrize(
    "name", mostly_slow([n for n in CASES if n != "of no step"], QUICK)
)
def test_gradients_of_weights_under_autocast_are_near_those_of_float32(name):
    loss = lambda f: functools.partial(total, f)
    actual, expected = (
        compiled(jax.grad(loss(f), (0, 1, 2)), W, H, XS)
        for f in (autocast(CASES[name]), CASES[name])
    )
    assert relative_error(actual, expected) < 0.03


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_sum_over_a_long_loop_is_one_of_float32(wrap):
    """Added up in 16 bits, 2,048 terms of one sign would be far off."""

    def fun(w):
        step = lambda h, x: (x + 0.1 * jnp.tanh(h @ w), h @ w)
        xs = jnp.broadcast_to(1 + jnp.arange(8) / 8, (1024, 2, 8))
        return jnp.mean(lax.scan(step, jnp.ones((2, 8)), xs)[1])

    actual, expected = (wrap(jax.grad(f))(0.1 * W) for f in (autocast(fun), fun))
    assert relative_error(actual, expected) < 0.01


def made_in_loops(fun, *args):
    """Returns the shapes of the results of the loop bodies in a gradient."""
    grad = jax.grad(functools.partial(total, fun))
    return {
        var.aval.shape
        for eqn in live_equations(grad, *args)
        if eqn.primitive.name == "scan"
        for var in getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"]).outvars
    }


@pytest.mark.parametrize("name", [n for n in CASES if n not in ELSEWHERE])
def test_the_gradient_of_a_weight_is_not_added_up_in_the_loop(name):
    fun = CASES[name]
    if name not in ("of no step", "mapped weights"):
        assert W.shape in made_in_loops(fun, W, H, XS)
    assert W.shape not in made_in_loops(autocast(fun), W, H, XS)


def test_a_loop_without_a_derivative_casts_its_weight_once_before_it():
    closed = jax.make_jaxpr(autocast(recurrent))(W, H, XS)

    def casts(eqns):
        shapes = [e.invars[0].aval.shape for e in eqns if "convert" in e.primitive.name]
        return shapes.count(W.shape)

    (scan,) = (e for e in live_equations_of(closed) if e.primitive.name == "scan")
    assert casts(live_equations_of(closed)) == 1
    assert casts(live_equations_of(scan.params["jaxpr"])) == 0
    without = get_rules("mixed").without_pass("scan_weight_gradients")
    found, expected = (
        jax.jit(autocast(recurrent, rules))(W, H, XS) for rules in ("mixed", without)
    )
    chex.assert_trees_all_equal(found, expected)


def test_two_products_that_are_added_share_the_stack_of_their_gradient():
    def separate(w, h, xs):
        step = lambda h, x: (jnp.tanh(h @ w) + jnp.tanh(x @ w), None)
        return lax.scan(step, h, xs)[0]

    def backward(fun):
        eqns = live_equations(jax.grad(functools.partial(total, fun)), W, H, XS)
        *_, last = (eqn for eqn in eqns if eqn.primitive.name == "scan")
        return [v for v in last.outvars if v.aval.shape == XS.shape]

    assert len(backward(autocast(twice))) == 1
    assert len(backward(autocast(separate))) == 2


def test_the_gradient_of_a_weight_is_added_up_in_the_loop_where_that_moves_less():
    """A layer that is used again and again on a large batch."""
    many = jnp.concatenate([X] * 8)
    xs = jnp.stack([many] * 6)
    assert W.shape in made_in_loops(autocast(recurrent), W, many, xs)


def test_there_are_fewer_products_and_all_are_in_16_bits():
    eqns = live_equations(
        jax.grad(lambda p, x: jnp.sum(autocast(LSTM.apply)(p, x) ** 2)),
        LSTM_PARAMS,
        jnp.stack([X[:1]] * 2),
    )
    assert set(products(eqns)) == {("bfloat16",) * 3}


def test_a_frozen_weight_costs_no_product():
    """Only the state is differentiated: nothing is stacked for the weight."""
    grad = lambda f: jax.grad(lambda h: total(f, W, h, XS))
    counts = [
        len(
            [e for e in live_equations(grad(f), H) if e.primitive.name == "dot_general"]
        )
        for f in (autocast(recurrent), recurrent)
    ]
    assert counts[0] == counts[1]
    actual, expected = grad(autocast(recurrent))(H), grad(recurrent)(H)
    assert relative_error(actual, expected) < 0.03


@pytest.mark.skipif(
    jax.config.jax_remat3, reason="JAX then reruns what it rematerializes in a loop"
)
def test_a_loop_is_run_forward_once_and_backward_once():
    scans = [
        sum(e.primitive.name == "scan" for e in live_equations(f, W, H, XS))
        for f in (
            jax.grad(functools.partial(total, autocast(recurrent))),
            jax.grad(functools.partial(total, recurrent)),
        )
    ]
    assert scans == [2, 2]
    forward = live_equations(lambda *a: autocast(recurrent)(*a)[0], W, H, XS)
    assert sum(e.primitive.name == "scan" for e in forward) == 1


def test_a_loop_with_effects_keeps_its_gradient():
    def fun(w, h, xs):
        def step(h, x):
            jax.debug.callback(lambda _: None, h)
            return jnp.tanh(h @ w + x), None

        return lax.scan(step, h, xs)[0]

    grads = [
        jax.grad(functools.partial(total, f))(W, H, XS) for f in (autocast(fun), fun)
    ]
    assert relative_error(*grads) < 0.03


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_batch_may_be_split_over_devices_by_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P(None, "data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    def loss(w, h, xs):
        out, _ = lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, xs)
        return lax.psum(jnp.sum(out**2), "data")

    actual, expected = (jax.jit(jax.grad(f))(W, H, XS) for f in (autocast(loss), loss))
    assert relative_error(actual, expected) < 0.03


def test_a_batch_may_be_sharded_on_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(W, P())
        h, xs = jax.device_put(H, P("data")), jax.device_put(XS, P(None, "data"))

        def loss(w, h, xs):
            out, _ = lax.scan(lambda h, x: (jnp.tanh(h @ w + x @ w), h), h, xs)
            return jnp.sum(out**2)

        value_and_grads = jax.value_and_grad(autocast(loss), (0, 1, 2))
        expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(w, h, xs)
        for run in (lambda f: f, jax.jit):
            actual = run(value_and_grads)(w, h, xs)
            assert jax.tree.map(jax.typeof, actual) == jax.tree.map(
                jax.typeof, expected
            )
            assert relative_error(actual, expected) < 0.03
        eqns = live_equations(value_and_grads, w, h, xs)
        scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
        # The gradient of the weight is one product for all steps.
        assert not {v.aval.shape for e in scans for v in e.outvars} & {W.shape}


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.OptimizedLSTMCell])
def test_flax_s_cells_are_found(cell):
    rnn = nn.RNN(cell(32))
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    params = initialized(rnn, x)
    loss = lambda f: lambda p: jnp.sum(f(p, x) ** 2)
    both = autocast(rnn.apply), rnn.apply
    grads = [compiled(jax.grad(loss(f)), params) for f in both]
    assert relative_error(*grads) < 0.03
    eqns = live_equations(jax.grad(loss(autocast(rnn.apply))), params)
    scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    shapes = {v.aval.shape for e in scans for v in e.outvars}
    assert not shapes & {(32, 32), (32, 128)}


def test_the_pass_can_be_switched_off():
    def adds_up_the_gradient_of_a_weight(rules):
        """Whether a loop of the gradient has a result of the shape of the weight."""
        grad = jax.grad(lambda w: autocast(recurrent, rules)(w, H, XS)[0].sum())
        scans = [e for e in live_equations(grad, W) if e.primitive.name == "scan"]
        return any(var.aval.shape == W.shape for e in scans for var in e.outvars)

    rules = get_rules("mixed")
    assert not adds_up_the_gradient_of_a_weight(rules)
    fewer = rules.without_pass("scan_weight_gradients")
    assert adds_up_the_gradient_of_a_weight(fewer)


def test_a_batch_of_any_size_is_exported_with_its_gradient():
    """Whether a weight is larger than what is stacked is not known then."""
    loss = lambda w, h, xs: jnp.sum(recurrent(w, h, xs)[0])
    grad_fn = jax.jit(jax.grad(autocast(loss)))
    (n,) = export.symbolic_shape("n")
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    made = export.export(grad_fn)(float32(8, 8), float32(n, 8), float32(6, n, 8))
    assert relative_error(made.call(W, H, XS), grad_fn(W, H, XS)) < 0.01
