"""Figures read from compiled programs, against figures computed by hand."""

import importlib.util
import math
import shutil
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import compiled, hlo, kernels
from benchmarks.compiled import TARGETS, Program, compile_for, devices, missing
from benchmarks.formats import chips
from benchmarks.hlo import Array


def program(text: str, target: str = "h100") -> Program:
    """Returns the program of an HLO text."""
    text = textwrap.dedent(text)
    return Program(target, text, arguments=0, outputs=0, aliased=0, temporaries=0)


def only(text: str) -> kernels.Kernel:
    """The one kernel of a program."""
    (kernel,) = program(text).rows
    return kernel


# Shapes.


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("f32[]", Array("f32")),
        ("bf16[2,3]", Array("bf16", (2, 3))),
        ("f32[2,3]{1,0}", Array("f32", (2, 3))),
        ("bf16[8,256]{1,0:T(8,128)(2,1)S(1)}", Array("bf16", (8, 256), space=1)),
        ("s32[<=9]{0}", Array("s32", (9,))),
        ("(f32[2]{0}, pred[])", (Array("f32", (2,)), Array("pred"))),
        ("((f32[2,1]), (), u32[])", ((Array("f32", (2, 1)),), (), Array("u32"))),
    ],
)
def test_a_shape_is_read_with_its_tuples_layout_and_memory_space(text, shape):
    assert hlo.parse_shape(text) == shape


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("f32", 40),
        ("bf16", 20),
        ("f8e4m3fn", 10),
        ("pred", 10),
        ("s4", 5),
        ("c64", 80),
        ("token", 0),
    ],
)
def test_bytes_follow_the_dtype(dtype, size):
    assert Array(dtype, (2, 5)).nbytes() == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[16,256]{1,0:T(8,128)}", 4 * 16 * 256),
        ("f32[5,8,64]{2,1,0:T(8,128)}", 4 * 5 * 8 * 128),
        ("f32[5,64,8]{1,2,0:T(8,128)}", 4 * 5 * 128 * 8),
        ("bf16[3,200]{1,0:T(8,128)(2,1)}", 2 * 8 * 256),
        ("s32[]{:T(128)}", 4 * 128),
        ("pred[1000]{0:T(1024)(128)(4,1)}", 1024),
        ("f32[0,3]{1,0:T(8,128)}", 0),
        ("f32[5,64,8]{1,2,0}", 4 * 5 * 64 * 8),
    ],
)
def test_tiles_are_whole(text, size):
    assert hlo.parse_shape(text).nbytes() == size


def test_part_of_a_padded_array_is_padded_as_the_whole():
    assert hlo.parse_shape("f32[12,8,64]{2,1,0:T(8,128)}").nbytes(512) == 4 * 1024


def test_text_that_is_no_shape_is_an_error_that_quotes_it():
    with pytest.raises(ValueError, match=r"'f32\(2,3\)' is no HLO shape"):
        hlo.parse_shape("f32(2,3)")


def test_text_that_is_no_module_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("module @jit_f {}")


def test_metadata_and_comments_do_not_reach_the_attributes():
    module = hlo.parse(
        textwrap.dedent(
            """
            ENTRY %main (x: f32[4]) -> (f32[4], f32[4]) {
              %x = f32[4]{0} parameter(0)
              %n = f32[4]{0} negate(%x), metadata={op_name="f(\\"a} calls=%no\\")/neg"}
              ROOT %t = (f32[4]{0}, /*index=1*/f32[4]{0}) tuple(%x, /*index=1*/%n)
            }
            """
        )
    )
    negate = module.entry.instructions["n"]
    assert (negate.opcode, negate.operands, negate.attributes) == (
        "negate",
        ("x",),
        ", ",
    )
    assert negate.op_name.endswith("/neg")
    assert module.entry.root.operands == ("x", "n")


# Bytes of one kernel. A sum has a term for each operand: 4 bytes for a number of f32
# and s32, 2 for one of bf16.

FUSED = """
    %fused ({parameters}) -> {result} {{
    {body}
    }}

    ENTRY %main ({parameters}) -> {result} {{
    {inputs}
      ROOT %fusion = {result} fusion({names}), kind=kLoop, calls=%fused
    }}
    """


def fusion(body: str, result: str, **parameters: str) -> kernels.Kernel:
    """The kernel of one fusion."""
    lines = [
        f"%{name} = {shape} parameter({number})"
        for number, (name, shape) in enumerate(parameters.items())
    ]
    inputs = "\n".join(lines)
    text = FUSED.format(
        parameters=", ".join(f"{n}: {s}" for n, s in parameters.items()),
        names=", ".join(f"%{name}" for name in parameters),
        result=result,
        inputs=inputs,
        body=inputs + "\n" + textwrap.dedent(body),
    )
    return only("\n".join(line.lstrip() for line in text.splitlines()))


def traffic(kernel: kernels.Kernel) -> tuple[int, int]:
    return kernel.bytes_read, kernel.bytes_written


def test_an_elementwise_kernel_reads_its_operands_and_writes_its_result():
    kernel = fusion(
        """
        %c = bf16[100] convert(%x)
        ROOT %a = bf16[100] add(%c, %y)
        """,
        "bf16[100]",
        x="f32[100]",
        y="bf16[100]",
    )
    assert traffic(kernel) == (400 + 200, 200)


def test_an_operand_with_several_users_is_read_once():
    kernel = fusion(
        """
        %a = f32[100] exponential(%x)
        %b = f32[100] negate(%x)
        %s = f32[10] slice(%x), slice={[0:10]}
        %r = f32[100] add(%a, %b)
        ROOT %t = (f32[100], f32[10]) tuple(%r, %s)
        """,
        "(f32[100], f32[10])",
        x="f32[100]",
    )
    assert traffic(kernel) == (400, 440)


def test_an_operand_given_twice_is_read_once():
    kernel = only(
        """
        ENTRY %main (x: f32[8,8]) -> f32[8,8] {
          %x = f32[8,8] parameter(0)
          ROOT %m = f32[8,8] multiply(%x, %x)
        }
        """
    )
    assert traffic(kernel) == (256, 256)


def test_a_scalar_that_is_broadcast_is_read_as_a_scalar():
    kernel = fusion(
        """
        %b = f32[100] broadcast(%s), dimensions={}
        ROOT %m = f32[100] multiply(%x, %b)
        """,
        "f32[100]",
        x="f32[100]",
        s="f32[]",
    )
    assert traffic(kernel) == (404, 400)


STACK = {"w": "f32[12,100]", "i": "s32[]"}


@pytest.mark.parametrize(
    "body",
    [
        """
        %z = s32[] constant(0)
        %d = f32[1,100] dynamic-slice(%w, %i, %z), dynamic_slice_sizes={1,100}
        ROOT %r = bf16[1,100] convert(%d)
        """,
        """
        %z = s32[] constant(0)
        %c = bf16[12,100] convert(%w)
        ROOT %d = bf16[1,100] dynamic-slice(%c, %i, %z), dynamic_slice_sizes={1,100}
        """,
        # XLA copies what two results need into both.
        """
        %z = s32[] constant(0)
        %d = f32[1,100] dynamic-slice(%w, %i, %z), dynamic_slice_sizes={1,100}
        %y = s32[] constant(0)
        %e = f32[1,100] dynamic-slice(%w, %i, %y), dynamic_slice_sizes={1,100}
        %a = f32[1,100] add(%d, %e)
        ROOT %r = bf16[1,100] convert(%a)
        """,
    ],
)
def test_a_slice_of_a_stack_reads_the_slice(body):
    assert traffic(fusion(body, "bf16[1,100]", **STACK)) == (400 + 4, 200)


def test_a_reduction_reads_all_of_the_stack():
    kernel = fusion(
        """
        %z = f32[] constant(0)
        ROOT %r = f32[100] reduce(%w, %z), dimensions={0}, to_apply=%sum
        """,
        "f32[100]",
        w="f32[12,100]",
    )
    assert traffic(kernel) == (4800, 400)


def test_an_update_in_place_writes_the_update_and_reads_nothing_else():
    kernel = fusion(
        """
        %z = s32[] constant(0)
        %b = f32[1,100] bitcast(%u)
        %n = f32[1,100] negate(%b)
        ROOT %d = f32[12,100] dynamic-update-slice(%w, %n, %i, %z)
        """,
        "f32[12,100]",
        u="f32[100]",
        **STACK,
    )
    assert traffic(kernel) == (400 + 4, 400)


def test_an_update_of_something_new_writes_all_of_it():
    kernel = fusion(
        """
        %z = s32[] constant(0)
        %f = f32[] constant(0)
        %w = f32[12,100] broadcast(%f), dimensions={}
        ROOT %d = f32[12,100] dynamic-update-slice(%w, %u, %i, %z)
        """,
        "f32[12,100]",
        u="f32[1,100]",
        i="s32[]",
    )
    assert traffic(kernel) == (400 + 4, 4800)


def test_an_update_of_a_converted_stack_reads_the_rest_and_writes_all():
    kernel = fusion(
        """
        %z = s32[] constant(0)
        %c = bf16[12,100] convert(%w)
        ROOT %d = bf16[12,100] dynamic-update-slice(%c, %u, %i, %z)
        """,
        "bf16[12,100]",
        u="bf16[1,100]",
        **STACK,
    )
    rest, update, index = 11 * 400, 200, 4
    assert traffic(kernel) == (rest + update + index, 2400)


def test_a_slice_of_a_broadcast_reads_what_it_needs():
    kernel = fusion(
        """
        %b = f32[12,100] broadcast(%x), dimensions={1}
        ROOT %s = f32[1,10] slice(%b), slice={[0:1], [0:10]}
        """,
        "f32[1,10]",
        x="f32[100]",
    )
    assert traffic(kernel) == (40, 40)


def test_a_gather_reads_what_it_gathers():
    kernel = only(
        """
        ENTRY %main (e: f32[5000,8], i: s32[10]) -> f32[10,8] {
          %e = f32[5000,8] parameter(0)
          %i = s32[10] parameter(1)
          ROOT %g = f32[10,8] gather(%e, %i), offset_dims={1}, slice_sizes={1,8}
        }
        """
    )
    assert traffic(kernel) == (320 + 40, 320)


@pytest.mark.parametrize(("combiner", "read"), [("add(%a, %b)", 320), ("", 0)])
def test_a_scatter_touches_what_it_updates(combiner, read):
    root = f"ROOT %r = f32[] {combiner}" if combiner else ""
    kernel = only(
        f"""
        %combine (a: f32[], b: f32[]) -> f32[] {{
          %a = f32[] parameter(0)
          {"" if combiner else "ROOT "}%b = f32[] parameter(1)
          {root}
        }}

        ENTRY %main (e: f32[5000,8], i: s32[10], u: f32[10,8]) -> f32[5000,8] {{
          %e = f32[5000,8] parameter(0)
          %i = s32[10] parameter(1)
          %u = f32[10,8] parameter(2)
          ROOT %s = f32[5000,8] scatter(%e, %i, %u), to_apply=%combine
        }}
        """
    )
    assert traffic(kernel) == (read + 40 + 320, 320)


def test_on_chip_memory_moves_nothing_and_a_copy_to_it_reads():
    rows = program(
        """
        ENTRY %main (x: f32[100]) -> f32[100] {
          %x = f32[100]{0} parameter(0)
          %s = (f32[100]{0:S(1)}, f32[100]{0}, u32[]{:S(2)}) copy-start(%x)
          %d = f32[100]{0:S(1)} copy-done(%s)
          %e = f32[100]{0:S(1)} exponential(%d)
          ROOT %c = f32[100]{0} copy(%e)
        }
        """
    ).rows
    assert [traffic(row) for row in rows] == [(400, 0), (0, 0), (0, 400)]


def test_an_asynchronous_slice_reads_the_slice():
    kernel = only(
        """
        ENTRY %main (x: f32[100]) -> f32[25] {
          %x = f32[100] parameter(0)
          %s = ((f32[100]), f32[25]{0}, s32[]) slice-start(%x), slice={[0:25]}
          ROOT %d = f32[25]{0} slice-done(%s)
        }
        """
    )
    assert traffic(kernel) == (100, 100)


def test_names_and_constants_are_no_kernels():
    rows = program(
        """
        ENTRY %main (x: f32[4,2]) -> (f32[8], f32[]) {
          %x = f32[4,2] parameter(0)
          %c = f32[] constant(1)
          %b = f32[8] bitcast(%x)
          %t = (f32[8], f32[]) tuple(%b, %c)
          %g = f32[8] get-tuple-element(%t), index=0
          %a = f32[8] custom-call(), custom_call_target="AllocateBuffer"
          ROOT %r = (f32[8], f32[]) tuple(%g, %c)
        }
        """
    ).rows
    assert rows == ()


# Loops and branches.


def loop(
    bound: str = "constant(7)",
    step: str = "add(%i, %one)",
    start: str = "constant(0)",
    direction: str = "LT",
    backend_config: str = "",
) -> Program:
    """A loop that multiplies a vector once a trip."""
    return program(
        f"""
        %body (s: (s32[], f32[100])) -> (s32[], f32[100]) {{
          %s = (s32[], f32[100]) parameter(0)
          %one = s32[] constant(1)
          %i = s32[] get-tuple-element(%s), index=0
          %next = s32[] {step}
          %x = f32[100] get-tuple-element(%s), index=1
          %m = f32[100] multiply(%x, %x)
          ROOT %r = (s32[], f32[100]) tuple(%next, %m)
        }}

        %condition (s: (s32[], f32[100])) -> pred[] {{
          %s = (s32[], f32[100]) parameter(0)
          %i = s32[] get-tuple-element(%s), index=0
          %n = s32[] {bound}
          ROOT %t = pred[] compare(%i, %n), direction={direction}
        }}

        ENTRY %main (x: f32[100]) -> f32[100] {{
          %x = f32[100] parameter(0)
          %start = s32[] {start}
          %t = (s32[], f32[100]) tuple(%start, %x)
          %w = (s32[], f32[100]) while(%t), condition=%condition, body=%body{
            backend_config
        }
          ROOT %y = f32[100] get-tuple-element(%w), index=1
        }}
        """
    )


def multiplies(compiled_program: Program) -> int:
    return next(row.trips for row in compiled_program.rows if row.kind == "multiply")


@pytest.mark.parametrize(
    ("settings", "trips"),
    [
        ({}, 7),
        ({"direction": "LE"}, 8),
        ({"start": "constant(3)"}, 4),
        ({"start": "constant(9)"}, 0),
        ({"step": "add(%one, %i)"}, 7),
        (
            {
                "start": "constant(6)",
                "step": "subtract(%i, %one)",
                "direction": "GE",
                "bound": "constant(0)",
            },
            7,
        ),
        ({"backend_config": ', backend_config={"known_trip_count":{"n":"5"}}'}, 5),
    ],
)
def test_the_body_of_a_loop_counts_once_for_each_step(settings, trips):
    found = loop(**settings)
    assert multiplies(found) == trips
    assert found.unknown_loops == ()


@pytest.mark.parametrize(
    "settings",
    [
        {"bound": "get-tuple-element(%s), index=0"},
        {"step": "multiply(%i, %i)"},
        {"start": 'custom-call(), custom_call_target="what"'},
    ],
)
def test_a_loop_whose_end_depends_on_values_counts_once_and_is_named(settings):
    found = loop(**settings)
    assert multiplies(found) == 1
    assert found.unknown_loops == ("w",)
    assert "w counts as one trip" in str(found)


def test_a_loop_in_a_loop_multiplies_even_if_it_counts_by_the_outer_loops_state():
    # The TPU's compiler passes constants through the state of the outer loop.
    found = program(
        """
        %inner (s: (s32[], f32[100], s32[])) -> (s32[], f32[100], s32[]) {
          %s = (s32[], f32[100], s32[]) parameter(0)
          %i = s32[] get-tuple-element(%s), index=0
          %one = s32[] get-tuple-element(%s), index=2
          %c = s32[] copy(%i)
          %next = s32[] add(%c, %one)
          %x = f32[100] get-tuple-element(%s), index=1
          %m = f32[100] multiply(%x, %x)
          ROOT %r = (s32[], f32[100], s32[]) tuple(%next, %m, %one)
        }

        %less3 (s: (s32[], f32[100], s32[])) -> pred[] {
          %s = (s32[], f32[100], s32[]) parameter(0)
          %i = s32[] get-tuple-element(%s), index=0
          %n = s32[] constant(3)
          ROOT %t = pred[] compare(%i, %n), direction=LT
        }

        %outer (s: (s32[], f32[100], s32[])) -> (s32[], f32[100], s32[]) {
          %s = (s32[], f32[100], s32[]) parameter(0)
          %i = s32[] get-tuple-element(%s), index=0
          %x = f32[100] get-tuple-element(%s), index=1
          %one = s32[] get-tuple-element(%s), index=2
          %next = s32[] add(%i, %one)
          %zero = s32[] constant(0)
          %t = (s32[], f32[100], s32[]) tuple(%zero, %x, %one)
          %w = (s32[], f32[100], s32[]) while(%t), condition=%less3, body=%inner
          %y = f32[100] get-tuple-element(%w), index=1
          ROOT %r = (s32[], f32[100], s32[]) tuple(%next, %y, %one)
        }

        %less5 (s: (s32[], f32[100], s32[])) -> pred[] {
          %s = (s32[], f32[100], s32[]) parameter(0)
          %i = s32[] get-tuple-element(%s), index=0
          %n = s32[] constant(5)
          ROOT %t = pred[] compare(%i, %n), direction=LT
        }

        ENTRY %main (x: f32[100]) -> f32[100] {
          %x = f32[100] parameter(0)
          %zero = s32[] constant(0)
          %one = s32[] constant(1)
          %t = (s32[], f32[100], s32[]) tuple(%zero, %x, %one)
          %w = (s32[], f32[100], s32[]) while(%t), condition=%less5, body=%outer
          ROOT %y = f32[100] get-tuple-element(%w), index=1
        }
        """
    )
    assert multiplies(found) == 15
    assert found.unknown_loops == ()


def test_a_conditional_counts_as_its_branch_that_moves_most():
    (row,) = program(
        """
        %nothing (x: f32[100]) -> f32[100] {
          ROOT %x = f32[100] parameter(0)
        }

        %something (x: f32[100]) -> f32[100] {
          %x = f32[100] parameter(0)
          ROOT %n = f32[100] negate(%x)
        }

        ENTRY %main (p: s32[], x: f32[100]) -> f32[100] {
          %p = s32[] parameter(0)
          %x = f32[100] parameter(1)
          ROOT %c = f32[100] conditional(%p, %x, %x, %x), branch_computations={
%nothing, %something, %nothing}
        }
        """.replace("{\n%nothing", "{%nothing")
    ).rows
    assert (row.kind, row.bytes_moved) == ("negate", 800)


def test_a_called_computation_is_counted():
    rows = program(
        """
        %called (x: f32[100]) -> f32[100] {
          %x = f32[100] parameter(0)
          ROOT %n = f32[100] negate(%x)
        }

        ENTRY %main (x: f32[100]) -> f32[100] {
          %x = f32[100] parameter(0)
          %c = f32[100] call(%x), to_apply=%called
          %s = ((f32[100]), f32[100], s32[]) async-start(%c), calls=%called
          ROOT %d = f32[100] async-done(%s)
        }
        """
    ).rows
    assert [row.kind for row in rows] == ["negate", "negate"]


# Products.


def dot(lhs: str, rhs: str, result: str) -> kernels.Kernel:
    return only(
        f"""
        ENTRY %main (a: {lhs}, b: {rhs}) -> {result} {{
          %a = {lhs} parameter(0)
          %b = {rhs} parameter(1)
          ROOT %d = {result} dot(%a, %b), lhs_contracting_dims={{1}}
        }}
        """
    )


@pytest.mark.parametrize(
    ("dtypes", "key"),
    [
        (("bf16", "bf16", "bf16"), "bf16"),
        (("f16", "f16", "f16"), "f16"),
        (("bf16", "bf16", "f32"), "bf16->f32"),
        (("bf16", "f32", "f32"), "bf16xf32->f32"),
        (("f32", "bf16", "bf16"), "f32xbf16->bf16"),
    ],
)
def test_a_dot_is_counted_by_the_dtypes_of_operands_and_result(dtypes, key):
    a, b, c = dtypes
    (matmul,) = dot(f"{a}[8,32]", f"{b}[32,16]", f"{c}[8,16]").matmuls
    assert matmul.dtypes == key
    assert matmul.flops == 2 * 8 * 32 * 16


GEMM = """
    ENTRY %main (a: f32[4,8,32], b: f32[4,16,32]) -> f32[4,8,16] {
      %a = f32[4,8,32] parameter(0)
      %b = f32[4,16,32] parameter(1)
      %g = (f32[4,8,16], s8[33554432]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]},"precision_config":{\
"operand_precision":["HIGHEST","HIGHEST"]}}}
      ROOT %r = f32[4,8,16] get-tuple-element(%g), index=0
    }
    """


def test_a_gemm_call_is_read_without_its_scratch():
    kernel = only(GEMM)
    assert traffic(kernel) == (4 * 4 * (8 * 32 + 16 * 32), 4 * 4 * 8 * 16)
    (matmul,) = kernel.matmuls
    assert matmul == kernels.Matmul(
        operands=("f32", "f32"),
        result="f32",
        flops=2 * 4 * 8 * 16 * 32,
        precision="highest",
    )


def convolution(attributes: str, image: str, kernel: str, result: str) -> int:
    (matmul,) = only(
        f"""
        ENTRY %main (a: {image}, b: {kernel}) -> {result} {{
          %a = {image} parameter(0)
          %b = {kernel} parameter(1)
          ROOT %c = {result} {attributes.format("%a, %b")}
        }}
        """
    ).matmuls
    return matmul.flops


def test_a_batched_dot_written_as_a_convolution_has_a_dots_flops():
    flops = convolution(
        "convolution({}), window={{size=16 stride=15 lhs_dilate=16}}, "
        "dim_labels=0bf_0oi->0bf",
        "bf16[16,256,64]",
        "bf16[16,128,64]",
        "bf16[16,256,128]",
    )
    assert flops == 2 * 16 * 256 * 128 * 64


def test_a_convolution_does_not_multiply_its_padding():
    same = "window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_01io->b01f"
    shapes = ("f32[2,8,8,4]", "f32[3,3,4,5]", "f32[2,8,8,5]")
    inside = (3 * 8 - 2) ** 2  # of three taps the first and the last leave the image
    assert convolution(f"convolution({{}}), {same}", *shapes) == 2 * 2 * 4 * 5 * inside


def test_the_groups_of_a_convolution_do_not_multiply_each_other():
    window = "window={{size=3}}, dim_labels=b0f_0io->b0f"
    shapes = ("f32[6,5,4]", "f32[3,4,8]", "f32[2,3,8]")
    grouped = f"convolution({{}}), {window}, batch_group_count=3"
    assert convolution(grouped, *shapes) == 2 * 2 * 4 * 8 * 9
    shapes = ("f32[6,5,4]", "f32[3,1,8]", "f32[6,3,8]")
    grouped = f"convolution({{}}), {window}, feature_group_count=4"
    assert convolution(grouped, *shapes) == 2 * 6 * 1 * 8 * 9


def test_the_three_cudnn_convolutions_of_one_layer_have_the_same_flops():
    image, kernel, result = "f16[2,8,8,4]", "f16[5,3,3,4]", "f16[2,4,4,5]"
    call = (
        'custom-call({{}}), custom_call_target="__cudnn$conv{}", '
        "window={{{{size=3x3 stride=2x2 pad=0_1x0_1}}}}, dim_labels=b01f_o01i->b01f"
    )
    forward = convolution(call.format("Forward"), image, kernel, result)
    to_input = convolution(call.format("BackwardInput"), result, kernel, image)
    to_filter = convolution(call.format("BackwardFilter"), image, result, kernel)
    assert forward == 2 * 2 * 4 * 5 * (3 * 4 - 1) ** 2
    assert (to_input, to_filter) == (forward, forward)


def test_dots_in_fusions_of_fusions_in_loops_are_counted_in_every_trip():
    found = program(
        """
        %inner (a: f32[8,8]) -> bf16[8,8] {
          %a = f32[8,8] parameter(0)
          ROOT %c = bf16[8,8] convert(%a)
        }

        %outer (a: f32[8,8], b: bf16[8,8]) -> f32[8,8] {
          %a = f32[8,8] parameter(0)
          %b = bf16[8,8] parameter(1)
          %c = bf16[8,8] fusion(%a), kind=kLoop, calls=%inner
          ROOT %d = f32[8,8] convolution(%c, %b), dim_labels=bf_io->bf
        }

        %body (s: (f32[8,8], bf16[8,8])) -> (f32[8,8], bf16[8,8]) {
          %s = (f32[8,8], bf16[8,8]) parameter(0)
          %a = f32[8,8] get-tuple-element(%s), index=0
          %b = bf16[8,8] get-tuple-element(%s), index=1
          %f = f32[8,8] fusion(%a, %b), kind=kOutput, calls=%outer
          ROOT %r = (f32[8,8], bf16[8,8]) tuple(%f, %b)
        }

        ENTRY %main (a: f32[8,8], b: bf16[8,8]) -> (f32[8,8], bf16[8,8]) {
          %a = f32[8,8] parameter(0)
          %b = bf16[8,8] parameter(1)
          %t = (f32[8,8], bf16[8,8]) tuple(%a, %b)
          ROOT %w = (f32[8,8], bf16[8,8]) while(%t), condition=%body, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
        }
        """
    )
    assert found.matmuls == {"bf16->f32": 6}
    assert found.matmul_flops == {"bf16->f32": 6 * 2 * 8**3}
    lhs, rhs, result = 4 * 8 * 8, 2 * 8 * 8, 4 * 8 * 8
    assert found.bytes_moved == 6 * (lhs + rhs + result)


# Collectives, the roofline, the table.


@pytest.mark.parametrize(
    ("operation", "shape", "size"),
    [
        ("all-reduce(%x)", "bf16[64]", 128),
        ("all-gather(%x)", "bf16[256]", 512),
        ("reduce-scatter(%x)", "bf16[16]", 128),
        ("all-gather-start(%x)", "(bf16[64], bf16[256])", 512),
        ("all-reduce-start(%x)", "bf16[64]", 128),
        ("negate(%x)", "bf16[64]", None),
    ],
)
def test_a_collective_counts_the_larger_of_what_goes_in_and_out(operation, shape, size):
    found = program(
        f"""
        ENTRY %main (x: bf16[64]) -> {shape} {{
          %x = bf16[64] parameter(0)
          ROOT %c = {shape} {operation}, replica_groups={{}}
        }}
        """
    )
    assert found.collectives == ({} if size is None else {"bf16": size})


def square(n: int, lhs: str, rhs: str, wish: str = "default") -> str:
    """A program of one dot of two square matrices."""
    return f"""
        ENTRY %main (a: {lhs}[{n},{n}], b: {rhs}[{n},{n}]) -> {lhs}[{n},{n}] {{
          %a = {lhs}[{n},{n}] parameter(0)
          %b = {rhs}[{n},{n}] parameter(1)
          ROOT %d = {lhs}[{n},{n}] dot(%a, %b), lhs_contracting_dims={{1}}, \
operand_precision={{{wish},{wish}}}
        }}
        """


@pytest.mark.parametrize(
    ("target", "operands", "wish", "rate"),
    [
        ("h100", ("bf16", "bf16"), "default", 989e12),
        ("h100", ("bf16", "bf16"), "highest", 989e12),
        ("h100", ("bf16", "f32"), "default", 494e12),
        ("h100", ("f32", "f32"), "high", 494e12),
        ("h100", ("f32", "f32"), "highest", 67e12),
        ("h100", ("s32", "s32"), "default", 67e12),
        ("v5e", ("bf16", "bf16"), "default", 197e12),
        ("v5e", ("f32", "f32"), "default", 197e12),
        ("v5e", ("f32", "f32"), "high", 197e12 / 3),
        ("v5e", ("f32", "bf16"), "highest", 197e12 / 6),
    ],
)
def test_a_large_dot_takes_the_time_of_the_matrix_units_of_its_dtype(
    target, operands, wish, rate
):
    found = program(square(16384, *operands, wish), target)
    assert math.isclose(found.roofline_seconds, 2 * 16384**3 / rate)


@pytest.mark.parametrize(("target", "rate"), [("h100", 3352.32e9), ("v5e", 819e9)])
def test_a_small_dot_takes_the_time_of_its_bytes(target, rate):
    found = program(square(64, "bf16", "bf16"), target)
    assert math.isclose(found.roofline_seconds, 3 * 2 * 64**2 / rate)


def test_the_roofline_counts_every_trip():
    assert math.isclose(loop().roofline_seconds, 7 * (12 + 800) / 3352.32e9)


def test_the_table_shows_the_figures_and_the_largest_kernels():
    text = GEMM.replace("__cublas$lt$matmul", "unread")
    assert "1 matmuls f32" in str(program(GEMM))
    assert program(GEMM).opaque == {}
    assert program(text).opaque == {"unread": 1}
    assert "1 calls of unread are not read" in str(program(text))
    found = loop()
    lines = found.table(1).splitlines()
    assert "moved by 14 kernels" in lines[0]
    assert lines[-1].split() == ["5.60", "kB", "7", "f32", "multiply", "m"]
    assert [row.name for row in found.largest(1)] == ["m"]


# Targets.


def test_a_missing_package_is_named(monkeypatch):
    installed = {"jax_plugins.xla_cuda12"}
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name in installed else None
    )
    assert missing("v5e") == "no compiler for v5e: no libtpu is installed"
    assert "no nvidia.cuda_nvcc or nvidia.cu13 or ptxas" in str(missing("h100"))
    installed.clear()
    assert "no jax_plugins.xla_cuda12 or" in str(missing("h100"))
    installed.update(["jax_plugins.xla_cuda13", "nvidia.cu13", "libtpu"])
    assert missing("h100") is None
    assert missing("v5e") is None


def test_an_unknown_target_is_an_error_that_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="no target 'a100': there are h100, h100 cublas, v5e, b200"
    ):
        missing("a100")


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    """Each target whose compiler is installed."""
    reason = missing(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def shape(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# Larger than a TPU's on-chip memory, which would hide bytes that are moved twice.
BIG = shape(8192, 8192)
BYTES = 4 * 8192 * 8192


@pytest.mark.targets
def test_an_elementwise_function_is_one_kernel_that_moves_what_goes_in_and_out(target):
    found = compile_for(target, lambda x, y: jnp.tanh(x) * y, BIG, BIG)
    assert found.bytes_moved == 3 * BYTES
    assert found.kernels == 1
    assert found.temporaries == 0
    assert found.matmuls == {}


@pytest.mark.targets
def test_a_cast_in_a_fused_kernel_is_free(target):
    low = shape(8192, 8192, dtype="bfloat16")
    found = compile_for(target, lambda x, y: jnp.tanh(x) * y.astype(x.dtype), BIG, low)
    assert found.bytes_moved == BYTES * 5 // 2


@pytest.mark.targets
@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_xlas_own_description_of_a_gpu_makes_the_same_program(gpu, monkeypatch):
    if missing(gpu):
        pytest.skip(missing(gpu))
    if not compiled.xlas_own(compiled.H100.gpu):
        pytest.skip("the plug-in of this JAX carries none")

    def figures():
        devices.cache_clear()
        program = chips.compile_gradient(gpu, 2048, "float8")
        return program.bytes_moved, program.temporaries, program.kernels

    by_xlas = figures()
    monkeypatch.setattr(compiled, "xlas_own", lambda gpu: "")
    assert figures() == by_xlas
    devices.cache_clear()


def adamw_step(skip):
    """An adamw step that skips when a gradient is not finite, and its arguments."""
    optimizer = optax.adamw(1e-3)
    params = {"w": BIG}

    @jax.numpy_dtype_promotion("standard")  # optax promotes
    def step(params, state, grads):
        def update():
            updates, new_state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), new_state

        finite = jnp.isfinite(grads["w"]).all()
        return skip(finite, update, (params, state))

    return step, params, jax.eval_shape(optimizer.init, params), params


def never(finite, update, old):
    return update()


def select(finite, update, old):
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(), old)


def branch(finite, update, old):
    return jax.lax.cond(finite, update, lambda: old)


@pytest.mark.targets
@pytest.mark.parametrize(
    ("skip", "arrays"),
    [
        (never, {"h100": [7], "v5e": [7]}),
        (select, {"h100": [8], "v5e": [8]}),
        # XLA for the GPU keeps the branch in jax 0.10 and selects in 0.12.
        (branch, {"h100": [14, 8], "v5e": [8]}),
    ],
)
def test_an_adamw_step_moves_the_arrays_that_it_must(target, skip, arrays):
    found = compile_for(target, *adamw_step(skip), donate_argnums=(0, 1))
    assert round(found.bytes_moved / BYTES, 3) in arrays[target]


@pytest.mark.targets
def test_a_donated_step_needs_its_arguments_and_nothing_of_their_size(target):
    step = adamw_step(select)
    donated = compile_for(target, *step, donate_argnums=(0, 1))
    assert donated.aliased >= 3 * BYTES
    assert donated.temporaries < BYTES / 100
    assert donated.peak_memory == pytest.approx(4 * BYTES, rel=1e-2)
    kept = compile_for(target, *step)
    assert kept.aliased == 0
    assert kept.peak_memory == pytest.approx(7 * BYTES, rel=1e-2)


@pytest.mark.targets
def test_a_temporary_is_counted(target):
    x = shape(16384, 16384, dtype="bfloat16")
    size = 2 * 16384 * 16384
    found = compile_for(target, lambda x: (x @ x) @ x, x)
    assert size <= found.temporaries < 1.2 * size
    assert found.peak_memory == found.temporaries + 2 * size
    assert found.matmuls == {"bf16": 2}
    a_product = 2 * 16384**3
    assert found.matmul_flops == {"bf16": 2 * a_product}


LAYERS = 24
STACKED = shape(LAYERS, 512, 512, dtype="bfloat16")
STATE = shape(2048, 512, dtype="bfloat16")


def layers(x, stack):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0]


@pytest.mark.targets
def test_a_scan_counts_a_matmul_for_every_layer(target):
    found = compile_for(target, layers, STATE, STACKED)
    assert found.matmuls == {"bf16": LAYERS}
    assert found.matmul_flops == {"bf16": LAYERS * 2 * 2048 * 512 * 512}
    assert found.unknown_loops == ()
    assert found.kernels >= LAYERS


@pytest.mark.targets
def test_a_scan_reads_its_stack_once(target):
    found = compile_for(target, layers, STATE, STACKED)
    stack, state = 2 * LAYERS * 512 * 512, 2 * 2048 * 512
    # The H100's copies a layer's weights before it multiplies them, and its kernels
    # pass the state through main memory.
    most = {"h100": 3 * stack + 6 * LAYERS * state, "v5e": stack + 4 * state}
    assert stack + 2 * state <= found.bytes_moved <= most[target]


@pytest.mark.targets
def test_the_backward_pass_of_a_scan_writes_its_stacks_in_place(target):
    def loss(x, stack):
        return layers(x, stack).astype(jnp.float32).sum()

    found = compile_for(target, jax.grad(loss, (0, 1)), STATE, STACKED)
    assert sum(found.matmuls.values()) == 3 * LAYERS
    assert {dtypes.split("->")[0] for dtypes in found.matmuls} == {"bf16"}
    # Forward and backward touch a few layers and states a trip, never a whole stack.
    trip = 2 * (2048 * 512 + 512 * 512)
    assert found.bytes_moved < 28 * LAYERS * trip


@pytest.mark.targets
@pytest.mark.parametrize(
    ("dtypes", "result", "keys"),
    [
        (("bfloat16", "bfloat16"), None, {"h100": "bf16", "v5e": "bf16"}),
        # The v5e has no float16: its compiler chooses another result from jax 0.12 on.
        (("float16", "float16"), None, {"h100": "f16", "v5e": "f16 f16->f32"}),
        (("float32", "float32"), None, {"h100": "f32", "v5e": "f32"}),
        (
            ("bfloat16", "bfloat16"),
            "float32",
            {"h100": "bf16->f32", "v5e": "bf16->f32"},
        ),
        # A cotangent in float32 on a 16-bit weight: the H100 multiplies in float32.
        (("float32", "bfloat16"), "float32", {"h100": "f32", "v5e": "f32xbf16->f32"}),
    ],
)
def test_a_dot_runs_in_the_dtypes_that_the_compiler_chose(target, dtypes, result, keys):
    a, b = (shape(4096, 4096, dtype=dtype) for dtype in dtypes)
    found = compile_for(
        target, lambda a, b: jax.lax.dot(a, b, preferred_element_type=result), a, b
    )
    assert found.matmuls in [{key: 1} for key in keys[target].split()]


@pytest.mark.targets
def test_the_three_convolutions_of_a_layer_are_counted(target):
    def loss(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.square(y.astype(jnp.float32)).sum()

    x = shape(8, 32, 32, 64, dtype="bfloat16")
    w = shape(3, 3, 64, 128, dtype="bfloat16")
    found = compile_for(target, jax.grad(loss, (0, 1)), x, w)
    assert found.matmuls == {"bf16": 3}
    each = 2 * 8 * 16 * 16 * 3 * 3 * 64 * 128
    assert found.matmul_flops["bf16"] == pytest.approx(3 * each, rel=0.05)


@pytest.mark.targets
def test_a_loop_to_a_tolerance_is_named(target):
    def fixed_point(x):
        return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h * h, x)

    assert len(compile_for(target, fixed_point, shape(256, 256)).unknown_loops) == 1


@pytest.mark.targets
def test_a_sharded_program_shows_its_collectives(target):
    topology = {"h100": "1x1x4", "v5e": None}[target]
    mesh = Mesh(np.array(devices(target, topology)), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=whole)

    def loss(w, x):
        return jnp.square(x @ w).sum()

    found = compile_for(target, jax.grad(loss), w, x, out_shardings=whole)
    assert found.collectives == {"f32": 4 * 512 * 256}
    assert (
        compile_for(target, loss, shape(512, 256), shape(1024, 512)).collectives == {}
    )


@pytest.mark.targets
def test_arguments_may_be_keys_numbers_arrays_and_static(target):
    def noise(tree, count, scale):
        return jax.random.normal(tree["key"], (count,)) * scale + tree["mean"]

    tree = {"key": jax.random.key(0), "mean": np.zeros((4096,), np.float32)}
    for static in (1, (-2,)):
        found = compile_for(target, noise, tree, 4096, 2.0, static_argnums=static)
        assert "f32[4096]" in found.text.splitlines()[0]


@pytest.mark.targets
def test_a_function_without_arguments_compiles(target):
    found = compile_for(target, lambda: jnp.arange(4096, dtype=jnp.float32))
    assert target == "h100" or "T(1024)" in found.text  # a TPU's tiles
    assert found.bytes_moved == 4 * 4096


@pytest.mark.targets
def test_a_program_is_the_same_every_time(target):
    first = compile_for(target, layers, STATE, STACKED)
    jax.clear_caches()
    again = compile_for(target, layers, STATE, STACKED)  # from another line
    assert again == first
    assert __file__ not in first.text


@pytest.mark.targets
def test_compiling_leaves_jax_on_the_cpu(target):
    compile_for(target, jnp.tanh, shape(8))
    assert {device.platform for device in jax.devices()} == {"cpu"}
    assert compiled.devices(target)[0] not in jax.devices()
