"""There is one record for each op, and the sets of ops are views of the records."""

import ast
import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest

import jmp_lite
from jmp_lite import ops
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.jaxprs import params, products
from jmp_lite.ops import Precision

PACKAGE = pathlib.Path(jmp_lite.__file__).parent
TABLE = (PACKAGE / "ops.py").read_text()
OTHERS = {
    path.relative_to(PACKAGE): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "ops.py"
}
NAMES = {op.name for op in ops.OPS}


# ---------------------------------------------------------------------- the records


def test_each_op_has_exactly_one_record():
    assert len(ops.OPS) == len(NAMES)
    assert all(ops.record_of(op.name) is op for op in ops.OPS)
    assert ops.record_of("an op nobody knows") is None


def test_all_ops_of_a_group_have_one_precision_and_one_reason():
    classes = {(op.group, op.precision, op.reason) for op in ops.OPS}
    assert len(classes) == len({group for group, _, _ in classes})
    assert all(reason for _, _, reason in classes)


def test_a_line_of_the_table_is_names_and_the_fields_that_are_true_of_them():
    table = "x | LOW | why: so\n all: moves\n a\n b c: adds\n\ny | KEEP | not\n d"
    assert list(ops._read(table)) == [
        ops.Op("a", "x", Precision.LOW, "why: so", moves=True),
        ops.Op("b", "x", Precision.LOW, "why: so", moves=True, adds=True),
        ops.Op("c", "x", Precision.LOW, "why: so", moves=True, adds=True),
        ops.Op("d", "y", Precision.KEEP, "not"),
    ]


@pytest.mark.parametrize("block", ["x | LOW | why\n a: movs", "x | LO | why\n a", "x"])
def test_a_misspelt_table_is_an_error(block):
    with pytest.raises((TypeError, KeyError, ValueError)):
        list(ops._read(block))


def test_the_table_imports_nothing_but_the_standard_library():
    modules = set()
    for node in ast.walk(ast.parse(TABLE)):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    assert "enum" in modules
    assert {name.split(".")[0] for name in modules} <= set(sys.stdlib_module_names)


ENUMERATION = """
import gc, importlib, json, pkgutil, warnings
from jax.extend.core import Primitive

warnings.simplefilter("ignore")
importlib.import_module("jax.experimental.pallas")
for package in ("jax._src", "jax._src.cudnn", "jax.experimental"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name in ("mosaic", "xla_bridge", "__main__"):
            continue
        try:
            importlib.import_module(f"{package}.{module.name}")
        except BaseException:
            continue  # It needs a package or a device that does not exist here.
print(json.dumps([p.name for p in gc.get_objects() if isinstance(p, Primitive)]))
"""


def installed_primitives():
    """Returns the names of all primitives of JAX but those that only kernels contain.

    In a process of its own: other tests import packages that define more.
    """
    result = subprocess.run(
        [sys.executable, "-c", ENUMERATION], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_every_primitive_of_the_installed_jax_has_a_record():
    found = installed_primitives()
    assert {"dot_general", "scan", "pallas_call", "bcoo_todense"} <= found
    assert len(found) > 250
    new = sorted(found - {op.name for op in ops.OPS})
    assert not new, f"decide where they belong: {new}"


@pytest.mark.parametrize(
    ("op", "precision"),
    [
        ("dot_general", "low"),
        ("conv_general_dilated", "low"),
        ("exp", "full"),
        ("reduce_sum", "full"),
        ("psum", "full"),
        ("scatter-add", "full"),
        ("cholesky", "full"),
        ("add", "follow"),
        ("integer_pow", "follow"),
        ("select_n", "follow"),
        ("sin", "follow"),
        ("pallas_call", "keep"),
        ("random_bits", "keep"),
        ("bitcast_convert_type", "keep"),
        ("an op nobody knows", "keep"),
    ],
)
def test_the_classes_of_mixed_are_the_design_s(op, precision):
    assert get_rules("mixed").precision_of(op) is Precision(precision)


# ----------------------------------------------------------------------- the fields


def sentences(doc):
    """Returns the description of each attribute in a docstring."""
    _, _, attributes = inspect.cleandoc(doc).partition("Attributes:\n")
    found = re.findall(r"^  (\w+): (.+(?:\n {4}.+)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def test_each_field_has_one_sentence():
    described = sentences(ops.Op.__doc__)
    assert tuple(described) == ops.Op._fields
    for text in described.values():
        assert text.endswith(".")
        assert ". " not in text


def views(source):
    """Returns the names of the sets that are made from each field."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "_ops_that":
                    found.setdefault(call.args[0].value, set()).add(node.targets[0].id)
    return found


def read_of_the_table(source):
    """Returns the names that a module imports from the table and uses, and fields."""
    tree = ast.parse(source)
    imported, used, attributes, of_module = set(), set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "jmp_lite.ops":
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
            of_module.update([node.attr] if ast.unparse(node.value) == "ops" else ())
    read = (imported & used) | of_module
    return read | (attributes if read & {"OPS", "record_of"} else set())


READ = set().union(*map(read_of_the_table, OTHERS.values()))


@pytest.mark.parametrize("field", [f for f in ops.Op._fields if f != "name"])
def test_each_field_has_a_reader_outside_of_the_table(field):
    assert READ & {field, *views(TABLE).get(field, ())}


def test_each_set_of_the_table_has_a_reader_in_another_module():
    sets = {name for name, value in vars(ops).items() if isinstance(value, frozenset)}
    assert len(sets) > 25
    assert sets <= READ


def test_the_search_for_readers_can_fail():
    source = "from jmp_lite.ops import MOVING, OPS\nx in MOVING; y.adds"
    assert read_of_the_table(source) == {"MOVING"}
    assert read_of_the_table(f"{source}; OPS") == {"MOVING", "OPS", "adds"}
    assert read_of_the_table("ops.ADDING; y.moves") == {"ADDING"}
    assert views('A = B & _ops_that("adds")') == {"adds": {"A"}}


# ------------------------------------------------------------------------- the views

MEMBERS = {
    "MOVING": ("reshape gather all_gather", "max neg convert_element_type"),
    "SENDING": ("all_gather ppermute all_to_all", "psum pvary reshard"),
    "SELECTING": ("reshape max argmax lt scatter-max", "neg abs add"),
    "TAKING_SLICES": ("gather dynamic_slice", "slice scatter"),
    "CUTTING": ("slice dynamic_slice split", "gather pad"),
    "PASSING": ("optimization_barrier", "tie copy"),
    "EXACT": ("neg abs sort reshape", "add round convert_element_type"),
    "KEEPING_NUMBERS": ("reshape broadcast_in_dim pvary", "slice neg concatenate"),
    "KEEPING_ERRORS": ("neg reshape convert_element_type", "add mul max"),
    "KEEPING_DIGITS": ("reshape add mul reduce_sum round", "exp max tanh"),
    "ADDING": ("add sub add_any", "mul reduce_sum"),
    "SUMMING": ("reduce_sum cumsum scatter-add", "add psum reduce_max"),
    "SCALING": ("add mul neg reduce_sum", "max reshape square"),
    "BOUNDING": ("max min abs", "clamp reduce_max"),
    "BROADCASTING": ("add select_n pow clamp", "add_any dot_general"),
    "COMPARING": ("lt ge eq ne", "eq_to max is_finite"),
    "ORDERING": ("max min sort cummax", "argmax lt reduce_max"),
    "PICKING": ("argmax top_k", "sort reduce_max"),
    "DISCERNING": ("lt argmax is_finite", "sort max"),
    "AMPLIFYING": ("exp log pow sqrt div round lgamma sin", "add mul tanh sign"),
    "AMPLIFYING_DIVISORS": ("div", "rem sqrt"),
    "AMPLIFYING_LARGE": ("exp sinh", "log rsqrt"),
    "SATURATING": ("tanh logistic erf", "sin atan exp clamp"),
    "SPREADING": ("exp exp2", "expm1 log"),
    "BENDING": ("exp tanh pow round erf_inv", "square rsqrt sqrt div sign max"),
    "POSITIONAL": ("sin cos", "tan tanh"),
    "ROOTS": ("sqrt rsqrt pow", "cbrt square"),
    "POWERS": ("square integer_pow", "pow mul"),
    "SOLVING": ("cholesky triangular_solve custom_linear_solve", "fft linear_call"),
    "HOLDING_SOLVERS": ("custom_linear_solve linear_call", "cholesky scan"),
    "INSIDE_OF_FUNCTIONS": ("add sqrt reshape reduce_sum rsqrt", "exp max all_gather"),
    "LINEAR": ("add neg reshape reduce_sum convert_element_type", "mul max cumsum"),
    "RANDOM": ("random_bits threefry2x32", "iota bitcast_convert_type"),
    "CHEAP": ("exp tanh add max reduce_sum reshape", "gather sort all_gather pow"),
    "ADDED_UP": ("gather reduce_max erf broadcast_in_dim", "reshape max div tanh"),
    "MOVING_OR_CASTING": ("reshape convert_element_type", "max neg"),
    "HIGHER_ORDER": ("jit scan while shard_map", "reduce custom_linear_solve add"),
    "EDITABLE": ("dot_general exp cholesky add", "and pallas_call scan"),
    "LOWERABLE": ("dot_general exp add psum", "cholesky fft pallas_call"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_set_contains_the_ops_that_its_name_promises(name):
    inside, outside = (set(names.split()) for names in MEMBERS[name])
    assert inside | outside <= NAMES
    assert inside <= getattr(ops, name)
    assert not outside & getattr(ops, name)


def test_each_set_has_examples():
    sets = {name for name, value in vars(ops).items() if isinstance(value, frozenset)}
    assert sets == set(MEMBERS)


def test_the_higher_order_ops_are_those_that_every_tool_enters():
    with_rules_of_their_own = {"cond", "scan", "while", "shard_map"}
    assert {*params.CALLED, *with_rules_of_their_own} == ops.HIGHER_ORDER


def test_the_ops_that_are_low_are_the_matrix_products():
    assert ops.ops_of(Precision.LOW) == products.PRODUCTS
    assert not ops.HIGHER_ORDER - ops.ops_of(Precision.KEEP)


# ------------------------------------------------- what other modules know of ops


def sets_of_ops(source):
    """Yields the tuples, lists and sets of names of ops in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            strings = {n.value for n in node.elts if isinstance(n, ast.Constant)}
            if len(strings) > 1 and strings <= NAMES:
                yield frozenset(strings)


# These name primitives for what they are, not for a property.
BY_IDENTITY = [
    {"mul", "div"},  # By a power of two.
    {"add", "add_any"},  # Sums of tangents; a difference has two signs.
    {"and", "convert_element_type"},  # The condition of a loop.
    {"add", "sub"},  # Counts of steps.
    {"jit", "custom_jvp_call"},  # Calls that a loop's body may repeat.
    {"scan", "while"},
    {"dot_general", "ragged_dot_general"},  # Ascend's matrix products.
    {"reduce_sum", "rsqrt"},  # The statistics of a norm.
]


@pytest.mark.parametrize("module", OTHERS, ids=str)
def test_other_modules_keep_no_sets_of_ops(module):
    if module.parts[0] in ("autocasting", "formats.py", "insight"):
        found = set(sets_of_ops(OTHERS[module]))
        assert [names for names in found if names not in BY_IDENTITY] == []


def test_the_search_for_sets_of_ops_can_fail():
    source = 'op in ("exp", "log"); {"add": 1}; ["add"]; ("add", "x"); {"sin", "cos"}'
    found = {" ".join(sorted(names)) for names in sets_of_ops(source)}
    assert found == {"exp log", "cos sin"}
