import collections
import functools
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import equations
from jax import lax
from programs import (
    BLOCK,
    BLOCK_PARAMS,
    DECIDED,
    LAYERS,
    PROGRAMS,
    RULES_WITH_PATHS,
    W,
    X,
)

import jmp_lite as jmp
from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.decide.decisions import Decision, Reason, Run
from jmp_lite.autocasting.decide.facts import State
from jmp_lite.autocasting.marks import as_full, as_low, full_precision
from jmp_lite.autocasting.rules.match import RuleMatch, RuleSource
from jmp_lite.autocasting.rules.presets import PRESETS, get_rules
from jmp_lite.formats.number_format import Product
from jmp_lite.formats.table import FORMATS
from jmp_lite.insight.explanation import Explanation, explain
from jmp_lite.insight.rows import DecisionRecord, Row, code_of, reason_in_words
from jmp_lite.insight.tables import short
from jmp_lite.jaxprs.products import product_sizes
from jmp_lite.ops import HIGHER_ORDER, Precision

# Ops that the interpreter adds: casts, and broadcasts of operands before a cast.
ITS_OWN = {"convert_element_type", "broadcast_in_dim", "clamp"}
RULES = ["mixed", "O1", "O2", "O3", "torch"]


DOT = jax.make_jaxpr(jnp.dot)(X, W).jaxpr.eqns[0]
RULE = RuleMatch(Precision.LOW, RuleSource.SCOPE, "mlp")


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_a_text_and_a_code(reason):
    small = FORMATS["float8"].judge(
        Product(DOT, jnp.bfloat16, (True, True)), False, True
    )
    decision = Decision(
        *(Run.LOW, State.LOW, reason),
        match=RULE,
        within="while",
        requested=FORMATS["float8"],
        verdict=small,
    )
    record = DecisionRecord(DOT, decision)
    words, code = reason_in_words(record), code_of(record)
    assert words.strip() == words != ""
    assert reason.name not in words
    assert code == code.lower() != ""


def test_no_two_reasons_have_the_same_text():
    special = {Reason.RULE, Reason.FORMAT, Reason.INSIDE}
    words = [
        reason_in_words(DecisionRecord(DOT, Decision(Run.LOW, State.LOW, reason)))
        for reason in Reason
        if reason not in special
    ]
    assert len(words) == len(set(words))


def listed(rows):
    """Counts the rows by op and by the dtypes and shapes of their results."""
    return collections.Counter(
        (row.op, *(shape.replace("float32", row.precision) for shape in row.shapes))
        for row in rows
        if row.op not in HIGHER_ORDER | ITS_OWN
    )


def bound(fun, *args):
    return collections.Counter(
        (eqn.primitive.name, *(var.aval.str_short() for var in eqn.outvars))
        for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr)
        if eqn.primitive.name not in HIGHER_ORDER | ITS_OWN
    )


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_shows_the_precisions_that_run(name, rules):
    fun, args = PROGRAMS[name]
    shapes = jax.eval_shape(lambda: args)
    assert listed(explain(fun, rules)(*shapes).rows) == bound(
        autocast(fun, rules), *args
    )


@pytest.mark.filterwarnings("ignore:The scope rule .* matches nothing")
@pytest.mark.parametrize("rules", [*PRESETS, *RULES_WITH_PATHS])
@pytest.mark.parametrize("name", DECIDED)
def test_explain_shows_the_precisions_that_run_under_marks_scopes_and_rules_of_paths(
    name, rules
):
    fun, args = DECIDED[name]
    rules = RULES_WITH_PATHS.get(rules, rules)
    explained = listed(explain(fun, rules)(*args).rows)
    assert explained == bound(autocast(fun, rules), *args)


def test_casts_of_the_user_have_rows():
    def fun(x, w):
        y = (x @ w).astype("float16").astype(jnp.float32)
        return y + w.astype("bfloat16").astype(jnp.float32), y > 0

    rows = [
        (row.precision, row.reason.partition(": ")[2] or row.reason)
        for row in explain(fun)(X[:, :4], X).rows
        if row.op == "convert_element_type"
    ]
    assert rows == [
        ("float32", "not from float32 to float32"),
        ("float32", "deliberate"),
        ("float32", "not from float32 to float32"),
        ("float32", "no operand is 16-bit or deliberate float32"),
    ]
    marked = full_precision(lambda x: x.astype("bfloat16").astype(jnp.float32))
    *_, row = explain(marked)(X).rows
    assert row.reason == "FULL: marked by full_precision or as_full"


def test_a_reason_names_the_argument_that_decided():
    def fun(params, x):
        return (x @ params["w"] + params["b"]) @ params["w"]

    params = {"w": W, "b": X[0]}
    rows = explain(fun, "torch")(params, X).rows
    (add,) = (row for row in rows if row.op == "add")
    assert add.reason.endswith(": argument args[0]['b']")


def test_passes_are_named_with_what_they_rewrote_and_can_be_switched_off():
    block = jax.jit(lambda h, c, w: (jnp.tanh((h + jnp.exp(c)) @ w), c))

    def model(x, w, rows):
        def step(h, row):
            return jnp.tanh(h @ w + jax.nn.softmax(row @ w)), None

        h, _ = lax.scan(step, x, rows)
        h = jnp.take_along_axis(h @ w, jnp.argsort(h)[:, :1], -1) * h
        return block(h @ w, h @ w, w)[0] @ w

    args = (X, jnp.ones((8, 8)), jnp.ones((3, 4, 8)))
    rules = get_rules("mixed")
    every = explain(model, rules)(*args)
    assert set(every.passes) == set(rules.passes)
    assert "\npasses: labels (1), rematerialize (1)" in str(every)
    for name in rules.passes:
        fewer = rules.without_pass(name)
        assert set(fewer.passes) == {*rules.passes} - {name}
        assert set(explain(model, fewer)(*args).passes) == set(fewer.passes)
        # No pass changes a decision.
        assert every.diff(explain(model, fewer)(*args)).changed == ()
    with pytest.raises(ValueError, match=r"Unknown pass 'rematerialise'.*'rematerial"):
        rules.without_pass("rematerialise")


def reasons(fun, *args, rules="mixed"):
    return {row.op: row.reason for row in explain(fun, rules)(*args).rows}


def test_a_reason_leads_to_what_widened_the_stream():
    def model(x, w):
        scale = jnp.exp(x @ w.T)  # The culprit.
        return jnp.tanh(x @ w + scale) @ w

    (culprit,) = (row for row in explain(model)(X, W).rows if row.op == "exp")
    found = reasons(model, X, W)
    place = culprit.source.split(" ")[0].rpartition("/")[-1]
    assert found["tanh"].endswith(f"exp at {place}")
    assert place not in found["dot_general"]
    assert __file__ in culprit.source
    assert culprit.source.endswith(
        "(test_a_reason_leads_to_what_widened_the_stream.<locals>.model)"
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_reason_leads_out_of_and_into_calls(wrap):
    widen = wrap(lambda x: jnp.exp(x))
    use = wrap(lambda h, s: jnp.tanh(h + s))

    def model(x, w):
        return use(x @ w, widen(x @ w.T)) @ w

    for op in ("add", "tanh"):
        assert "exp at test_explain.py:" in reasons(model, X, W)[op]


class TwoLines(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.softplus(nn.Dense(8)(x))  # One.
        return jnp.var(h, -1) * nn.LayerNorm()(h)[:, 0]  # Two.


def test_a_source_is_the_line_of_the_user():
    module = TwoLines()
    params = jax.eval_shape(module.init, jax.random.key(0), X)
    dispatched = functools.singledispatch(jnp.cos)  # Python's library calls it.
    first = TwoLines.__call__.__wrapped__.__code__.co_firstlineno + 2
    for backward in (False, True):
        explained = explain(
            lambda p, x: module.apply(p, dispatched(x)), backward=backward
        )
        rows = explained(params, X).rows
        assert {row.source.split(":")[0] for row in rows} == {__file__}
        of_module = [row for row in rows if row.scope.startswith("TwoLines")]
        lines = {int(row.source.split(":")[1].split(" ")[0]) for row in of_module}
        assert lines == {first, first + 1}
    (var,) = (r for r in rows if r.op == "square" and r.scope.endswith("_var"))
    assert f":{first + 1} (TwoLines.__call__)" in var.source
    # A function of another library has no line if no code of the user calls it.
    assert {row.source for row in explain(jnp.tanh)(X).rows} == {""}
    assert (
        explain(nn.Dense(8).apply)({"params": {"kernel": W, "bias": W[0]}}, X)
        .rows[0]
        .source.endswith("(Dense.__call__)")
    )


def test_a_reason_has_the_line_of_the_user_where_jax_made_the_value():
    @jax.jit
    def inner(x):
        return jnp.tanh(x @ W)  # Its own line, whoever calls it.

    def model(x):
        scale = jnp.linalg.norm(x @ W.T)
        return jnp.tanh(inner(x) * scale) @ W

    first = model.__code__.co_firstlineno
    rows = explain(model)(X).rows
    (widened,) = (r for r in rows if r.op == "tanh" and not r.scope)
    assert widened.reason.endswith(
        f"reduce_sum at {short(f'{__file__}:{first + 1} (f)')}"
    )
    (own,) = (r for r in rows if r.op == "tanh" and r.scope)
    assert short(own.source).endswith(f":{first - 2}")
    assert short("/a folder/file.py:3 (f.<locals>.<lambda>)") == "file.py:3"


CELL = """\
import jax.numpy as jnp


def model(x, w):
    h = jnp.exp(x @ w)
    return h * (x @ w) @ w
"""


def test_in_a_notebook_a_source_is_the_number_of_a_cell_and_a_line(monkeypatch):
    ipython = pytest.importorskip("IPython")
    compiler = pytest.importorskip("IPython.core.compilerop").CachingCompiler()
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell)
    # A kernel names the file of a cell by a hash of its text.
    monkeypatch.setattr(compiler, "get_code_name", lambda *_: "/tmp/kernel_1/2718.py")
    names = {}
    exec(compile(CELL, compiler.cache(CELL, 3), "exec"), names)
    (exp,) = (r for r in explain(names["model"])(X, W).rows if r.op == "exp")
    assert exp.source == "/tmp/kernel_1/2718.py:5 (model)"
    assert short(exp.source) == "In[3]:5"
    printed = str(explain(names["model"])(X, W))
    assert "exp at In[3]:5" in printed
    assert "2718.py" not in printed
    # Code that a cell imports is in a file, as is all code outside of IPython.
    assert short("/a folder/file.py:3 (f)") == "file.py:3"
    monkeypatch.setattr(ipython, "get_ipython", lambda: None)
    assert short(exp.source) == "2718.py:5"
    monkeypatch.delitem(sys.modules, "IPython")
    assert short(exp.source) == "2718.py:5"
    assert short("<ipython-input-12-0123456789ab>:5 (model)") == "In[12]:5"
    assert short("") == ""


def test_reasons_name_scopes_marks_and_rules():
    def fun(x):
        with jax.named_scope("head"):
            y = x @ x
        with full_precision():
            z = y @ x
        return z, jnp.sin(x), jnp.floor(as_full(y) * 2), lax.nextafter(x, x)

    rules = get_rules("mixed").scope("head", "full").low("floor")
    texts = [row.reason for row in explain(fun, rules)(X[:, :4]).rows]
    for named in ("'head'", "full_precision", "'floor'"):
        assert any(named in reason for reason in texts), named
    codes = {row.op: row.code for row in explain(fun, rules)(X[:, :4]).rows}
    assert codes["floor"] == "op"
    assert codes["sin"] == "position"
    assert codes["nextafter"] == "typed"
    products = [r for r in explain(fun, rules)(X[:, :4]).rows if r.op == "dot_general"]
    assert [row.code for row in products] == ["scope", "mark"]
    assert explain(lambda x: x * 2)(X).rows[0].code == "read_in_float32"
    inner = autocast(lambda x: x @ x, "O0")
    assert "autocast" in reasons(inner, W)["dot_general"]


def test_the_reason_of_an_op_behind_a_mark_names_the_mark():
    def fun(x):
        return jnp.tanh(as_low(jnp.exp(x)) * 2) @ W, jnp.tanh(as_full(x @ W) * 2) @ W

    muls = [row.reason for row in explain(fun)(X).rows if row.op == "mul"]
    low, full = (reason.rpartition(" at ")[0] for reason in muls)
    assert low.endswith(": as_low")
    assert full.endswith(": as_full")


def test_a_loop_is_listed_once_with_its_trips_and_each_carry_has_a_row():
    def layers(x, layers):
        def body(carry, w):
            h, total = carry
            return (jnp.tanh(h @ w), total + h.sum()), None

        (h, total), _ = lax.scan(body, (x, 0.0), layers)
        return h @ layers[0], total

    rows = explain(layers)(X, LAYERS).rows
    assert [row.times for row in rows if row.op == "tanh"] == [3]
    carries = [row for row in rows if row.op == "scan"]
    assert [row.precision for row in carries] == ["bfloat16", "float32"]
    assert all(f"carry {i}" in row.reason for i, row in enumerate(carries))

    def fixed_point(x):
        return lax.while_loop(
            lambda x: x.max() > 1e-3, lambda x: jnp.tanh(x @ W / 9), x
        )

    def counted(x):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ W))
        return lax.while_loop(lambda c: c[0] < x.shape[0], step, (0, x))

    rows = explain(counted)(X).rows
    (dot,) = (row for row in rows if row.op == "dot_general")
    assert (dot.precision, dot.times) == ("bfloat16", None)
    assert [row.times for row in rows if row.op in ("while", "lt")] == [1, None]
    kept = explain(fixed_point)(X).rows
    assert [(row.op, row.precision) for row in kept if row.times == 1] == [
        ("while", "float32")
    ]
    (dot,) = (row for row in kept if row.op == "dot_general")
    assert (dot.precision, dot.times) == ("float32", None)
    assert "while" in dot.reason


def test_a_loop_that_is_kept_has_its_trips():
    def fixed_point(x):
        step = lambda h, _: (h @ W / 9, None)
        body = lambda x: lax.scan(step, x, None, length=7)[0]
        return lax.while_loop(lambda x: x.max() > 1e-3, body, x)

    times = {row.op: row.times for row in explain(fixed_point)(X).rows}
    assert times == {
        "while": 1,
        **dict.fromkeys(["reduce_max", "gt", "scan", "dot_general", "div"]),
    }

    def solved(x):
        step = lambda h, _: (h @ W, None)
        doubled = lambda v: 2 * lax.scan(step, v, None, length=7)[0]
        return lax.custom_linear_solve(doubled, x, lambda _, v: v)

    rows = explain(solved)(X).rows
    assert {row.times for row in rows if row.op == "dot_general"} == {7}
    assert {row.times for row in rows if row.op == "mul"} == {1}


def test_a_block_that_is_called_often_has_rows_for_each_call_with_its_own_path():
    block = jax.jit(lambda x: jnp.tanh(x @ W))

    def model(x):
        for i in range(4):
            with jax.named_scope(f"block_{i}"):
                x = block(x)
        return x

    scopes = [row.scope for row in explain(model)(X).rows if row.op == "tanh"]
    assert scopes == [f"block_{i}/<lambda>" for i in range(4)]


def test_an_explanation_has_rows_that_its_text_shows():
    explanation = explain(BLOCK.apply)(BLOCK_PARAMS, X)
    assert isinstance(explanation, Explanation)
    assert all(isinstance(row, Row) for row in explanation.rows)
    (dense, *_) = (row for row in explanation.rows if row.op == "dot_general")
    assert (dense.scope, dense.shapes) == ("Block/Dense_1", ("float32[4,16]",))
    text = str(explanation).splitlines()
    assert text[0] == f"autocast to bfloat16: {len(explanation.rows)} equations"
    headers = ["times", "op", "runs in", "traced as", "why", "where"]
    assert text[1].split() == " ".join(headers).split()
    assert "Block/LayerNorm_0" in text
    assert max(map(len, text)) < 180


def test_explain_runs_nothing_and_passes_arguments_that_are_no_arrays():
    ran = []

    def fun(x, name, *, flag):
        jax.debug.callback(lambda: ran.append(name))
        return x @ x if flag else x

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    rows = explain(fun, compute_dtype="float16")(x, "a", flag=True).rows
    assert [row.precision for row in rows] == ["as traced", "float16"]
    assert ran == []
    with pytest.raises(ValueError, match=r"Unknown preset 'mixde'.*'mixed'"):
        explain(fun, "mixde")


def test_products_of_groups_count_the_rows_of_each_group():
    rows, groups, width = 64, 3, 16
    x, w = jnp.ones((rows, width)), jnp.ones((groups, width, 2 * width))
    sizes = jnp.array([10, 30, 24])

    def loss(x, w):
        return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

    found = explain(loss, backward=True)(x, w).rows
    products = [row for row in found if row.op == "ragged_dot_general"]
    # The forward product and two of the backward pass: each row meets one group.
    assert [row.flops for row in products] == 3 * [2 * rows * width * 2 * width]
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)
    of_groups = [
        eqn
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "ragged_dot_general"
    ]
    assert [product_sizes(eqn) for eqn in of_groups] == [
        (rows, 2 * width, width),
        (width, 2 * width, rows),
        (rows, width, 2 * width),
    ]


def test_abstract_keys_are_arguments_like_abstract_arrays():
    def fun(key, x, w):
        return jax.random.normal(key, (4, 8)) * (x @ w)

    shapes = jax.eval_shape(lambda: (jax.random.key(0), X, W))
    expected = explain(fun)(jax.random.key(0), X, W)
    assert [row.op for row in explain(fun)(*shapes).rows] == [
        row.op for row in expected.rows
    ]


def test_a_reason_names_the_dtype_that_the_users_code_casts_to():
    def norm(x):
        h = x.astype("float16")
        return jnp.sum(h * h).astype(jnp.float32)

    reasons = {row.op: row.reason for row in explain(norm)(X).rows}
    assert reasons["mul"] == "as traced: your code made it float16"


def test_a_format_of_all_products_is_used_if_one_of_them_is_there():
    rules = get_rules("mixed").product(jmp.Float8(smallest=1))
    fun = lambda x: jnp.tanh(x @ x) @ x
    assert explain(fun, rules)(W).unused == ()
    found = explain(lambda x: x + 1, rules)(W).unused
    assert len(found) == 2
    assert "'dot_general' matches nothing" in found[0]
