"""The text of an HLO program, read into data.

The law: everything that is said of a program comes from its optimised text, the one
thing that XLA prints alike for every target.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Array:
    """The type of one array."""

    dtype: str  # HLO's name: "f32", "bf16", "pred", "token"
    dims: tuple[int, ...] = ()
    space: int = 0  # memory space: 0 is the device's main memory
    padding: float = 1.0  # elements stored for each one: a TPU's tiles are whole

    @property
    def elements(self) -> int:
        """How many there are: one in a scalar."""
        return math.prod(self.dims)

    @property
    def itemsize(self) -> float:
        """Bytes of one element: half a byte for 4-bit types, none for tokens."""
        bits = re.match(r"(?:bf|[sufc])(\d+)", self.dtype)
        return int(bits[1]) / 8 if bits else float(self.dtype == "pred")

    def nbytes(self, elements: int | None = None) -> int:
        """Bytes of so many of its elements, or of all, with their padding."""
        count = self.elements if elements is None else elements
        return round(count * self.padding * self.itemsize)


Shape = Array | tuple["Shape", ...]


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...] = ()
    attributes: str = ""
    literal: str = ""  # between the parentheses of a parameter or a constant
    op_name: str = ""  # the JAX operation that it comes from

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, out of their tuples."""
        return tuple(_leaves(self.shape))

    @property
    def elements(self) -> int:
        """Elements of the first array, which the others are usually shaped like."""
        return self.arrays[0].elements if self.arrays else 0

    def attribute(self, name: str) -> str:
        """The value of `name=value` without braces, quotes and `%`, or `""`."""
        found = re.search(rf"\b{name}=(?:{{([^{{}}]*)}}|([^\s,]+))", self.attributes)
        return (found[1] or found[2] or "").strip('%"') if found else ""

    def calls(self, *names: str) -> tuple[str, ...]:
        """The computations that attributes of these names refer to, in their order."""
        values = ",".join(self.attribute(name) for name in names)
        return tuple(part.strip(" %") for part in values.split(",") if part)


@dataclass(frozen=True)
class Computation:
    """Instructions, each behind those that it reads."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction


@dataclass(frozen=True)
class Module:
    """A parsed program."""

    computations: Mapping[str, Computation]
    entry: Computation

    @functools.cached_property
    def loops(self) -> Mapping[str, tuple[Computation, Instruction]]:
        """Of each loop's body and condition: where the loop stands, and the loop."""
        return {
            called: (where, instruction)
            for where in self.computations.values()
            for instruction in where.instructions.values()
            if instruction.opcode == "while"
            for called in instruction.calls("body", "condition")
        }


def parse(text: str) -> Module:
    """Reads the text of an HLO module, as `jax.stages.Compiled.as_text` gives it."""
    computations: dict[str, Computation] = {}
    header, entry, lines = None, "", []
    for line in _COMMENT.sub("", text).splitlines():
        if header is None:
            header, lines = _HEADER.match(line), []
        elif line.startswith("}"):
            computations[header[2]] = _computation(header[2], lines)
            entry = header[2] if header[1] else entry
            header = None
        elif line.strip():
            lines.append(line)
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    return Module(computations, computations[entry])


def parse_shape(text: str) -> Shape:
    """Reads `f32[2,3]{1,0:T(8,128)S(1)}`, or a tuple of such shapes."""
    text = text.strip()
    if text.startswith("("):
        return tuple(parse_shape(part) for part in _split(text[1:-1]))
    found = _ARRAY.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no HLO shape such as 'f32[2,3]{{1,0}}'")
    dims = tuple(int(dim.lstrip("<=")) for dim in found[2].split(",") if dim)
    layout = found[3] or ""
    space = re.search(r"S\((\d+)\)", layout)
    return Array(
        dtype=found[1],
        dims=dims,
        space=int(space[1]) if space else 0,
        padding=_padding(dims, layout),
    )


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often the body of a `while` runs, or None if values decide it.

    The GPU compiler writes the number down. The TPU compiler does not: there it
    follows from a counter whose start, step and bound are constants.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    (body,), (condition,) = loop.calls("body"), loop.calls("condition")
    test = module.computations[condition].root
    counter = _source(module.computations[condition], test.operands[0])
    if test.opcode != "compare" or counter.opcode != "get-tuple-element":
        return None
    index = int(counter.attribute("index"))
    bound = _constant(module, module.computations[condition], test.operands[1])
    start = _element(module, module.loops[body][0], loop.operands[0], index)
    step = _step(module, module.computations[body], index)
    if bound is None or start is None or not step:
        return None
    bound += {"LE": 1, "GE": -1}.get(test.attribute("direction"), 0)
    return max(0, math.ceil((bound - start) / step))


# The parser's parts.

_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{")
_ASSIGN = re.compile(r"\s*(ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^{}]*\})?")
_METADATA = re.compile(r'metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def _padding(dims: tuple[int, ...], layout: str) -> float:
    """What whole tiles along the innermost axes multiply the size by.

    `{0,1:T(8,128)(2,1)}` names the axes from the innermost on, then the tile; further
    tiles only order what lies within the first.
    """
    found = re.match(r"\{([\d,]*):T\(([\d,]+)\)", layout)
    if not found or not math.prod(dims):
        return 1.0
    sizes = [dims[int(axis)] for axis in found[1].split(",") if axis]
    tile = [int(size) for size in reversed(found[2].split(","))]
    sizes += [1] * (len(tile) - len(sizes))
    whole = (math.ceil(n / t) * t / n for n, t in zip(sizes, tile, strict=False))
    return math.prod(whole)


def _computation(name: str, lines: list[str]) -> Computation:
    parsed = [_instruction(line) for line in lines]
    instructions = {instruction.name: instruction for _, instruction in parsed}
    roots = [instruction for is_root, instruction in parsed if is_root]
    return Computation(name, instructions, roots[0])


def _instruction(line: str) -> tuple[bool, Instruction]:
    assign = _ASSIGN.match(line)
    if not assign:
        raise ValueError(f"no HLO instruction: {line!r}")
    start = assign.end()
    tuple_shaped = line[start] == "("
    end = _closing(line, start) if tuple_shaped else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        raise ValueError(f"no opcode behind the shape: {line!r}")
    close = _closing(line, opcode.end() - 1)
    inside, behind = line[opcode.end() : close - 1], line[close:]
    is_leaf = opcode[1] in ("parameter", "constant")
    op_name = _OP_NAME.search(behind)
    return bool(assign[1]), Instruction(
        name=assign[2],
        shape=parse_shape(line[start:end]),
        opcode=opcode[1],
        operands=() if is_leaf else tuple(re.findall(r"%([\w.-]+)", inside)),
        attributes=_METADATA.sub("", behind),
        literal=inside if is_leaf else "",
        op_name=op_name[1] if op_name else "",
    )


def _closing(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.end()
    raise ValueError(f"parenthesis at {start} is never closed: {text!r}")


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that stand outside all brackets."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            yield text[start:at]
            start = at + 1
    if text[start:].strip():
        yield text[start:]


def _leaves(shape: Shape) -> Iterator[Array]:
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from _leaves(part)


# A loop's counter.

_MOVES = ("copy", "copy-start", "copy-done", "bitcast", "reshape")


def _source(where: Computation, name: str) -> Instruction:
    """What a value is a copy of."""
    instruction = where.instructions[name]
    while instruction.opcode in _MOVES:
        instruction = where.instructions[instruction.operands[0]]
    return instruction


def _constant(module: Module, where: Computation, name: str) -> int | None:
    """The integer that a scalar is, if the program says it."""
    source = _source(where, name)
    if source.opcode == "constant" and re.fullmatch(r"-?\d+", source.literal):
        return int(source.literal)
    if source.opcode == "get-tuple-element":
        index = int(source.attribute("index"))
        return _element(module, where, source.operands[0], index)
    return None


def _element(module: Module, where: Computation, name: str, index: int) -> int | None:
    """The integer at `index` of a tuple, which may be the state of a loop."""
    source = _source(where, name)
    if source.opcode == "tuple":
        return _constant(module, where, source.operands[index])
    if source.opcode == "while":
        outer, loop = where, source
    elif source.opcode == "parameter" and where.name in module.loops:
        outer, loop = module.loops[where.name]
    else:
        return None
    body = module.computations[loop.calls("body")[0]]
    is_constant = _is_state(body, body.root, index)
    return _element(module, outer, loop.operands[0], index) if is_constant else None


def _is_state(body: Computation, root: Instruction, index: int) -> bool:
    """Whether the loop hands the value at `index` on as it is."""
    if root.opcode != "tuple":
        return False
    source = _source(body, root.operands[index])
    return source.opcode == "get-tuple-element" and _reads_state(body, source, index)


def _reads_state(body: Computation, source: Instruction, index: int) -> bool:
    state = _source(body, source.operands[0])
    return state.opcode == "parameter" and source.attribute("index") == str(index)


def _step(module: Module, body: Computation, index: int) -> int | None:
    """What the loop adds to the value at `index` in each trip."""
    if body.root.opcode != "tuple":
        return None
    change = _source(body, body.root.operands[index])
    if change.opcode not in ("add", "subtract"):
        return None
    before, by = (_source(body, name) for name in change.operands)
    if before.opcode != "get-tuple-element" and change.opcode == "add":
        before, by = by, before
    if before.opcode != "get-tuple-element" or not _reads_state(body, before, index):
        return None
    step = _constant(module, body, by.name)
    return -step if step and change.opcode == "subtract" else step
