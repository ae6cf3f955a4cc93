"""The public names and their signatures are those of `public_api.txt`, and no others.

To change one is a decision: `python tests/test_api.py` writes the file again, and the
changelog lists the change.
"""

import dataclasses
import enum
import inspect
import pathlib
import re

import pytest

import jmp_lite
import jmp_lite.linen
import jmp_lite.nnx
import jmp_lite.numerics
import jmp_lite.ops
import jmp_lite.plots
import jmp_lite.results
import jmp_lite.states

FROZEN = pathlib.Path(__file__).parent / "public_api.txt"
BUILT_IN = (tuple, str, dict, ValueError)
MODULES = (
    *(
        jmp_lite,
        jmp_lite.formats,
        jmp_lite.numerics,
        jmp_lite.ops,
        jmp_lite.results,
        jmp_lite.states,
    ),
    *(jmp_lite.linen, jmp_lite.nnx, jmp_lite.plots),
)


def public_names(module):
    return sorted(module.__all__)


def parameters(function):
    """Returns the parameters of a function as text, without types."""
    parts, is_keyword = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
        is_keyword |= parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        )
        default = parameter.default
        is_simple = default is None or isinstance(default, str | int | float | tuple)
        shown = (
            repr(default) if is_simple and not isinstance(default, enum.Enum) else "..."
        )
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        name = star.get(parameter.kind, "") + parameter.name
        parts.append(name if default is parameter.empty else f"{name}={shown}")
    return f"({', '.join(parts)})"


def members(cls):
    """Returns the public methods and attributes of a class as text."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    for name in sorted({*dir(cls), *(field.name for field in fields)}):
        if name.startswith("_") or any(hasattr(each, name) for each in BUILT_IN):
            continue
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, staticmethod | classmethod):
            yield f".{name}{parameters(value.__func__)}"
        elif inspect.isfunction(value):
            yield f".{name}{parameters(value)}"
        else:
            yield f".{name}"


def public_api():
    """Returns every public name with its signature, a line each."""
    lines = []
    for module in MODULES:
        for name in public_names(module):
            value, path = getattr(module, name), f"{module.__name__}.{name}"
            if inspect.isclass(value):
                is_made = not issubclass(value, enum.Enum | BaseException | dict)
                lines.append(path + (parameters(value) if is_made else ""))
                lines += [path + member for member in members(value)]
            else:
                lines.append(path + (parameters(value) if callable(value) else ""))
    return lines


def test_public_names_and_signatures_are_those_that_were_agreed_upon():
    assert public_api() == FROZEN.read_text().splitlines()


def test_a_changed_default_is_noticed():
    assert parameters(lambda a, *, b=1: None) == "(a, *, b=1)"
    assert parameters(lambda a, *b, c=None, **d: None) == "(a, *b, c=None, **d)"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    reference = FROZEN.parent.parent / "docs" / "api"
    text = "\n".join(page.read_text() for page in reference.glob("*.md"))
    prefix = "" if module is jmp_lite else f"{module.__name__}."
    for name in public_names(module):
        assert f":: {prefix}{name}\n" in text, name


def test_the_reference_gives_a_reason_for_each_name_at_the_root():
    page = (FROZEN.parent.parent / "docs" / "api" / "names.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(jmp_lite.__all__)
    assert f"these {len(listed)} names" in page
    assert len(listed) <= 45


if __name__ == "__main__":
    FROZEN.write_text("\n".join(public_api()) + "\n")
