"""What the kernels of an HLO program move and multiply.

The law: a kernel reads what its results need, once, and writes its results. A slice
reads the slice, an in-place update writes the update, and a loop runs its kernels as
often as it turns. No operand is read for more than its size, however many
instructions of the kernel use it.

Bytes are those of main memory, a TPU's padding to whole tiles included. What lies in
a TPU's on-chip memory moves nothing; its copies from there and to there do.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.hlo import Array, Computation, Instruction, Module, trip_count


@dataclass(frozen=True)
class Matmul:
    """A dot, a gemm or a convolution."""

    operands: tuple[str, str]  # their dtypes
    result: str  # its dtype
    flops: int  # two for each product that enters a result
    precision: str = "default"  # or "high", "highest"

    @property
    def dtypes(self) -> str:
        """`bf16`, `bf16->f32` if the result is wider, `bf16xf32` if they are mixed."""
        operands = "x".join(dict.fromkeys(self.operands))
        return operands if operands == self.result else f"{operands}->{self.result}"


@dataclass(frozen=True)
class Kernel:
    """One kernel, and what one run of it does."""

    name: str
    kind: str  # a fusion's kind, a custom call's target, else the opcode
    op_name: str  # the JAX operation that it comes from, as far as XLA knows
    dtype: str  # of the results
    bytes_read: int
    bytes_written: int
    matmuls: tuple[Matmul, ...] = ()
    collectives: tuple[tuple[str, int], ...] = ()  # dtype and bytes of each
    is_custom_call: bool = False
    trips: int = 1  # how often the program runs it

    @property
    def bytes_moved(self) -> int:
        """Bytes that all its runs read and write."""
        return self.trips * (self.bytes_read + self.bytes_written)


def executed(module: Module) -> tuple[Kernel, ...]:
    """The kernels that the program runs, in their order.

    Of a conditional the branch that moves most bytes counts. A loop whose length
    depends on values counts as one trip: `unknown_loops` names them.
    """
    return tuple(_executed(module, module.entry, 1))


def unknown_loops(module: Module) -> tuple[str, ...]:
    """The loops whose number of trips depends on values."""
    loops = {loop.name: loop for _, loop in module.loops.values()}
    return tuple(n for n, loop in loops.items() if trip_count(module, loop) is None)


# Which instructions run.

_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "domain",
    }
)
# These name or reserve memory: nothing moves.
_FREE_TARGETS = frozenset(["AllocateBuffer", "ConcatBitcast"])
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_CALLED = ("to_apply", "calls", "called_computations")


def _executed(module: Module, where: Computation, trips: int) -> Iterator[Kernel]:
    for instruction in where.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            # The condition is left out: it is scalars, and none if the GPU knows the
            # number of trips.
            (body,) = instruction.calls("body")
            count = trip_count(module, instruction)
            turns = trips * (1 if count is None else count)
            yield from _executed(module, module.computations[body], turns)
        elif opcode == "conditional":
            branches = (
                tuple(_executed(module, module.computations[name], trips))
                for name in instruction.calls(*_BRANCHES)
            )
            yield from max(branches, key=lambda b: sum(k.bytes_moved for k in b))
        elif opcode in ("call", "async-start"):
            (called,) = instruction.calls(*_CALLED)
            yield from _executed(module, module.computations[called], trips)
        elif not _is_free(instruction):
            yield replace(_kernel(module, where, instruction), trips=trips)


def _is_free(instruction: Instruction) -> bool:
    """Whether nothing runs here: names, constants, the ends of asynchronous pairs."""
    if instruction.opcode == "custom-call":
        return instruction.attribute("custom_call_target") in _FREE_TARGETS
    is_end = instruction.opcode.endswith(("-done", "-update"))
    return is_end or instruction.opcode in _FREE


# What one of them does.


@dataclass(frozen=True)
class _Graph:
    """The instructions inside one kernel."""

    nodes: dict[str, Instruction]  # each behind those that it reads
    roots: tuple[str, ...]  # the results
    overwrites: frozenset[str]  # the scatters that do not read what they replace

    def sizes(self, node: Instruction) -> list[int]:
        """Elements of the operands."""
        return [self.nodes[name].elements for name in node.operands]


def _kernel(module: Module, where: Computation, instruction: Instruction) -> Kernel:
    instruction = _synchronous(instruction)
    operands = {name: where.instructions[name] for name in instruction.operands}
    graph = _graph(module, instruction, operands)
    results = _results(graph, instruction)
    updates = [_updates_in_place(graph, node, array) for node, array in results]
    needs = _needs(graph, frozenset(name for chain in updates for name in chain))
    written = (
        _traffic(array, sum(_update_size(graph, name) for name in chain))
        if chain
        else _traffic(array, array.elements)
        for (_, array), chain in zip(results, updates, strict=True)
    )
    return Kernel(
        name=instruction.name,
        kind=instruction.attribute("custom_call_target")
        or instruction.attribute("kind")
        or instruction.opcode,
        op_name=instruction.op_name or graph.nodes[graph.roots[0]].op_name,
        dtype=",".join(dict.fromkeys(array.dtype for _, array in results)),
        bytes_read=sum(_read(o, needs[name]) for name, o in operands.items()),
        bytes_written=sum(written),
        matmuls=tuple(_matmuls(graph)),
        collectives=tuple(_collectives(graph)),
        is_custom_call=instruction.opcode == "custom-call",
    )


def _synchronous(instruction: Instruction) -> Instruction:
    """The operation that a `-start` begins, with the result that it will have."""
    opcode, shape = instruction.opcode.removesuffix("-start"), instruction.shape
    if opcode != instruction.opcode and isinstance(shape, tuple):
        if opcode == "copy":  # (destination, source, context)
            shape = shape[0]
        elif opcode != "all-reduce":  # (operands, results, contexts...)
            shape = shape[1]
    return replace(instruction, opcode=opcode, shape=shape)


def _graph(
    module: Module, instruction: Instruction, operands: Mapping[str, Instruction]
) -> _Graph:
    nodes = {
        name: replace(operand, opcode="parameter", operands=(), op_name="")
        for name, operand in operands.items()
    }
    root = _inline(module, instruction, instruction.operands, "", nodes, {})
    is_tuple = nodes[root].opcode == "tuple"
    overwrites = frozenset(
        name
        for name, node in nodes.items()
        if node.opcode == "scatter"
        for combiner in node.calls("to_apply")
        if module.computations[combiner].root.opcode == "parameter"
    )
    return _Graph(nodes, nodes[root].operands if is_tuple else (root,), overwrites)


def _inline(
    module: Module,
    instruction: Instruction,
    operands: tuple[str, ...],
    prefix: str,
    nodes: dict[str, Instruction],
    known: dict[tuple[object, ...], str],
) -> str:
    """Puts an instruction, or what its fusion holds, among `nodes`; returns its name.

    Fusions hold copies of one instruction (two slices of one operand at one index):
    equal ones become one node.
    """
    name = prefix + instruction.name + "/"
    if instruction.opcode != "fusion":
        literal = (instruction.literal, instruction.attributes, instruction.shape)
        key = (instruction.opcode, operands, *literal)
        if key not in known:
            nodes[name] = replace(instruction, name=name, operands=operands)
            known[key] = name
        return known[key]
    (called,) = instruction.calls("calls")
    names: dict[str, str] = {}
    for inner in module.computations[called].instructions.values():
        reads = tuple(names[operand] for operand in inner.operands)
        if inner.opcode == "parameter":
            names[inner.name] = operands[int(inner.literal)]
        elif inner.opcode == "get-tuple-element" and nodes[reads[0]].opcode == "tuple":
            element = int(inner.attribute("index"))
            names[inner.name] = nodes[reads[0]].operands[element]
        else:
            names[inner.name] = _inline(module, inner, reads, name, nodes, known)
    return names[module.computations[called].root.name]


def _results(
    graph: _Graph, instruction: Instruction
) -> list[tuple[Instruction | None, Array]]:
    """Of each result the array, and the node that computes it alone.

    Scratch memory, which library calls return beside their results, is none.
    """
    arrays = instruction.arrays
    roots = [graph.nodes[name] for name in graph.roots]
    nodes = roots if len(roots) == len(arrays) else [None] * len(arrays)
    results = list(zip(nodes, arrays, strict=True))
    if any(node.opcode == "custom-call" for node in graph.nodes.values()):
        scratch = [
            a for a in arrays[1:] if a.dtype in ("s8", "u8") and len(a.dims) == 1
        ]
        results = [pair for pair in results if pair[1] not in scratch]
    return results


# Bytes.


def _updates_in_place(
    graph: _Graph, node: Instruction | None, array: Array
) -> tuple[str, ...]:
    """The updates that make a result out of an operand, if nothing else does.

    XLA gives such a result the operand's memory: where the operand is still needed,
    the program holds a copy of it.
    """
    chain = []
    while node and node.opcode in ("bitcast", "dynamic-update-slice", "scatter"):
        if node.opcode != "bitcast":
            chain.append(node.name)
        node = graph.nodes[node.operands[0]]
    is_operand = node is not None and node.opcode == "parameter"
    return tuple(chain) if is_operand and node.arrays[0].space == array.space else ()


def _update_size(graph: _Graph, name: str) -> int:
    node = graph.nodes[name]
    update = 1 if node.opcode == "dynamic-update-slice" else -1
    return graph.nodes[node.operands[update]].elements


def _needs(graph: _Graph, in_place: frozenset[str]) -> Mapping[str, int]:
    """How many elements of each node the results need."""
    needs: Counter[str] = Counter()
    for root in graph.roots:
        needs[root] = graph.nodes[root].elements
    for node in reversed(graph.nodes.values()):
        shares = _shares(graph, node, needs[node.name], node.name in in_place)
        for name, share in zip(node.operands, shares, strict=True):
            needs[name] = min(needs[name] + share, graph.nodes[name].elements)
    return needs


# Each element of the result may need any element of the operands.
_WHOLE = frozenset(
    {
        "dot",
        "convolution",
        "custom-call",
        "sort",
        "fft",
        "cholesky",
        "triangular-solve",
        "reduce-window",
        "select-and-scatter",
        "topk",
    }
)


def _shares(
    graph: _Graph, node: Instruction, wanted: int, in_place: bool
) -> Iterable[int]:
    """How many elements of each operand so many elements of a node need."""
    sizes, total, opcode = graph.sizes(node), node.elements, node.opcode
    if opcode in _WHOLE or not wanted:
        return sizes if wanted else [0] * len(sizes)
    if opcode in ("slice", "dynamic-slice", "gather"):
        return [min(sizes[0], wanted), *sizes[1:]]
    if opcode == "dynamic-update-slice":
        kept = 0 if in_place else min(wanted, total - sizes[1])
        return [kept, min(sizes[1], wanted), *sizes[2:]]
    if opcode == "scatter":
        added = 0 if node.name in graph.overwrites else min(sizes[0], sizes[-1])
        targets = len(sizes) // 2
        return [added if in_place else wanted] * targets + sizes[targets:]
    if opcode in ("reduce", "concatenate"):
        return [math.ceil(size * wanted / total) for size in sizes]
    if opcode in ("broadcast", "pad"):
        return [min(size, wanted) for size in sizes]
    return [wanted if size == total else size for size in sizes]


def _read(operand: Instruction, needed: int) -> int:
    if len(operand.arrays) == 1:
        return _traffic(operand.arrays[0], needed)
    return sum(_traffic(array, array.elements) for array in operand.arrays)


def _traffic(array: Array, elements: int) -> int:
    return 0 if array.space else array.nbytes(elements)


# Products.


def _matmuls(graph: _Graph) -> Iterator[Matmul]:
    for node in graph.nodes.values():
        target = node.attribute("custom_call_target")
        multiplications = 0
        if node.opcode == "dot":
            axes = node.attribute("lhs_contracting_dims").split(",")
            multiplications = _dot(graph, node, axes)
        elif target.startswith("__cublas$"):
            found = re.search(
                r'"lhs_contracting_dimensions":\[([^\]]*)', node.attributes
            )
            dims = re.findall(r"\d+", found[1] if found else "")
            multiplications = _dot(graph, node, dims)
        elif target == "__cudnn$blockScaledDot":
            last = len(graph.nodes[node.operands[0]].arrays[0].dims) - 1
            multiplications = _dot(graph, node, [str(last)])
        elif node.opcode == "convolution" or target.startswith("__cudnn$conv"):
            multiplications = _convolution(graph, node, target)
        if multiplications:
            first, second = (
                graph.nodes[name].arrays[0].dtype for name in node.operands[:2]
            )
            yield Matmul(
                operands=(first, second),
                result=node.arrays[0].dtype,
                flops=2 * multiplications,
                precision=_precision(node),
            )


def _dot(graph: _Graph, node: Instruction, contracting: Iterable[str]) -> int:
    dims = graph.nodes[node.operands[0]].arrays[0].dims
    return node.elements * math.prod(dims[int(axis)] for axis in contracting if axis)


def _convolution(graph: _Graph, node: Instruction, target: str) -> int:
    """Multiplications of a convolution, none for padding and dilation.

    The TPU compiler writes a batched dot so, with holes between the batches.
    """
    first, second = (graph.nodes[name].arrays[0] for name in node.operands[:2])
    image, kernel, result = first, second, node.arrays[0]
    if target.endswith("BackwardInput"):  # labels and window are the forward pass's
        image, result = result, image
    elif target.endswith("BackwardFilter"):
        kernel, result = result, kernel
    labels = re.split("_|->", node.attribute("dim_labels"))
    sizes = [
        dict(zip(names, array.dims, strict=True))
        for names, array in zip(labels, (image, kernel, result), strict=True)
    ]
    window = dict(part.split("=") for part in node.attribute("window").split())
    taps = math.prod(
        _taps(*(size[str(axis)] for size in sizes), window, axis)
        for axis in range(len(image.dims) - 2)
    )
    groups = int(node.attribute("batch_group_count") or 1)
    return sizes[0]["b"] // groups * sizes[1]["i"] * sizes[1]["o"] * taps


def _taps(
    image: int, kernel: int, result: int, window: Mapping[str, str], axis: int
) -> int:
    """Pairs of a result and a tap along one axis that meet an element of the image."""

    def field(name: str, default: str) -> str:
        return window[name].split("x")[axis] if name in window else default

    stride, low = int(field("stride", "1")), int(field("pad", "0_0").split("_")[0])
    holes, spread = int(field("lhs_dilate", "1")), int(field("rhs_dilate", "1"))
    at = np.arange(result)[:, None] * stride + np.arange(kernel) * spread - low
    meets = (at >= 0) & (at <= (image - 1) * holes) & (at % holes == 0)
    return int(meets.sum())


def _precision(node: Instruction) -> str:
    found = re.search(r'operand_precision"?[=:][{\[]([^\]}]*)', node.attributes)
    wishes = found[1].lower() if found else ""
    return next((p for p in ("highest", "high") if p in wishes), "default")


# Communication.

_COLLECTIVES = frozenset(
    {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    }
)


def _collectives(graph: _Graph) -> Iterator[tuple[str, int]]:
    """The dtype and the bytes of the larger of what goes in and what comes out."""
    for node in graph.nodes.values():
        if node.opcode in _COLLECTIVES:
            before, after = Counter[str](), Counter[str]()
            for array in (a for o in node.operands for a in graph.nodes[o].arrays):
                before[array.dtype] += array.nbytes()
            for array in node.arrays:
                after[array.dtype] += array.nbytes()
            yield from (before | after).items()
