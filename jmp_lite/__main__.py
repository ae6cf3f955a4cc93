"""The command ``python -m jmp_lite doctor``."""

import argparse
import collections
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_lite as jmp
from jmp_lite.casting.dtypes import Device, explain_half_dtype


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments after ``python -m jmp_lite``; None for those of this process.

    Returns:
      The exit code: 0, or 1 if JAX finds no device, or the command is elsewhere.

    Raises:
      SystemExit: the arguments are not valid (code 2), or ask for help (code 0).
    """
    parser = argparse.ArgumentParser(
        "python -m jmp_lite", description="Mixed precision for JAX."
    )
    version = f"jmp_lite {jmp.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    about = "print versions, devices and the 16-bit dtype that they compute in"
    commands.add_parser("doctor", help=about, description=_ABOUT_DOCTOR)
    commands.add_parser("demo", help="say where the demo is")
    if parser.parse_args(argv).command == "doctor":
        return doctor()
    where = "The demo is examples/demo.py in the repository: make demo runs it."
    print(where, file=sys.stderr)
    return 1


_ABOUT_DOCTOR = """\
Prints the versions of jmp_lite, JAX and related packages, the settings of JAX that
change precision, the devices that JAX finds, and the 16-bit dtype that they compute in,
with the reason. Include this output in a bug report. The exit code is 1 if JAX finds no
device.
"""


def doctor() -> int:
    """Prints versions, settings and devices."""
    config: Any = jax.config
    rows = [("python", platform.python_version()), ("jmp_lite", jmp.__version__)]
    rows += [(name, version(name)) for name in ("jax", "jaxlib", "optax", "flax")]
    rows += [("x64", "on" if config.jax_enable_x64 else "off")]
    precision = config.jax_default_matmul_precision
    rows += [("matmul precision", precision or "not set: the backend chooses")]
    reason = why_no_device()
    rows += [("devices", f"none: {reason}")] if reason else describe_devices()
    for name, text in rows:
        print(f"{name:<18}{text}")
    return 1 if reason else 0


def why_no_device() -> str | None:
    """Returns why JAX finds no device; None if it finds one."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        return str(error) or "no backend that JAX_PLATFORMS names is there"
    return None


def version(package: str) -> str:
    """Returns the version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe_devices() -> list[tuple[str, str]]:
    """Returns the devices, and the half dtype of JAX's default device."""
    kinds = collections.Counter(f"{d.platform}: {d.device_kind}" for d in jax.devices())
    rows = [("devices", f"{count} x {kind}") for kind, count in kinds.items()]
    (default,) = jnp.zeros([]).devices()
    return [*rows, ("default device", str(default)), half_dtype_row(default)]


def half_dtype_row(device: Device) -> tuple[str, str]:
    """Returns the half dtype of a device, with the reason."""
    dtype, why = explain_half_dtype(device)
    emulated = "; it emulates float16" if device.platform == "tpu" else ""
    return "half dtype", f"{np.dtype(dtype).name}, because {why}{emulated}"


if __name__ == "__main__":
    sys.exit(main())
