"""The machine code of the products, compiled for CPUs that need not be there."""

import re
from collections.abc import Callable

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from engine.cpu.products.law import Law
from engine.cpu.products.matmul import emit_few, emit_rows, emit_step, item_of
from engine.cpu.products.panel import TILE, emit_tile, lanes_of
from engine.cpu.products.unpack import UNPACK
from engine.cpu.simd import I8, I64, Code

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
EMIT = {"step": emit_step, "few": emit_few, "rows": emit_rows}


def compiled(
    triple: str, cpu: str, arguments: list[ir.Type], emit: Callable[[ir.IRBuilder, list[ir.Value]], None]
) -> str:
    """The assembly text of a function with these types of arguments; ``emit(builder, arguments)`` emits it."""
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "item")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    builder.branch(function.append_basic_block("body"))
    builder.position_at_end(function.blocks[1])
    emit(builder, list(function.args))
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3, codemodel="small")
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        parsed, llvm.create_pass_builder(machine, options)
    )
    return machine.emit_assembly(parsed)


def assembly(fmt: str, instructions: str, kernel: str, triple: str, cpu: str) -> str:
    """The assembly text of an item of a kernel."""

    def emit(builder: ir.IRBuilder, arguments: list[ir.Value]) -> None:
        code = Code(builder, instructions)
        EMIT[kernel](code, item_of(Law(UNPACK[fmt], instructions), code, arguments[:7], arguments[7:]))

    return compiled(triple, cpu, [I8.as_pointer()] * 7 + [I64] * 7, emit)


def count(text: str, instruction: str) -> int:
    return len(re.findall(rf"\b{instruction}\b", text))


def as_emitted(text: str, instruction: str, fmt: str, kernel: str, tiles: int) -> bool:
    """Whether the machine code contains as many of the instructions as were emitted: one for 4 bytes of 8 rows; "few" has
    tiles of two and of four activation rows, "rows" has ``tiles`` rows in all of its tiles, over one run.  LLVM unrolls
    the loop over the runs of a unit further in tiles of one to four rows, which only "rows" has, and the loop over units of
    16 weights."""
    found, unit = count(text, instruction), UNPACK[fmt].unit
    if kernel == "rows":
        return found >= tiles * Law(UNPACK[fmt], "plain").run // 4
    emitted = {"step": 1, "few": 6}[kernel] * unit // 4
    return found == emitted or (unit == 16 and found > emitted)


def called(text: str) -> set[str]:
    """The functions that are called.  The values of a group of less than eight rows are copied by memcpy."""
    return set(re.findall(r"^\s+(?:callq?|bl)\s+([^@\s]+)", text, re.MULTILINE))


FORMATS = [
    "Q4_K",
    "Q8_0",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in UNPACK if name not in ("Q4_K", "Q8_0")),
]
EACH = pytest.mark.parametrize("fmt", FORMATS)


@EACH
@pytest.mark.parametrize("kernel", EMIT)
@pytest.mark.parametrize("cpu", ["znver4", "sapphirerapids", "alderlake"])
@pytest.mark.covering(1, 1)
def test_vnni(fmt: str, kernel: str, cpu: str) -> None:
    """AVX512-VNNI and AVX-VNNI: every product is made by ``vpdpbusd``, on 256 bits."""
    text = assembly(fmt, "vnni", kernel, X86, cpu)
    assert as_emitted(text, "vpdpbusd", fmt, kernel, 8 + 4 + 2 + 1)
    assert not count(text, "vpmaddubsw")
    assert "zmm" not in text
    assert called(text) <= {"memcpy"}
    if cpu != "alderlake":
        # The activations are operands in memory, four bytes for eight rows.
        assert "{1to8}" in text


@EACH
@pytest.mark.parametrize("cpu", ["znver4", "sapphirerapids"])
@pytest.mark.covering(1, 1)
def test_vnni_on_512_bits(fmt: str, cpu: str) -> None:
    """Many rows: each ``vpdpbusd`` takes 16 weight rows."""
    text = assembly(fmt, "vnni512", "rows", X86, cpu)
    # LLVM may unroll the loops of tiles of few rows further.
    products = re.findall(r"\bvpdpbusd\b.*", text)
    assert len(products) >= 15 * Law(UNPACK[fmt], "plain").run // 4
    assert all("zmm" in line for line in products)
    assert sum("{1to16}" in line for line in products) > len(products) // 2
    assert called(text) <= {"memcpy"}


@EACH
@pytest.mark.parametrize("kernel", EMIT)
@pytest.mark.parametrize("cpu", ["haswell", "znver3"])
@pytest.mark.covering(1, 1)
def test_avx2(fmt: str, kernel: str, cpu: str) -> None:
    text = assembly(fmt, "avx2", kernel, X86, cpu)
    assert as_emitted(text, "vpmaddubsw", fmt, kernel, 4 + 2 + 1)
    assert count(text, "vpmaddwd")
    assert bool(count(text, "vpsignb")) == UNPACK[fmt].signed
    assert "zmm" not in text
    assert "vpdpbusd" not in text
    assert called(text) <= {"memcpy"}


@EACH
@pytest.mark.parametrize("kernel", ["step", "rows"])
@pytest.mark.parametrize(("triple", "cpu"), [(ARM, "generic"), (X86, "haswell")])
@pytest.mark.covering(1, 1)
def test_plain(fmt: str, kernel: str, triple: str, cpu: str) -> None:
    """The portable path needs no library and no instruction of x86."""
    text = assembly(fmt, "plain", kernel, triple, cpu)
    assert called(text) <= {"memcpy"}
    # Vectors of integers are multiplied.
    assert count(text, "mla") if triple == ARM else count(text, "vpmullw")


@pytest.mark.parametrize("instructions", ["vnni", "avx2", "plain"])
def test_floats_are_fused_only_where_the_law_says(instructions: str) -> None:
    """Q4_K: d * I is rounded, then fma(dm, M, .) and fma(da, value, acc); sums of chains are additions."""
    text = assembly("Q4_K", instructions, "step", X86, "haswell" if instructions != "vnni" else "znver4")
    assert len(re.findall(r"vfn?madd\d*ps", text)) + len(re.findall(r"vfn?msub\d*ps", text)) == 2
    assert count(text, "vmulps") == 1


@pytest.mark.parametrize(
    ("instructions", "cpu"),
    [("vnni512", "znver4"), ("vnni512", "sapphirerapids"), ("avx2", "haswell"), ("avx2", "znver3")],
)
def test_a_tile_of_floats_stays_in_registers(instructions: str, cpu: str) -> None:
    """Nothing is rounded but by fma, and no sum is stored on the stack."""
    lanes, tile = lanes_of(instructions)

    def emit(builder: ir.IRBuilder, arguments: list[ir.Value]) -> None:
        fresh = builder.icmp_signed("==", arguments[8], ir.Constant(I64, 0))
        x, chains = arguments[1 : 1 + TILE], arguments[4 : 4 + TILE]
        emit_tile(Code(builder, instructions, lanes), tile, arguments[0], x, arguments[7], chains, fresh)

    text = compiled(X86, cpu, [I8.as_pointer()] * 7 + [I64] * 2, emit)
    fused = re.findall(r"vfmadd\d+ps.*", text)
    assert fused
    assert len(fused) % (TILE * tile) == 0
    assert all(("zmm" if lanes == 16 else "ymm") in line for line in fused)
    assert not re.search(r"\bv(mul|add|sub)ps", text)
    assert not re.search(r"mm\d+, -?\d*\(%rsp", text)
