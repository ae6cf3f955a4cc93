"""How much code each room of the package has, and the most that it may have.

A room may get smaller only. To raise a number, say in CONTRIBUTING.md what it bought.

    python tests/budget.py
"""

import ast
import collections
import io
import pathlib
import tokenize
from typing import NamedTuple

PACKAGE = pathlib.Path(__file__).parent.parent / "jmp_lite"


class Size(NamedTuple):
    """The size of a room.

    Attributes:
      lines: of code, without blank lines, comments and docstrings.
      files: of code.
      used_once: functions that one place alone uses.
      comments: in a hundred lines of code.
    """

    lines: int
    files: int
    used_once: int
    comments: int


BUDGET = {
    "autocasting": Size(4480, 28, 82, 11),
    "casting": Size(373, 4, 6, 3),
    "flax": Size(650, 4, 11, 4),
    "formats": Size(603, 8, 2, 9),
    "insight": Size(3687, 17, 44, 3),
    "jaxprs": Size(1832, 14, 47, 8),
    "optimizers": Size(1212, 8, 27, 5),
    "scaling": Size(1315, 6, 13, 4),
    "top": Size(778, 10, 8, 1),
    "training": Size(661, 3, 5, 4),
}
"""The most that a room may have, and the fewest comments."""


def room_of(path: pathlib.Path) -> str:
    """Returns the room of a file; ``top`` for the files beside the rooms."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "top"


def measure() -> dict[str, Size]:
    """Returns the size of each room."""
    paths = sorted(PACKAGE.rglob("*.py"))
    texts = {path: path.read_text() for path in paths}
    tokens = {path: _tokens(text) for path, text in texts.items()}
    uses = collections.Counter(
        name for text in texts.values() for name in _names(ast.parse(text))
    )
    lines, files, used_once, comments = (collections.Counter[str]() for _ in range(4))
    for path in paths:
        room, tree = room_of(path), ast.parse(texts[path])
        code = _lines(tokens[path], without={*_docstrings(tree)})
        lines[room] += code
        files[room] += code > 0
        comments[room] += sum(t.type == tokenize.COMMENT for t in tokens[path])
        used_once[room] += sum(  # A definition and one use.
            isinstance(node, ast.FunctionDef) and uses[node.name] == 2
            for node in tree.body
        )
    return {
        room: Size(n, files[room], used_once[room], round(100 * comments[room] / n))
        for room, n in sorted(lines.items())
    }


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    return [*tokenize.generate_tokens(io.StringIO(text).readline)]


_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def _lines(tokens: list[tokenize.TokenInfo], without: set[int]) -> int:
    found = set[int]()
    for token in tokens:
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - without)


def _names(tree: ast.Module):
    """Yields each name where it is defined, imported or used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.alias):
            yield node.name


def _docstrings(tree: ast.Module):
    """Yields the lines of all strings that stand alone."""
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and isinstance(node.value.value, str):
            yield from range(node.lineno, node.end_lineno + 1)


def broken(sizes: dict[str, Size]) -> list[str]:
    """Returns what is wrong with the sizes of rooms."""
    wrong = [
        f"{room} has {n} {name}, and may have {most}"
        for room, size in sizes.items()
        for name, n, most in zip(Size._fields[:3], size, BUDGET[room], strict=False)
        if n > most
    ]
    wrong += [
        f"{room} has {size.comments} comments in 100 lines, and had {least}"
        for room, size in sizes.items()
        if size.comments < (least := BUDGET[room].comments)
    ]
    return wrong + [
        f"{room} has {size.lines} lines: lower its budget of {BUDGET[room].lines}"
        for room, size in sizes.items()
        if size.lines < 0.98 * BUDGET[room].lines
    ]


def main() -> None:
    """Prints the sizes, as ``BUDGET`` has them."""
    sizes = measure()
    for room, size in sizes.items():
        print(f'    "{room}": Size{tuple(size)},')
    total = [sum(column) for column in zip(*sizes.values(), strict=True)]
    print(f"all: {total[0]} lines in {total[1]} files, {total[2]} functions used once")


if __name__ == "__main__":
    main()
