import importlib.metadata
import json
import os
import re
import subprocess
import sys
import types

import jax
import pytest

import jmp_lite as jmp
from jmp_lite import __main__ as cli

OPTIONAL = ("flax", "matplotlib", "rich", "sklearn")


@pytest.fixture(scope="module", autouse=True)
def plain_terminal():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.delenv("FORCE_COLOR", raising=False)
        yield


def in_a_subprocess_without(modules, *argv, **environment):
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({json.dumps(modules)}))
sys.argv[1:] = {json.dumps(argv)}
runpy.run_module("jmp_lite", run_name="__main__", alter_sys=True)
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


# ----------------------------------------------------------------------- the doctor


def test_a_tpu_that_emulates_float16_says_so():
    tpu, cpu = (types.SimpleNamespace(platform=name) for name in ("tpu", "cpu"))
    assert cli.half_dtype_row(tpu)[1].endswith("it emulates float16")
    assert "emulates" not in cli.half_dtype_row(cpu)[1]


def test_the_doctor_prints_versions_devices_and_the_half_dtype(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = {line[:18].strip(): line[18:] for line in lines}
    assert printed["jmp_lite"] == jmp.__version__
    for package in ("jax", "jaxlib", "optax", "flax"):
        assert printed[package] == importlib.metadata.version(package)
    assert printed["devices"] == "2 x cpu: cpu"
    assert printed["x64"] == "off"
    assert printed["half dtype"] == "bfloat16, because cpu devices compute in bfloat16"
    assert printed["matmul precision"] == "not set: the backend chooses"


def test_the_doctor_reads_the_current_configuration(capsys):
    with jax.enable_x64(True), jax.default_matmul_precision("tensorfloat32"):
        cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert re.search(r"^x64 +on$", printed, re.MULTILINE)
    assert re.search(r"^matmul precision +tensorfloat32$", printed, re.MULTILINE)


def test_the_doctor_prints_that_a_package_is_not_installed():
    assert cli.version("no-such-package-of-ours") == "not installed"


def test_the_doctor_needs_the_core_dependencies_alone():
    result = in_a_subprocess_without(OPTIONAL, "doctor")
    assert result.returncode == 0, result.stderr
    assert "half dtype" in result.stdout


def test_the_doctor_examines_a_machine_whose_backend_does_not_start():
    result = in_a_subprocess_without([], "doctor", JAX_PLATFORMS="no_such_platform")
    assert result.returncode == 1
    assert re.search(r"^devices +none: .*no_such_platform", result.stdout, re.MULTILINE)
    assert "Traceback" not in result.stderr


# ----------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        ([], "required: command"),
        (["train"], "invalid choice: 'train'"),
        (["doctor", "--epochs", "3"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_exit_with_2_and_a_message(argv, fragment, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(argv)
    assert error.value.code == 2
    assert re.search(fragment, capsys.readouterr().err)


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["--version"])
    assert error.value.code == 0
    assert capsys.readouterr().out == f"jmp_lite {jmp.__version__}\n"


def test_help_describes_what_the_doctor_prints(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["doctor", "--help"])
    assert error.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for fragment in ("devices that JAX finds", "exit code is 1"):
        assert fragment in text


def test_the_command_demo_prints_where_the_demo_is(capsys):
    assert cli.main(["demo"]) == 1
    printed = capsys.readouterr()
    where = "The demo is examples/demo.py in the repository: make demo runs it.\n"
    assert (printed.out, printed.err) == ("", where)
