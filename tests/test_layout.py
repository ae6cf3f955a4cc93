"""Modules import only what they may, and the lists of files and faults are current."""

import ast
import inspect
import pathlib
import re
import runpy
import subprocess
import sys

import budget
import pytest

import jmp_lite

PACKAGE = pathlib.Path(jmp_lite.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# Each room imports from itself and those before it in this list ...
ORDER = (
    *("casting", "jaxprs", "ops", "formats"),
    *("autocasting", "insight", "scaling", "optimizers", "training", "flax"),
    *("linen", "nnx"),
)
# ... except for these.
NOT_FROM = {
    # Backward rules receive true cotangents, in float32 under autocast.
    "scaling": {"formats", "insight"},
    "optimizers": {*ORDER[2:6]},
    "training": {"ops", "insight"},
    "flax": {"optimizers", "training"},
    "linen": {*ORDER} - {"flax", "linen"},
    "nnx": {*ORDER} - {"flax", "nnx"},
}
ALONE = {"mutables": set(), "plots": {"casting"}}
"""Rooms that are not in this order, with the rooms that they may import from."""
# The same inside of autocasting.
AUTOCASTING = (
    *("rules", "decide", "passes", "walk", "plan", "binding", "custom_functions"),
    *("run", "arguments", "api", "marks"),
)
CALL_EACH_OTHER = {("walk", "plan"), ("custom_functions", "run")}
"""Jaxprs are inside of jaxprs, and a rule is run: the first imports a type only."""
FLAX_ROOMS = {"flax"}
MORE = {"plots": {"matplotlib"}}
"""Further packages that a room may import: only its users load it."""
CORE_DEPENDENCIES = {"jax", "numpy", "optax", *sys.stdlib_module_names}
UNPROMISED = ("jax._src", "jax.extend", "jax.core", "jax.interpreters")


def room_of(module):
    return pathlib.PurePath(module).parts[0].removesuffix(".py")


def imported_names(source):
    """Yields every dotted name that a module imports, or reads off jax."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("jax."):
                yield dotted


INSIDE_OF_EQUATIONS = {"params", "source_info", "ctx", "debug_info"}


def reads_of_equations(source):
    """Yields what a module reads of equations, and where it compares type names."""
    for node in ast.walk(ast.parse(source)):
        is_read = isinstance(node, ast.Attribute) and node.attr in INSIDE_OF_EQUATIONS
        is_type = isinstance(node, ast.Compare) and ".__name__" in ast.unparse(node)
        if is_read or is_type:
            yield ast.unparse(node)


PARAMETERS = {
    *("jaxpr", "call_jaxpr", "branches", "cond_jaxpr", "body_jaxpr", "num_consts"),
    *("num_carry", "ft_in", "cond_nconsts", "body_nconsts", "length"),
    *("policy", "in_specs", "newly_manual_axes", "subfuns", "_prim"),
    *("dimension_numbers", "preferred_element_type", "out_dtype", "lhs_dilation"),
}
"""Names of parameters of equations."""
# Functions whose arguments have such names too: JAX's for users, and our classes.
OF_USERS = {
    *("dot_general", "ragged_dot_general", "scan", "shard_map", "replace", "_replace"),
    *("Explanation", "Converted"),
}


def parameters_named_in(source):
    """Yields the names of parameters, as strings and keyword arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in PARAMETERS:
            yield node.value
        elif isinstance(node, ast.Call):
            names = {k.arg for k in node.keywords} & PARAMETERS
            yield from (
                () if ast.unparse(node.func).split(".")[-1] in OF_USERS else names
            )


def may_import(room):
    """Returns the rooms that a room may import from."""
    if room in ALONE:
        return {*ALONE[room], room}
    before = ORDER[: ORDER.index(room) + 1]
    return {*before, "mutables"} - NOT_FROM.get(room, set())


def faults(module, source):
    """Lists what a module imports and should not."""
    room = room_of(module)
    is_core = room not in FLAX_ROOMS
    knows_jax = room_of(module) == "jaxprs"
    found = []
    for name in imported_names(source):
        top, *rest = name.split(".")
        is_checked = top == "jmp_lite" and room in {*ORDER, *ALONE}
        if is_checked and rest[0] not in may_import(room):
            found.append(f"{module}: {room} imports from {rest[0]}")
        if top == "jmp_lite" and rest[:1] == [room] == ["autocasting"]:
            inner = pathlib.PurePath(module).parts[1].removesuffix(".py")
            is_below = AUTOCASTING.index(rest[1]) > AUTOCASTING.index(inner)
            if is_below and (inner, rest[1]) not in CALL_EACH_OTHER:
                found.append(f"{module}: {inner} imports from {rest[1]}")
        if top in ("flax", "orbax") and room not in FLAX_ROOMS:
            found.append(f"{module}: imports {top}")
        known = {"jmp_lite", *CORE_DEPENDENCIES, *MORE.get(room, ())}
        if is_core and top not in known:
            found.append(f"{module}: {top} is no core dependency")
        is_private = top != "jmp_lite" and any(part.startswith("_") for part in rest)
        if not knows_jax and (is_private or name.startswith(UNPROMISED)):
            found.append(f"{module}: {name} is not promised by its library")
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_imports_only_what_its_room_may(module):
    assert faults(module, (PACKAGE / module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "fragment"),
    [
        ("casting/x.py", "from jmp_lite.scaling import loss_scale", "casting imports"),
        ("scaling/x.py", "import jmp_lite.training", "scaling imports from train"),
        ("scaling/x.py", "import flax.linen as nn", "imports flax"),
        ("scaling/x.py", "import pandas", "no core dependency"),
        ("insight/x.py", "import matplotlib", "no core dependency"),
        ("insight/x.py", "import jmp_lite.plots", "insight imports from plots"),
        (
            "autocasting/rules/x.py",
            "from jmp_lite.autocasting import api",
            "rules imports from api",
        ),
        ("jaxprs/x.py", "from jmp_lite.ops import Precision", "imports from ops"),
        ("autocasting/x.py", "import jmp_lite.insight", "imports from insight"),
        ("training/x.py", "from jax._src import core", "not promised"),
        ("training/x.py", "import jax\njax.extend.core.Jaxpr", "not promised"),
        ("training/x.py", "from optax import _private", "not promised"),
        ("autocasting/rules/x.py", "from jax.extend.core import Jaxpr", "not promised"),
    ],
)
def test_the_import_check_can_fail(module, source, fragment):
    assert any(fragment in fault for fault in faults(module, source))


def test_unpromised_jax_is_allowed_in_one_room_only():
    source = "from jax._src import core"
    assert faults("jaxprs/x.py", source) == []
    assert faults("ops.py", source) != []


READERS = [module for module in MODULES if room_of(module) in ORDER[2:5]]


@pytest.mark.parametrize("module", READERS, ids=str)
def test_only_the_room_jaxprs_reads_the_inside_of_equations(module):
    assert list(reads_of_equations((PACKAGE / module).read_text())) == []


# The files that make primitives of their own have the parameters of JAX's.
PRIMITIVES = ("bilinear.py", "gathers.py", "wide_dot.py")
BINDING = (
    *("structure.py", "params.py", "products.py", "sharding.py", "custom_rules.py"),
    *("coming.py", *PRIMITIVES),
)


@pytest.mark.parametrize(
    "module",
    [m for m in MODULES if room_of(m) == "jaxprs" and m.name not in BINDING] + READERS,
    ids=str,
)
def test_other_modules_do_not_know_the_names_of_parameters(module):
    assert list(parameters_named_in((PACKAGE / module).read_text())) == []


def test_the_checks_of_equations_can_fail():
    source = 'eqn.params["name"]\ntype(x).__name__ == "Zero"\nparts.eqns'
    found = {"eqn.params", "type(x).__name__ == 'Zero'"}
    assert set(reads_of_equations(source)) == found
    source = 'eqn["branches"]; bind(eqn, jaxpr=1); lax.scan(f, x, length=3)'
    assert sorted(parameters_named_in(source)) == ["branches", "jaxpr"]


def functions_in(source):
    """Yields the functions of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node


def n_lines(function):
    """Returns the number of lines of a function without its docstring."""
    first, *_ = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    n_all = function.end_lineno - function.lineno + 1
    return n_all - (first.end_lineno - first.lineno + 1) * is_docstring


def n_positional(function):
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return len([name for name in names if name not in ("self", "cls")])


def depth(node):
    """Returns how many functions are inside of each other, the node included."""
    inner = max(map(depth, ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.FunctionDef)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_functions_are_short_and_have_few_parameters(module):
    for function in functions_in((PACKAGE / module).read_text()):
        assert n_lines(function) <= 60, function.name
        assert n_positional(function) <= 6, function.name
        # A function, a closure, and a closure in that.
        assert depth(function) <= 3, function.name


def test_the_shape_of_a_function_is_measured():
    source = "def f(self, a, b, *, c):\n    'Text.'\n    def g():\n        pass\n"
    function, _ = functions_in(source)
    assert (n_lines(function), n_positional(function), depth(function)) == (3, 2, 2)


def test_few_types_are_any():
    sources = [(PACKAGE / module).read_text() for module in MODULES]
    n_any = sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for source in sources
        for node in ast.walk(ast.parse(source))
    )
    n_all = sum(len(source.splitlines()) for source in sources)
    assert 0 < 1000 * n_any / n_all < 15


def test_all_lists_the_public_names():
    public = {
        name
        for name, value in vars(jmp_lite).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(jmp_lite.__all__) == public
    assert sorted(jmp_lite.__all__) == sorted(set(jmp_lite.__all__))


@pytest.mark.parametrize("name", sorted(jmp_lite.__all__))
def test_every_public_function_and_class_has_a_docstring(name):
    value = getattr(jmp_lite, name)
    if callable(value):
        assert value.__module__.startswith("jmp_lite.")
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}("), "a dataclass's default one"


IMPORT_CHECK = """
import sys
{statement}
from jax._src import xla_bridge
assert not any(name.split(".")[0] == "flax" for name in sys.modules), "flax is loaded"
assert not xla_bridge.backends_are_initialized(), "a backend is initialized"
"""


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        (
            "import optax, jmp_lite; jmp_lite.loss_scaling(optax.sgd(1.0)); "
            "jmp_lite.DynamicLossScale()",
            None,
        ),
        ("import jmp_lite, flax", "flax is loaded"),
        ("import jmp_lite; jmp_lite.half_dtype()", "a backend is initialized"),
    ],
)
def test_importing_loads_no_flax_and_initializes_no_backend(statement, complaint):
    code = IMPORT_CHECK.format(statement=statement)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if complaint is None:
        assert result.returncode == 0, result.stderr
    else:
        assert complaint in result.stderr


TESTS = pathlib.Path(__file__).parent
CONTRIBUTING = (TESTS.parent / "CONTRIBUTING.md").read_text()
MUTATIONS = runpy.run_path(str(TESTS / "mutations" / "run.py"))


def test_each_fault_can_be_planted():
    faults = MUTATIONS["choose"](300, 0, "")
    assert len(set(faults)) == 300
    assert {fault.room for fault in faults} > {"autocasting", "insight", "scaling"}
    assert faults == MUTATIONS["choose"](300, 0, "")
    for fault in faults:
        code = (PACKAGE / fault.path).read_text()
        planted = ast.parse(MUTATIONS["planted"](fault, code))
        assert ast.dump(planted) != ast.dump(ast.parse(code)), fault


def missing_files(text):
    """Returns the files and folders that a text names and the project lacks."""
    names = set(re.findall(r"`([\w./-]+(?:\.py|/))`", text))
    rooms = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    roots = [TESTS.parent, *rooms]
    return sorted(n for n in names if not any((root / n).exists() for root in roots))


def test_the_files_that_contributing_names_exist():
    assert len(re.findall(r"\.py`", CONTRIBUTING)) > 30
    assert missing_files(CONTRIBUTING) == []
    assert missing_files("`ops.py`, `jaxprs/compat.py`") == ["jaxprs/compat.py"]


def test_contributing_contains_no_heading_or_row_twice():
    headings = re.findall(r"^#.*", CONTRIBUTING, re.MULTILINE)
    rows = re.findall(r"^\| .*", CONTRIBUTING, re.MULTILINE)
    # Several tables have the same header.
    rows = [row for row in rows if "`" in row]
    assert len(set(headings)) == len(headings)
    assert len(set(rows)) == len(rows)


def test_no_room_grows():
    assert budget.broken(budget.measure()) == []


def test_a_room_that_grows_loses_comments_or_shrinks_is_found():
    sizes = {room: size._replace() for room, size in budget.BUDGET.items()}
    assert budget.broken(sizes) == []
    room, size = next(iter(sizes.items()))
    for changed, words in (
        (size._replace(lines=size.lines + 1), "lines, and may have"),
        (size._replace(files=size.files + 1), "files, and may have"),
        (size._replace(used_once=size.used_once + 1), "used_once, and may have"),
        (size._replace(comments=size.comments - 1), "comments in 100 lines"),
        (size._replace(lines=size.lines // 2), "lower its budget"),
    ):
        (found,) = budget.broken({**sizes, room: changed})
        assert found.startswith(room)
        assert words in found


def test_code_is_counted_without_comments_docstrings_and_blank_lines(tmp_path):
    text = '\n'.join(
        [
            '"""Text', 'of two lines."""', "", "import os  # One.", "# Two.", "",
            "def f(x):", '    """Text."""', "    return (", "        x", "    )",
        ]
    )  # fmt: skip
    tokens = budget._tokens(text)
    lines = {*budget._docstrings(ast.parse(text))}
    assert budget._lines(tokens, without=lines) == 5
