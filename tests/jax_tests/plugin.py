"""A pytest plugin that sends the functions of JAX's tests through autocast.

``driver.py`` loads it. It replaces ``jax.jit``, ``jax.grad`` and the other transforms
for callers in the tests' folder; JAX itself calls the original ones. It writes a line
of JSON for each test that begins, and one for each test that ends.
"""

import functools
import importlib.util
import inspect
import json
import os
import pathlib
import signal
import sys

import jax
import jax.test_util
import numpy as np
import pytest
from jax._src import public_test_util, test_util
from jax.extend import core

import jmp_lite as jmp

TRANSFORMS = (
    *("jit", "grad", "value_and_grad", "vjp", "jvp", "linearize"),
    *("jacfwd", "jacrev", "hessian", "vmap"),
)
TOLERANCE = 0.05
"""How far 16 bits may be from float32, beside the largest number or 1."""
SECONDS = 180
"""How long one test may take."""
REAL = frozenset([np.dtype("float32"), np.dtype("complex64")])

# It changes nothing, but is not known to: each equation is planned and run.
O0 = jmp.get_rules("O0").scope("a scope that does not exist", "low")


# ---------------------------------------------------------------------- the functions


def is_array(leaf):
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def traced(fun):
    """Returns a function that is traced and evaluated at each call, as a control.

    It fails where a test asks for the original function: its Python control flow, its
    name in messages, or the number of its traces.
    """

    @functools.wraps(fun)
    def through(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        structure = []

        def of_arrays(*arrays):
            given = list(leaves)
            for i, array in zip(at, arrays, strict=True):
                given[i] = array
            args, kwargs = jax.tree.unflatten(tree, given)
            out, out_tree = jax.tree.flatten(fun(*args, **kwargs))
            structure.append(out_tree)
            return out

        arrays = [leaves[i] for i in at]
        jaxpr = jax.make_jaxpr(of_arrays)(*arrays)
        return jax.tree.unflatten(structure[-1], core.jaxpr_as_fun(jaxpr)(*arrays))

    return through


WRAPPERS = {
    "control": traced,
    "O0": functools.partial(jmp.autocast, rules=O0),
    "mixed": jmp.autocast,
}


def wrapped(transform, wrap, folder):
    """Returns a transform that first wraps functions of callers in a folder."""

    @functools.wraps(transform)
    def of_function(*args, **kwargs):
        caller = sys._getframe(1).f_code.co_filename
        if not caller.startswith(folder):
            return transform(*args, **kwargs)
        if not args and not {"fun", "f"} & set(kwargs):  # A decorator with options.
            return functools.partial(of_here, **kwargs)
        return of_here(*args, **kwargs)

    def of_here(*args, **kwargs):
        name = next((name for name in ("fun", "f") if name in kwargs), None)
        fun = kwargs.pop(name) if name else args[0]
        fun = wrap(fun) if callable(fun) else fun
        return transform(fun, *(args if name else args[1:]), **kwargs)

    return of_function


def comparing(wrap):
    """Returns a ``check_grads`` that compares derivatives with the plain function's.

    Finite differences of a function in 16 bits mean nothing.
    """

    def check_grads(
        f, args, order, modes=("fwd", "rev"), atol=None, rtol=None, eps=None
    ):
        del eps
        args = tuple(args)
        modes = [modes] if isinstance(modes, str) else list(modes)
        compare(f, wrap(f), args, order, modes, atol, rtol)

    return check_grads


def compare(plain, other, args, order, modes, atol, rtol):
    """Compares two functions and their derivatives of all orders up to one."""
    expected, actual = plain(*args), other(*args)
    atol, rtol = (
        public_test_util._merge_tolerance(given, test_util.default_gradient_tolerance)
        for given in (atol, rtol)
    )
    test_util.check_close(actual, expected, atol=atol, rtol=rtol)
    if not order:
        return
    random = functools.partial(test_util.rand_like, np.random.RandomState(0))
    if "fwd" in modes:
        tangents = jax.tree.map(random, args)
        pair = [pushed(fun, tangents) for fun in (plain, other)]
        compare(*pair, args, order - 1, modes, atol, rtol)
    if "rev" in modes:
        cotangents = jax.tree.map(random, expected)
        pair = [pulled(fun, cotangents) for fun in (plain, other)]
        compare(*pair, args, order - 1, modes, atol, rtol)


def pushed(fun, tangents):
    return lambda *args: jax.jvp(fun, args, tangents)[1]


def pulled(fun, cotangents):
    return lambda *args: jax.vjp(fun, *args)[1](cotangents)


# -------------------------------------------------------------------- the comparisons


def is_near(actual, desired):
    """Whether two float32 arrays are equal up to roundings to 16 bits."""
    try:
        actual, desired = np.asarray(actual), np.asarray(desired)
        dtypes = {actual.dtype, desired.dtype}
        if not dtypes & REAL or any(dtype.kind not in "fc" for dtype in dtypes):
            return False
        actual, desired = np.broadcast_arrays(actual, desired)
    except Exception:
        return False
    actual, desired = (x.astype(np.complex128) for x in (actual, desired))
    finite = np.isfinite(desired)
    if not np.array_equal(actual[~finite], desired[~finite], equal_nan=True):
        return False
    largest = max(1.0, np.max(np.abs(desired[finite]), initial=0))
    difference = np.abs(actual[finite] - desired[finite])
    return bool(np.all(difference <= TOLERANCE * largest))


def loosened(check, is_method=False):
    """Returns a comparison that accepts float32 numbers that are near."""

    @functools.wraps(check)
    def checked(*args, **kwargs):
        actual, desired = args[1:3] if is_method else args[:2]
        if not is_near(actual, desired):
            check(*args, **kwargs)

    return checked


def loosen():
    """Loosens the comparisons of numbers that JAX's tests use."""
    names = ("allclose", "array_equal", "array_almost_equal", "equal", "almost_equal")
    for name in names:
        name = f"assert_{name}"
        setattr(np.testing, name, loosened(getattr(np.testing, name)))
    case = test_util.JaxTestCase
    for name in ("assertEqual", "assertAlmostEqual"):
        setattr(case, name, loosened(getattr(case, name), is_method=True))


# --------------------------------------------------------------------------- the tests


def pytest_addoption(parser):
    group = parser.getgroup("autocast")
    group.addoption("--mode", choices=["plain", *WRAPPERS], default="plain")
    group.addoption("--outcomes", type=pathlib.Path)
    group.addoption("--only", type=pathlib.Path, help="a file with names of tests")


def load_helpers(checkout):
    """Makes the modules of a checkout importable that no package of JAX contains."""
    for path in checkout.glob("jax/_src/*_test_util.py"):
        name = f"jax._src.{path.stem}"
        if importlib.util.find_spec(name) is None:
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            setattr(jax._src, path.stem, module)


def pytest_configure(config):
    load_helpers(config.rootpath)
    mode = config.getoption("mode")
    folder = os.path.join(config.rootpath, "tests", "")
    config.pluginmanager.register(Outcomes(config.getoption("outcomes")))
    if mode == "plain":
        return
    wrap = WRAPPERS[mode]
    for name in TRANSFORMS:
        setattr(jax, name, wrapped(getattr(jax, name), wrap, folder))
    for module in (jax.test_util, test_util):
        module.check_grads = comparing(wrap)
    if mode == "mixed":
        loosen()


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("only")
    if chosen is not None:
        names = set(chosen.read_text().splitlines())
        items[:] = [item for item in items if name_of(item.nodeid) in names]


def name_of(nodeid):
    return nodeid.removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    def stop(*_):
        raise TimeoutError(f"The test takes more than {SECONDS} seconds.")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


class Outcomes:
    """Writes what happens to each test.

    Args:
      path: the file.
    """

    def __init__(self, path):
        self._file = path.open("a", buffering=1)

    def _write(self, **line):
        self._file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self._write(test=name_of(nodeid), outcome="began")

    def pytest_runtest_logreport(self, report):
        if report.outcome == "failed":
            self._write(test=name_of(report.nodeid), outcome="failed", **fault(report))
        elif report.when == "call" or report.outcome == "skipped":
            self._write(test=name_of(report.nodeid), outcome=report.outcome)

    def pytest_collectreport(self, report):
        if report.outcome == "failed":
            self._write(test=name_of(report.nodeid), outcome="failed", **fault(report))


def fault(report):
    """Returns the message of a failure, and the line of this library it came from."""
    text = report.longrepr
    crash = getattr(text, "reprcrash", None)
    if crash is None:
        return {"message": str(text)[-500:], "where": ""}
    entries = [
        entry.reprfileloc
        for traceback, *_ in text.chain
        for entry in traceback.reprentries
        if getattr(entry, "reprfileloc", None)
    ]
    ours = [at for at in entries if f"jmp_lite{os.sep}" in str(at.path)]
    at = (ours or entries)[-1]
    path = str(at.path).partition(f"site-packages{os.sep}")[2] or str(at.path)
    path = (
        os.path.relpath(path, pathlib.Path(inspect.getfile(jmp)).parents[1])
        if (ours)
        else path
    )
    return {"message": crash.message[:2000], "where": f"{path}:{at.lineno}"}
