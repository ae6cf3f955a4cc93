"""A pytest plug-in: records which functions of the package each test runs.

``python -m pytest -p mutations.record --record PATH`` writes JSON in each process: for
each test its seconds, and the functions, as ``"scaling/state.py:get_loss_scale"``.
Python 3.12 has ``sys.monitoring``, which costs nothing after the first call of a
function.
"""

import json
import os
import pathlib
import sys
import time

import pytest

import jmp_lite

_PACKAGE = str(pathlib.Path(jmp_lite.__file__).parent) + "/"
_TOOL = 3


class Recorder:
    """Records the functions that are called while a test runs."""

    def __init__(self, path):
        self._path = pathlib.Path(path)
        self._tests = {}
        self._called = set()
        sys.monitoring.use_tool_id(_TOOL, "mutations")
        start = sys.monitoring.events.PY_START
        sys.monitoring.register_callback(_TOOL, start, self._started)
        sys.monitoring.set_events(_TOOL, start)

    def _started(self, code, _):
        if code.co_filename.startswith(_PACKAGE):
            file = code.co_filename.removeprefix(_PACKAGE)
            self._called.add(f"{file}:{code.co_qualname}")
        return sys.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """Records one test."""
        self._called = set()
        sys.monitoring.restart_events()
        start = time.monotonic()
        result = yield
        seconds = time.monotonic() - start
        self._tests[item.nodeid] = [round(seconds, 2), sorted(self._called)]
        return result

    def pytest_sessionfinish(self):
        """Writes what each test called."""
        sys.monitoring.set_events(_TOOL, 0)
        sys.monitoring.free_tool_id(_TOOL)
        self._path.write_text(json.dumps(self._tests))


def pytest_addoption(parser):
    """Adds the option."""
    parser.addoption("--record", default=None)


def pytest_configure(config):
    """Records where the option is given."""
    if path := config.getoption("--record"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        config.pluginmanager.register(Recorder(f"{path}.{worker}"))
