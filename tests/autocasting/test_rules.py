import dataclasses
import json
import re
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import W, X

from jmp_lite import ops
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.rules.match import parse_precision
from jmp_lite.autocasting.rules.presets import PRESETS, get_rules
from jmp_lite.autocasting.rules.rules import Rules, asks_for_low, is_identity
from jmp_lite.autocasting.rules.serialization import ASCEND_OPS
from jmp_lite.insight.explanation import explain
from jmp_lite.ops import Precision

OPS = sorted(op.name for op in ops.OPS)
LOWERABLE = sorted(ops.LOWERABLE)


# -------------------------------------------------------------------------- presets


def count(rules):
    precisions = [rules.precision_of(op) for op in OPS]
    return {precision: precisions.count(precision) for precision in set(precisions)}


def test_o0_keeps_every_op_and_is_the_only_identity():
    assert set(count(get_rules("O0"))) == {Precision.KEEP}
    identities = {name for name, rules in PRESETS.items() if is_identity(rules)}
    assert identities == {"O0", "must_keep_origin_dtype"}
    assert not is_identity(get_rules("O0").low("dot_general"))
    assert not is_identity(get_rules("O0").scope("head", "low"))


def is_identity_by_every_op(rules):
    of_rules = {precision for _, precision in (*rules.ops, *rules.scopes)}
    return not any(p.lowers for p in of_rules | set(count(rules)))


def asks_for_low_by_every_op(rules, op, path):
    if rules.precision_in(path) is not None:
        return rules.precision_in(path) is Precision.LOW
    is_named = (op, Precision.LOW) in rules.ops
    return is_named or Precision.FULL not in map(rules.precision_of, LOWERABLE)


ALL_FOLLOW = Rules(compute_dtype="float16").follow(*LOWERABLE)

ALMOST = {
    **PRESETS,
    "only products": get_rules("O0").low("dot_general"),
    "no products": Rules().full("dot_general"),
    "no products at all": Rules().full(*ops.ops_of(Precision.LOW)),
    "products kept": Rules().keep(*ops.ops_of(Precision.LOW)),
    "all but one kept": Rules(default=Precision.LOW).keep(*LOWERABLE[1:]),
    "all kept": Rules(default=Precision.LOW).keep(*LOWERABLE),
    "all kept, one full": Rules(default=Precision.LOW).keep(*LOWERABLE).full("exp"),
    "all followed, one full": ALL_FOLLOW.full("tanh"),
    "all followed, a solver full": ALL_FOLLOW.full("cholesky"),
    "all followed, by default full": dataclasses.replace(
        ALL_FOLLOW, default=Precision.FULL
    ),
    "all but one followed": Rules(default=Precision.FULL).follow(*LOWERABLE[1:]),
    "low everywhere": get_rules("O3").low("exp"),
    "full by default": get_rules("O0").full("exp"),
    "a scope": get_rules("O0").scope("head", "low"),
    "a full scope": get_rules("O0").scope("head", "full"),
    "float8": get_rules("O0").float8("dot_general"),
}


@pytest.mark.parametrize("name", ALMOST)
def test_rules_that_change_nothing_are_found_as_by_a_look_at_every_op(name):
    rules = ALMOST[name]
    assert is_identity(rules) == is_identity_by_every_op(rules)
    for op in ("dot_general", "exp"):
        for path in ("", "M/head", "M/LayerNorm_0"):
            expected = asks_for_low_by_every_op(rules, op, path)
            assert asks_for_low(rules, op, path) == expected


def test_o1_is_low_for_matmuls_and_float32_for_all_else():
    rules = get_rules("O1")
    assert rules.precision_of("dot_general") is Precision.LOW
    assert rules.precision_of("add") is Precision.FULL
    assert rules.precision_of("reshape") is Precision.FULL
    assert Precision.FOLLOW not in count(rules)


def test_o2_is_low_but_for_the_full_table():
    rules = get_rules("O2")
    assert rules.precision_of("add") is Precision.LOW
    assert rules.precision_of("exp") is Precision.FULL


def test_o3_is_low_wherever_there_is_a_low_form():
    rules = get_rules("O3")
    assert all(rules.precision_of(op) is Precision.LOW for op in LOWERABLE)
    assert rules.precision_of("cholesky") is Precision.FULL
    assert rules.precision_of("pallas_call") is Precision.KEEP
    assert rules.precision_in("M/LayerNorm_0") is None


def test_torch_widens_and_knows_no_norm_layers():
    rules = get_rules("torch")
    assert rules.precision_of("add") is Precision.WIDEST
    assert rules.precision_of("integer_pow") is Precision.FULL
    assert rules.scopes == ()


def test_ascend_s_modes_are_presets():
    assert get_rules("allow_mix_precision") == get_rules("mixed")
    assert get_rules("force_fp16") == get_rules("O3", compute_dtype="float16")
    convolutions = get_rules("allow_fp32_to_fp16")
    low = [op for op in OPS if convolutions.precision_of(op) is Precision.LOW]
    assert low == ["conv_general_dilated"]
    assert convolutions.compute_dtype == np.float16


def test_the_device_is_asked_for_its_half_dtype_when_a_function_is_called():
    """And not before: ``jax.distributed.initialize()`` has to come first."""
    program = """
import jax, jmp_lite as jmp
rules = jmp.get_rules("mixed", "half")
assert jmp.Rules.from_json(rules.to_json()) == rules
low = jmp.autocast(lambda x: x @ x, rules)
jmp.explain(lambda x: x @ x, compute_dtype="half")
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
x = jax.numpy.ones((2, 2))
name = jax.numpy.dtype(jmp.half_dtype()).name
assert f":{name.replace('float', 'f')}[2,2] = dot" in str(jax.make_jaxpr(low)(x)), name
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_another_compute_dtype(name):
    rules = get_rules(name, "f16")
    assert rules.compute_dtype == np.dtype("float16")
    assert dataclasses.replace(rules, compute_dtype=PRESETS[name].compute_dtype) == (
        get_rules(name)
    )


# ----------------------------------------------------------------------------- edits


@pytest.mark.parametrize(
    ("dtype", "meant"),
    [
        ("float32", "full"),
        ("bfloat16", "low"),
        ("f16", "low"),
        ("float8_e4m3fn", "float8"),
    ],
)
def test_a_dtype_is_not_a_precision(dtype, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        get_rules("mixed").scope("head", dtype)


def test_a_function_of_several_ops_needs_a_scope():
    with pytest.raises(ValueError, match="'gelu' is a function of several ops"):
        get_rules("mixed").full("gelu")


def test_an_edit_is_a_new_value_and_leaves_the_old_one():
    rules = get_rules("mixed")
    edited = (
        rules.full("tanh", "erf").low("add").follow("exp").widest("mul").keep("sub")
    )
    assert rules == get_rules("mixed")
    expected = dict(tanh="full", erf="full", add="low", exp="follow", mul="widest")
    for op, precision in {**expected, "sub": "keep"}.items():
        assert edited.precision_of(op) is Precision(precision)
    assert edited.low("tanh").precision_of("tanh") is Precision.LOW


def test_rules_are_equal_by_value_whatever_the_order_of_edits():
    a = get_rules("mixed").full("tanh").low("add")
    b = get_rules("mixed").low("add").full("tanh")
    assert a == b
    assert len({a, b}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.default = Precision.LOW


def test_the_first_scope_that_matches_decides():
    rules = get_rules("mixed").scope("head", "full").scope("head|LayerNorm", "low")
    assert rules.precision_in("M/head") is Precision.FULL
    assert rules.precision_in("M/LayerNorm_0") is Precision.LOW
    assert rules.precision_in("M/RMSNorm_0") is None


def test_carries_are_found_by_path():
    rules = get_rules("mixed").carry("layers", "follow").carry(".", "full")
    assert RuleLookup(rules).carry("LM/layers") == "follow"
    assert RuleLookup(rules).carry("LM/solver") == "full"
    assert RuleLookup(get_rules("mixed")).carry("LM") is None


@pytest.mark.parametrize("spelling", ["full", "FULL", "Full", Precision.FULL])
def test_a_precision_may_be_spelt_in_any_case(spelling):
    assert parse_precision(spelling) is Precision.FULL


BAD_EDITS = {
    "an unknown op": (
        lambda r: r.low("tanhh"),
        "Unknown op 'tanhh'.*mean 'tanh'.*explain",
    ),
    "a kept op": (
        lambda r: r.low("pallas_call"),
        "'pallas_call' cannot be LOW.*kernel",
    ),
    "a kept op, full": (lambda r: r.full("random_bits"), "cannot be FULL.*random bits"),
    "no 16-bit form": (lambda r: r.low("cholesky"), "cannot be LOW.*stays FULL"),
    "a loop": (lambda r: r.low("scan"), "'scan' contains other ops.*those ops"),
    "a precision of old": (
        lambda r: r.scope("norm", "full_inside"),
        "'full_inside' is gone.*use 'full'",
    ),
    "a precision": (lambda r: r.scope("x", "hgih"), "Unknown precision 'hgih'"),
    "a pattern": (lambda r: r.scope("(", "low"), r"regular expression, got '\('"),
    "no pattern": (lambda r: r.scope(3, "low"), "regular expression, got 3"),
    "a carry": (lambda r: r.carry("x", "low"), "Unknown precision of a carry 'low'"),
    "a dtype": (lambda r: get_rules("mixed", "bf61"), "Unknown dtype 'bf61'"),
    "an op by its name in jax.numpy": (
        lambda r: r.full("matmul"),
        "Unknown op 'matmul'. Did you mean 'dot_general'.*jmp_lite.explain",
    ),
    "letters that changed places": (lambda r: r.low("tahn"), "Did you mean 'tanh'"),
    "a dtype for a preset": (
        lambda r: get_rules("float16"),
        "name of a preset.*the dtype 'float16'.*compute_dtype='float16'",
    ),
    "a preset": (
        lambda r: get_rules("mixd"),
        "Unknown preset 'mixd'.*mean 'mixed'.*one of mixed, float8, int8, O0",
    ),
    "a level": (lambda r: get_rules("O4"), "Unknown preset 'O4'.*O0, O1, O2, O3"),
    "8 bits to compute in": (
        lambda r: get_rules("mixed", "float8_e5m2"),
        "16 bits.*got float8_e5m2. For float8 products use the preset 'float8'",
    ),
}


@pytest.mark.parametrize("name", BAD_EDITS)
def test_a_bad_edit_is_an_error_that_names_the_accepted_values(name):
    edit, fragment = BAD_EDITS[name]
    with pytest.raises(ValueError, match=fragment) as caught:
        edit(get_rules("mixed"))
    assert len(str(caught.value)) < 300


def test_a_list_of_ops_is_answered_with_how_to_name_them():
    with pytest.raises(TypeError, match=r"full\('exp', 'log'\), got \['exp'\]"):
        get_rules("mixed").full(["exp"])


# ----------------------------------------------------------------------------- JSON

RULES = st.builds(
    Rules,
    compute_dtype=st.sampled_from(["bfloat16", "float16"]),
    ops=st.dictionaries(
        st.sampled_from(LOWERABLE),
        st.sampled_from(list(Precision)),
        max_size=4,
    ).map(lambda ops: tuple(ops.items())),
    default=st.sampled_from([Precision.FOLLOW, Precision.LOW, Precision.WIDEST]),
    scopes=st.lists(
        st.tuples(
            st.sampled_from(["head", "^LM/", r"Dense_\d"]),
            st.sampled_from(list(Precision)),
        )
    ).map(tuple),
    carries=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["follow", "full"]))
    ).map(tuple),
)


@hypothesis.given(RULES, st.sampled_from(["", "M/head"]))
def test_any_rules_that_change_nothing_are_found_as_by_a_look_at_every_op(rules, path):
    assert is_identity(rules) == is_identity_by_every_op(rules)
    expected = asks_for_low_by_every_op(rules, "dot_general", path)
    assert asks_for_low(rules, "dot_general", path) == expected


@hypothesis.given(RULES)
def test_rules_read_back_from_their_json(rules):
    again = Rules.from_json(rules.to_json())
    assert again == rules
    assert hash(again) == hash(rules)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_back_from_their_json(name):
    assert Rules.from_json(get_rules(name).to_json()) == get_rules(name)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{", "rules as JSON: Expecting"),
        ("[]", "JSON object, got list"),
        ('{"opps": {}}', "Unknown field of rules 'opps'.*Did you mean 'ops'"),
        ('{"ops": []}', "ops as a JSON object, got list"),
        ('{"ops": {"exxp": "low"}}', "Unknown op 'exxp'.*Did you mean 'exp"),
        (
            '{"scopes": ["head"]}',
            r"scopes as a list of pairs \[pattern, precision\], got",
        ),
        ('{"compute_dtype": "int8"}', "Unknown dtype 'int8'"),
        ('{"default": "lowest"}', "Unknown precision 'lowest'"),
        ('{"MatMul": {"precision_reduce": {"flag": "yes"}}}', "'MatMul', got 'yes'"),
    ],
)
def test_malformed_json_names_the_bad_part(text, fragment):
    with pytest.raises(ValueError, match=fragment):
        Rules.from_json(text)


def test_ascend_s_json_becomes_rules():
    flags = {"MatMul": "false", "Exp": "true", "LayerNorm": "false", "Tanh": "true"}
    text = json.dumps(
        {op: {"precision_reduce": {"flag": flag}} for op, flag in flags.items()}
    )
    rules = Rules.from_json(text)
    assert rules.precision_of("dot_general") is Precision.FULL
    assert rules.precision_of("exp") is Precision.LOW
    assert rules.precision_of("tanh") is Precision.LOW
    for op in ("erf", "log", "reduce_sum", "conv_general_dilated", "add"):
        assert rules.precision_of(op) is Precision.FOLLOW
    assert rules.precision_of("cholesky") is Precision.FULL, "it has no other form"
    assert rules.precision_in("M/LayerNorm_0") is Precision.FULL
    assert rules.compute_dtype == np.float16
    assert Rules.from_json(rules.to_json()) == rules


def test_layers_of_ascend_are_found_in_a_program_of_jax():
    def model(x):
        h = jax.nn.relu(jax.nn.log_softmax(x @ W) * 2)
        return jnp.mean(h @ W)

    layers = {"MatMul": "true", "Relu": "true", "LogSoftmaxV2": "false"}
    flags = {**layers, "ReduceMeanD": "true"}
    text = json.dumps(
        {op: {"precision_reduce": {"flag": flag}} for op, flag in flags.items()}
    )
    rows = explain(model, Rules.from_json(text))(X).rows
    found = {row.op: row.precision for row in rows}
    assert found["dot_general"] == found["max"] == found["reduce_sum"] == "float16"
    assert found["exp"] == found["log"] == "float32"


def test_ascend_s_operators_without_a_counterpart_warn_once():
    text = json.dumps(
        {
            name: {"precision_reduce": {"flag": "true"}}
            for name in ("NPUGetFloatStatus", "MatMul", "LARSV2")
        }
    )
    with pytest.warns(UserWarning, match="NPUGetFloatStatus, LARSV2") as seen:
        rules = Rules.from_json(text)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert rules.precision_of("dot_general") is Precision.LOW


def test_every_operator_of_ascend_s_table_is_an_op_or_a_scope_here():
    for operator, op in ASCEND_OPS.items():
        assert op in OPS or op.startswith("scope:"), operator


@pytest.mark.parametrize("passes", ["upcasts", 3, None])
def test_passes_are_a_tuple_of_names(passes):
    with pytest.raises(ValueError, match=r"Expected passes as a tuple of names"):
        Rules(passes=passes)


def test_rules_with_fewer_passes_are_read_back():
    rules = get_rules("mixed").without_pass("upcasts")
    assert Rules.from_json(rules.to_json()) == rules
    assert rules.passes == ("labels", "rematerialize", "scan_weight_gradients")
    assert Rules.from_json("{}").passes == get_rules("mixed").passes
    with pytest.raises(ValueError, match=r"Expected passes as a tuple of names"):
        Rules.from_json('{"passes": "upcasts"}')


@pytest.mark.parametrize("field", ["scopes", "carries"])
@pytest.mark.parametrize("pairs", [("head", "full"), {"head": "full"}, None, [("a",)]])
def test_anything_but_pairs_is_an_error_that_shows_a_pair(field, pairs):
    with pytest.raises(ValueError, match=rf"Expected {field} as a tuple of pairs, su"):
        Rules(**{field: pairs})


def test_a_compiled_pattern_is_an_error_because_json_has_none():
    with pytest.raises(ValueError, match=r"as a string, got re\.compile\('head'\)"):
        get_rules("mixed").scope(re.compile("head"), "full")


@pytest.mark.parametrize("ops", [{"exp": "low"}, "exp", 3, [("exp",)]])
def test_ops_in_another_form_are_an_error_that_shows_a_pair(ops):
    with pytest.raises(ValueError, match=r"Expected ops as a tuple of pairs, such as"):
        Rules(ops=ops)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Rules(ops=((["exp"], "low"),)), r"name of an op.*got \['exp'\]"),
        (lambda: get_rules("mixed").precision_of(["exp"]), r"name of an op.*\['exp'\]"),
        (lambda: get_rules("mixed").precision_in(None), "path of an op.*got None"),
        (lambda: get_rules(["mixed"]), r"Unknown preset.*Did you mean 'mixed'"),
        (lambda: get_rules(None), "Unknown preset 'None'"),
        (lambda: Rules.from_json('{"scopes": null}'), "scopes as a list of pairs"),
        (lambda: Rules.from_json('{"carries": 3}'), "carries as a list of pairs"),
        (lambda: Rules.from_json(None), "the text of JSON, got NoneType"),
        (lambda: Rules.from_json({}), r"got dict\. Pass json\.dumps of it"),
        (
            lambda: Rules.from_json('{"ops": {"dot_general": {"format": [1]}}}'),
            r"Unknown format '\[1\]'",
        ),
    ],
)
def test_an_object_of_another_type_is_an_error_that_shows_it(call, words):
    with pytest.raises(ValueError, match=words):
        call()
