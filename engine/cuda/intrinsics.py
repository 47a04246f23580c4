"""The atoms of the GPU backend: what plain Numba cannot express, each beside its law.

Everything else in ``engine/cuda`` is ordinary Python that Numba compiles.  There are three kinds of atoms: loads of 16
bytes, integer instructions that multiply several values at once, and exchanges between the 32 lanes of a warp.  The
integer ones are exact, the exchanges move bits, and the scalar float functions are those of ``engine/numerics.py``, so
none of them can make a result depend on the device.

In Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) the names mean their laws, from ``engine/cuda/runtime/simulator.py``:
the source of a kernel then runs there unchanged, one Python thread per GPU thread.

Pointers are ``CPointer`` arguments of a kernel: ``p[i]`` is element i.  Words (uint32) hold whatever has been packed
into them.  Indices are not checked.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from llvmlite import ir
from numba import cuda, types
from numba.core import cgutils
from numba.cuda.core import config
from numba.extending import intrinsic

from engine import numerics
from engine.cuda.runtime.kinds import DeviceFunction, Lowering

SIMULATED = bool(config.ENABLE_CUDASIM)

u32 = np.uint32

_I32 = ir.IntType(32)
_SUMS4 = types.UniTuple(types.int32, 4)
_STRUCT4 = ir.LiteralStructType([_I32] * 4)


def _asm(
    builder: ir.IRBuilder,
    text: str,
    operands: Sequence[ir.Value],
    n: int = 1,
    kinds: str = "",
    effect: bool = False,
    memory: bool = False,
) -> ir.Value:
    """Inline PTX with n 32-bit results; ``kinds``: a constraint letter per operand, ``r`` (32 bits) by default."""
    kinds = kinds or "r" * len(operands)
    result = ir.VoidType() if n == 0 else _I32 if n == 1 else ir.LiteralStructType([_I32] * n)
    constraints = ",".join(["=r"] * n + list(kinds) + ["~{memory}"] * memory)
    function = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effect), operands)


def _tuple(context: Lowering, builder: ir.IRBuilder, type_: types.BaseTuple, struct: ir.Value) -> ir.Value:
    return context.make_tuple(builder, type_, [builder.extract_value(struct, k) for k in range(type_.count)])


def device(function: DeviceFunction) -> DeviceFunction:
    """Compile a function for kernels to call that loads or exchanges data; its code is part of each kernel that calls it."""
    return cuda.jit(device=True, forceinline=True)(function)


# --- atoms that differ between targets -------------------------------------------------------------------------

Target = tuple[int, int]
Body = Callable[[ir.IRBuilder, Sequence[ir.Value], Target], ir.Value | None]

BODIES: dict[str, tuple[ir.FunctionType, Body]] = {}
"""Functions that kernels only declare: name to (type, what builds the body for a target).  So the code that Numba makes of a
kernel is the same for all targets; ``definitions`` goes with it when it is compiled for one."""


def _differing(
    name: str, result: ir.Type, operands: Sequence[ir.Type], body: Body
) -> Callable[[ir.IRBuilder, Sequence[ir.Value]], ir.Value]:
    """A function of BODIES, to be called by (builder, operands).  ``body(builder, operands, target)`` returns the result, or
    None of a void function."""
    type_ = ir.FunctionType(result, operands)
    BODIES[f"bitmirror_{name}"] = type_, body

    def call(builder: ir.IRBuilder, arguments: Sequence[ir.Value]) -> ir.Value:
        function = cgutils.get_or_insert_function(builder.module, type_, f"bitmirror_{name}")
        return builder.call(function, arguments)

    return call


@cache
def definitions(target: Target) -> str:
    """LLVM IR of all functions of BODIES for a compute capability; NVVM inlines those that a kernel calls."""
    from numba.cuda.cudadrv import nvvm

    module = ir.Module("atoms")
    module.triple, module.data_layout = "nvptx64-nvidia-cuda", nvvm.NVVM().data_layout
    nvvm.add_ir_version(module)
    for name, (type_, body) in BODIES.items():
        function = ir.Function(module, type_, name)
        function.linkage = "linkonce_odr"
        function.attributes.add("alwaysinline")
        builder = ir.IRBuilder(function.append_basic_block())
        value = body(builder, function.args, target)
        if value is None:
            builder.ret_void()
        else:
            builder.ret(value)
    return str(module)


# --- pointers and wide loads -----------------------------------------------------------------------------------


@intrinsic
def advance(typingctx, p, i):
    """The pointer to ``p[i]``."""
    return p(p, i), lambda context, builder, sig, args: builder.gep(args[0], [args[1]])


@intrinsic
def settled(typingctx, x):
    """x, of 32 bits or a pointer, in a register.  Without this, compilers compute it again wherever it is used, to save the
    register in the meantime."""
    wide = isinstance(x, types.CPointer)
    type_, text, kinds = (ir.IntType(64), "mov.b64 $0, $1;", "=l,l") if wide else (_I32, "mov.b32 $0, $1;", "=r,r")

    def codegen(context, builder, sig, args):
        assembly = ir.InlineAsm(ir.FunctionType(type_, [type_]), text, kinds, side_effect=True)
        if not wide:
            return builder.call(assembly, args)
        return builder.inttoptr(builder.call(assembly, [builder.ptrtoint(args[0], type_)]), args[0].type)

    return x(x), codegen


@intrinsic
def pointer(typingctx, array):
    """The pointer to element 0 of a shared array.  Numba lets array indices count from the end, which costs instructions at
    every access."""

    def codegen(context, builder, sig, args):
        return context.make_array(sig.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def halves(typingctx, p):
    """The memory at p as uint16."""
    to = types.CPointer(types.uint16)
    return to(p), lambda context, builder, sig, args: builder.bitcast(args[0], context.get_value_type(to))


@intrinsic
def octets(typingctx, p):
    """The memory at p as uint8."""
    to = types.CPointer(types.uint8)
    return to(p), lambda context, builder, sig, args: builder.bitcast(args[0], context.get_value_type(to))


def _make_load(instruction: str, n: int) -> DeviceFunction:
    """A load of n words that is not reordered: weights before ``wait_for_inputs``, what an earlier kernel wrote after it."""
    type_ = types.uint32 if n == 1 else types.UniTuple(types.uint32, n)
    registers = "$0" if n == 1 else "{" + ",".join(f"${k}" for k in range(n)) + "}"

    @intrinsic
    def load(typingctx, p, i):
        def codegen(context, builder, sig, args):
            address = builder.gep(args[0], [args[1]])
            words = _asm(builder, f"{instruction} {registers}, [${n}];", [address], n, "l", effect=True, memory=True)
            return words if n == 1 else _tuple(context, builder, sig.return_type, words)

        return type_(p, i), codegen

    return load


stream4 = _make_load("ld.global.L1::no_allocate.v4.u32", 4)
"""stream4(p, i): the words p[i : i + 4], 16 bytes aligned, of memory that no kernel is writing and no other block needs
soon, such as weights.  They bypass the L1 cache."""
stream2 = _make_load("ld.global.L1::no_allocate.v2.u32", 2)
"""stream2(p, i): the words p[i : i + 2], 8 bytes aligned, of such memory, bypassing the L1 cache."""
stream1 = _make_load("ld.global.L1::no_allocate.u32", 1)
"""stream1(p, i): the word p[i] of such memory, bypassing the L1 cache."""
load4 = _make_load("ld.global.v4.u32", 4)
"""load4(p, i): the words p[i : i + 4], 16 bytes aligned, through L1: activations, which many blocks read."""
load2 = _make_load("ld.global.v2.u32", 2)
"""load2(p, i): the words p[i : i + 2], 8 bytes aligned, through L1."""
load1 = _make_load("ld.global.u32", 1)
"""load1(p, i): the word p[i], through L1; for a value that is loaded long before it is used."""

fresh4 = _make_load("ld.volatile.global.v4.u32", 4)
"""fresh4(p, i): the words p[i : i + 4], 16 bytes aligned, of memory that the host writes while a kernel runs."""
awaited = _make_load("ld.acquire.sys.global.u32", 1)
"""awaited(p, i): the word p[i], which the host or another GPU may set while a kernel runs.  Everything that was written
before the word is visible afterwards, after a barrier also to the other threads of the block."""


@intrinsic
def announce(typingctx, p, i, value):
    """p[i] = value, int32, for the host or another GPU that waits for it.  Everything that this thread has written, and other
    threads before a barrier that it has passed, is visible there before the value."""

    def codegen(context, builder, sig, args):
        address = builder.gep(args[0], [args[1]])
        text = "st.release.sys.global.u32 [$0], $1;"
        _asm(builder, text, [address, args[2]], 0, "lr", effect=True, memory=True)
        return context.get_dummy_value()

    return types.void(p, i, types.int32), codegen


def _prefetch_body(builder: ir.IRBuilder, args: Sequence[ir.Value], target: Target) -> None:
    if target >= (9, 0):
        text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
        _asm(builder, text, args, 0, "lr", effect=True, memory=True)


_prefetch = _differing("prefetch", ir.VoidType(), [ir.IntType(64), _I32], _prefetch_body)


@intrinsic
def load_packet(typingctx, packets, at):
    """The words (value, number) of ``packets[at]``, uint32 [n, 2], which another GPU may store while a kernel runs."""

    def codegen(context, builder, sig, args):
        address = builder.gep(builder.bitcast(args[0], ir.IntType(64).as_pointer()), [args[1]])
        text = "{.reg .b64 packet; ld.relaxed.sys.global.b64 packet, [$2]; mov.b64 {$0,$1}, packet;}"
        words = _asm(builder, text, [address], 2, "l", effect=True, memory=True)
        return _tuple(context, builder, sig.return_type, words)

    return types.UniTuple(types.uint32, 2)(packets, at), codegen


@intrinsic
def give_packet(typingctx, packets, at, value, number):
    """``packets[at]`` = (value, number), int32, in one store, for another GPU that waits for the number."""

    def codegen(context, builder, sig, args):
        address = builder.gep(builder.bitcast(args[0], ir.IntType(64).as_pointer()), [args[1]])
        text = "{.reg .b64 packet; mov.b64 packet, {$1,$2}; st.relaxed.sys.global.b64 [$0], packet;}"
        _asm(builder, text, [address, *args[2:]], 0, "lrr", effect=True, memory=True)
        return context.get_dummy_value()

    return types.void(packets, at, types.int32, types.int32), codegen


@intrinsic
def prefetch(typingctx, p, i, n_bytes):
    """Prefetch n_bytes of memory from p[i], both multiples of 16, into the L2 cache, where what other kernels write in the
    meantime is also seen: so it may come before ``wait_for_inputs``."""

    def codegen(context, builder, sig, args):
        address = builder.ptrtoint(builder.gep(args[0], [args[1]]), ir.IntType(64))
        _prefetch(builder, [address, args[2]])
        return context.get_dummy_value()

    return types.void(p, i, types.int32), codegen


@intrinsic
def store4(typingctx, p, i, a, b, c, d):
    """p[i : i + 4] = a, b, c, d, float32, 16 bytes aligned, in one store."""

    def codegen(context, builder, sig, args):
        address = builder.gep(args[0], [args[1]])
        words = [builder.bitcast(x, _I32) for x in args[2:]]
        text = "st.global.v4.u32 [$0], {$1,$2,$3,$4};"
        _asm(builder, text, [address, *words], 0, "lrrrr", effect=True, memory=True)
        return context.get_dummy_value()

    return types.void(p, i, *[types.float32] * 4), codegen


# --- shared memory ---------------------------------------------------------------------------------------------


def _shared_place(builder: ir.IRBuilder, p: ir.Value, i: ir.Value) -> ir.Value:
    """The address of p[i] within shared memory, 32 bits."""
    shared = builder.addrspacecast(builder.gep(p, [i]), _I32.as_pointer(3))
    return builder.trunc(builder.ptrtoint(shared, ir.IntType(64)), _I32)


def _make_vector(n: int) -> DeviceFunction:
    @intrinsic
    def vector(typingctx, p, i):
        def codegen(context, builder, sig, args):
            address = builder.bitcast(builder.gep(args[0], [args[1]]), ir.VectorType(_I32, n).as_pointer())
            vector = builder.load(address, align=4 * n)
            parts = [builder.extract_element(vector, ir.Constant(_I32, k)) for k in range(n)]
            return context.make_tuple(builder, sig.return_type, parts)

        return types.UniTuple(types.uint32, n)(p, i), codegen

    return vector


vector4 = _make_vector(4)
"""vector4(p, i): the words p[i : i + 4] of shared memory, 16 bytes aligned, in one load."""
vector2 = _make_vector(2)
"""vector2(p, i): the words p[i : i + 2] of shared memory, 8 bytes aligned, in one load."""


@intrinsic
def keep4(typingctx, p, i, a, b, c, d):
    """p[i : i + 4] = a, b, c, d, 32 bits each, in shared memory, 16 bytes aligned, in one store."""

    def codegen(context, builder, sig, args):
        address = builder.bitcast(builder.gep(args[0], [args[1]]), ir.VectorType(_I32, 4).as_pointer())
        vector = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for k in range(4):
            vector = builder.insert_element(vector, builder.bitcast(args[2 + k], _I32), ir.Constant(_I32, k))
        builder.store(vector, address, align=16)
        return context.get_dummy_value()

    return types.void(p, i, a, b, c, d), codegen


def _make_copy(n: int, way: str) -> DeviceFunction:
    @intrinsic
    def copy(typingctx, to, i, p, j, there):
        def codegen(context, builder, sig, args):
            place = _shared_place(builder, args[0], args[1])
            known = builder.icmp_signed("!=", args[4], ir.Constant(_I32, 0))
            size = builder.select(known, ir.Constant(_I32, 4 * n), ir.Constant(_I32, 0))
            text = f"cp.async.{way}.shared.global [$0], [$1], {4 * n}, $2;"
            operands = [place, builder.gep(args[2], [args[3]]), size]
            _asm(builder, text, operands, 0, "rlr", effect=True, memory=True)
            return context.get_dummy_value()

        return types.void(to, i, p, j, types.int32), codegen

    return copy


copy4 = _make_copy(4, "cg")
"""copy4(to, i, p, j, there): to[i : i + 4] = p[j : j + 4], words, 16 bytes aligned, from global to shared memory, or zeros
if the int32 ``there`` is 0 (then p[j] need not exist).  The copy is asynchronous; see ``copies_wait``.  Compute capability
8.0."""
copy1 = _make_copy(1, "ca")
"""copy1(to, i, p, j, there): to[i] = p[j], one word, from global to shared memory, or zero if the int32 ``there`` is 0 (then
p[j] need not exist).  The copy is asynchronous; see ``copies_wait``.  Compute capability 8.0."""


def _make_copies(instruction: str) -> DeviceFunction:
    @intrinsic
    def copies(typingctx):
        def codegen(context, builder, sig, args):
            _asm(builder, f"{instruction};", [], 0, effect=True, memory=True)
            return context.get_dummy_value()

        return types.void(), codegen

    return copies


copies_commit = _make_copies("cp.async.commit_group")
"""copies_commit(): the thread's copies since the last call become a group."""
copies_wait = _make_copies("cp.async.wait_group 0")
"""copies_wait(): wait until all groups of the thread have arrived; those of other threads have after ``syncthreads``."""


# --- integers --------------------------------------------------------------------------------------------------


def _make_dot2(half: str, signed: bool) -> DeviceFunction:
    @intrinsic
    def dot2(typingctx, a, b, c):
        def codegen(context, builder, sig, args):
            return _asm(builder, f"dp2a.{half}.s32.{'s32' if signed else 'u32'} $0, $1, $2, $3;", args)

        return types.int32(types.uint32, types.uint32, types.int32), codegen

    return dot2


dot2_low = _make_dot2("lo", False)
"""dot2_low(a, b, c): c + a.0 b.0 + a.1 b.1, with a two int16 and b.0, b.1 the two low bytes of b, unsigned."""
dot2_high = _make_dot2("hi", False)
"""dot2_high(a, b, c): c + a.0 b.2 + a.1 b.3, with a two int16 and b.2, b.3 the two high bytes of b, unsigned."""
dot2_low_signed = _make_dot2("lo", True)
"""dot2_low_signed(a, b, c): c + a.0 b.0 + a.1 b.1, with the bytes of b signed."""
dot2_high_signed = _make_dot2("hi", True)
"""dot2_high_signed(a, b, c): c + a.0 b.2 + a.1 b.3, with the bytes of b signed."""


@intrinsic
def pick_bytes(typingctx, a, b, index):
    """Four of the eight bytes of a (0 .. 3) and b (4 .. 7): nibble k of index selects byte k (PTX ISA, prmt)."""

    def codegen(context, builder, sig, args):
        return _asm(builder, "prmt.b32 $0, $1, $2, $3;", args)

    return types.uint32(types.uint32, types.uint32, types.uint32), codegen


_MMA8 = "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32"
_MMA16 = "mma.sync.aligned.m16n8k{}.row.col.s32.s8.s8.s32"


def _mma_turing(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: Sequence[ir.Value]) -> ir.Value:
    """An 8 x 8 x 16 product, the only int8 product of compute capability 7.5."""
    return _asm(builder, f"{_MMA8} {{$0,$1}},{{$2}},{{$3}},{{$4,$5}};", [a, b, *c], 2, effect=True)


def _sums(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> ir.Value:
    """Four results as the struct that a function returns."""
    struct = ir.Constant(_STRUCT4, ir.Undefined)
    for k, value in enumerate(values):
        struct = builder.insert_value(struct, value, k)
    return struct


def _mma32_body(builder: ir.IRBuilder, args: Sequence[ir.Value], target: Target) -> ir.Value:
    a0, a1, a2, a3, b0, b1 = args
    zero = ir.Constant(_I32, 0)
    if target >= (8, 0):
        text = f"{_MMA16.format(32)} {{$0,$1,$2,$3}},{{$4,$5,$6,$7}},{{$8,$9}},{{$10,$10,$10,$10}};"
        return _asm(builder, text, [*args, zero], 4, effect=True)
    sums = []
    for first, second in ((a0, a2), (a1, a3)):
        low = _mma_turing(builder, first, b0, (zero, zero))
        both = _mma_turing(builder, second, b1, [builder.extract_value(low, k) for k in range(2)])
        sums += [builder.extract_value(both, k) for k in range(2)]
    return _sums(builder, sums)


def _mma32_onto_body(builder: ir.IRBuilder, args: Sequence[ir.Value], target: Target) -> ir.Value:
    a0, a1, a2, a3, b0, b1, *c = args
    if target >= (8, 0):
        text = f"{_MMA16.format(32)} {{$0,$1,$2,$3}},{{$4,$5,$6,$7}},{{$8,$9}},{{$10,$11,$12,$13}};"
        return _asm(builder, text, args, 4, effect=True)
    sums = []
    for first, second, before in ((a0, a2, c[:2]), (a1, a3, c[2:])):
        low = _mma_turing(builder, first, b0, before)
        both = _mma_turing(builder, second, b1, [builder.extract_value(low, k) for k in range(2)])
        sums += [builder.extract_value(both, k) for k in range(2)]
    return _sums(builder, sums)


def _mma16_body(builder: ir.IRBuilder, args: Sequence[ir.Value], target: Target) -> ir.Value:
    zero = ir.Constant(_I32, 0)
    if target >= (8, 0):
        text = f"{_MMA16.format(16)} {{$0,$1,$2,$3}},{{$4,$5}},{{$6}},{{$7,$7,$7,$7}};"
        return _asm(builder, text, [*args, zero], 4, effect=True)
    sums = []
    for a in args[:2]:
        part = _mma_turing(builder, a, args[2], (zero, zero))
        sums += [builder.extract_value(part, k) for k in range(2)]
    return _sums(builder, sums)


_mma32 = _differing("mma32", _STRUCT4, [_I32] * 6, _mma32_body)
_mma32_onto = _differing("mma32_onto", _STRUCT4, [_I32] * 10, _mma32_onto_body)
_mma16 = _differing("mma16", _STRUCT4, [_I32] * 3, _mma16_body)


@intrinsic
def mma32(typingctx, a0, a1, a2, a3, b0, b1):
    """One tensor-core product of a warp: 16 weight rows times 8 activation rows over 32 positions, int8, sums in int32.

    Lane 4 g + t passes the bytes at positions 4 t .. 4 t + 3 of weight rows g (a0) and g + 8 (a1), those at 16 + 4 t .. of
    the same rows (a2, a3), and of activation row g (b0, b1).  It gets the sums of weight rows g, g, g + 8, g + 8 with
    activation rows 2 t, 2 t + 1, 2 t, 2 t + 1 (PTX ISA, mma.m16n8k32).
    """

    def codegen(context, builder, sig, args):
        return _tuple(context, builder, sig.return_type, _mma32(builder, args))

    return _SUMS4(*[types.uint32] * 6), codegen


@intrinsic
def mma32_onto(typingctx, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """``mma32`` added to int32 sums c0 .. c3."""

    def codegen(context, builder, sig, args):
        return _tuple(context, builder, sig.return_type, _mma32_onto(builder, args))

    return _SUMS4(*[types.uint32] * 6, *[types.int32] * 4), codegen


@intrinsic
def mma16(typingctx, a0, a1, b0):
    """One tensor-core product of a warp over 16 positions, int8, sums in int32; a0, a1, b0 and the result as in ``mma32``."""

    def codegen(context, builder, sig, args):
        return _tuple(context, builder, sig.return_type, _mma16(builder, args))

    return _SUMS4(*[types.uint32] * 3), codegen


@intrinsic
def mma_half(typingctx, a0, a1, a2, a3, b0, b1):
    """One tensor-core product of a warp: 16 rows times 8 columns over 16 positions, two float16 to a word, sums in float32;
    exact as long as everything is an integer and no sum of magnitudes exceeds 2**24.  Compute capability 8.0.

    Lane 4 g + t passes positions 2 t, 2 t + 1 of rows g (a0) and g + 8 (a1), positions 2 t + 8, 2 t + 9 of these (a2, a3),
    and the same positions of column g (b0, b1).  It gets the sums of rows g, g, g + 8, g + 8 with columns 2 t, 2 t + 1, 2 t,
    2 t + 1 (PTX ISA, mma.m16n8k16).
    """

    def codegen(context, builder, sig, args):
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$10,$10,$10};"
        )
        sums = _asm(builder, text, [*args, ir.Constant(_I32, 0)], 4, effect=True)
        parts = [builder.bitcast(builder.extract_value(sums, k), ir.FloatType()) for k in range(4)]
        return context.make_tuple(builder, sig.return_type, parts)

    return types.UniTuple(types.float32, 4)(*[types.uint32] * 6), codegen


# --- exchanges within a warp -----------------------------------------------------------------------------------


def _make_shuffle(mode: str, is_float: bool, bounds: int = 31) -> DeviceFunction:
    value = types.float32 if is_float else types.int32

    @intrinsic
    def shuffle(typingctx, x, lane):
        def codegen(context, builder, sig, args):
            x = builder.bitcast(args[0], _I32) if is_float else args[0]
            text = f"shfl.sync.{mode}.b32 $0, $1, $2, {bounds}, 0xffffffff;"
            moved = _asm(builder, text, [x, args[1]], effect=True)
            return builder.bitcast(moved, ir.FloatType()) if is_float else moved

        return value(value, types.int32), codegen

    return shuffle


lane_xor = _make_shuffle("bfly", True)
"""lane_xor(x, m): the float32 x of the lane whose number is that of this lane XOR m.  All 32 lanes must call it."""
lane_xor_int = _make_shuffle("bfly", False)
"""lane_xor_int(x, m): the int32 x of the lane whose number is that of this lane XOR m.  All 32 lanes must call it."""
lane_from = _make_shuffle("idx", True)
"""lane_from(x, l): the float32 x of lane l.  All 32 lanes must call it."""
lane_of_four = _make_shuffle("idx", True, 0x1C1F)
"""lane_of_four(x, t): the float32 x of lane t of the four lanes 4 g .. 4 g + 3 of this one.  All 32 lanes must call it."""


def _make_lanes(name: str) -> DeviceFunction:
    """A reduction of int32 over the lanes of a warp, which GPUs before 8.0 do by exchanging."""

    def body(builder: ir.IRBuilder, args: Sequence[ir.Value], target: Target) -> ir.Value:
        if target >= (8, 0):
            return _asm(builder, f"redux.sync.{name}.s32 $0, $1, 0xffffffff;", args, effect=True)
        own = args[0]
        for k in range(5):
            text = f"shfl.sync.bfly.b32 $0, $1, {1 << k}, 31, 0xffffffff;"
            other = _asm(builder, text, [own], effect=True)
            larger = builder.select(builder.icmp_signed(">", other, own), other, own)
            own = larger if name == "max" else builder.add(own, other)
        return own

    reduction = _differing(f"lanes_{name}", _I32, [_I32], body)

    @intrinsic
    def reduce(typingctx, x):
        return types.int32(types.int32), lambda context, builder, sig, args: reduction(builder, args)

    return reduce


lanes_max = _make_lanes("max")
"""lanes_max(x): the largest int32 x of all 32 lanes.  All of them must call it."""
lanes_sum = _make_lanes("add")
"""lanes_sum(x): the sum of the int32 x of all 32 lanes.  All of them must call it."""


# --- the neighbours in a chain of kernels ----------------------------------------------------------------------


def _make_control(instruction: str) -> DeviceFunction:
    def body(builder: ir.IRBuilder, args: Sequence[ir.Value], target: Target) -> None:
        if target >= (9, 0):
            _asm(builder, f"{instruction};", [], 0, effect=True, memory=True)

    call = _differing(instruction.replace(".", "_"), ir.VoidType(), [], body)

    @intrinsic
    def control(typingctx):
        def codegen(context, builder, sig, args):
            call(builder, [])
            return context.get_dummy_value()

        return types.void(), codegen

    return control


wait_for_inputs = _make_control("griddepcontrol.wait")
"""wait_for_inputs(): wait until the kernels before this one have ended and their results can be read.

With programmatic dependent launch (compute capability 9.0) a kernel begins while the one before it still runs, so that its
first weights are in flight when its inputs are ready.  Before compute capability 9.0 there is nothing to wait for."""
let_next_begin = _make_control("griddepcontrol.launch_dependents")
"""let_next_begin(): allow the next kernel to begin as soon as every block of this one has called it."""


def _numbers(builder: ir.IRBuilder, type_: types.Type, value: ir.Value) -> list[ir.Value]:
    """The 32-bit numbers in a tuple of numbers and tuples."""
    if isinstance(type_, types.BaseTuple):
        inside = [_numbers(builder, part, builder.extract_value(value, k)) for k, part in enumerate(type_)]
        return [number for numbers in inside for number in numbers]
    return [builder.bitcast(value, _I32)] if isinstance(type_, types.Number) else []


def _make_hold(n: int) -> Callable[[ir.IRBuilder, Sequence[ir.Value]], ir.Value]:
    """Of n numbers and ``never``."""
    registers = ",".join(f"${k}" for k in range(n))
    store = f"@p st.shared.v{n}.u32 [${n}], {{{registers}}};" if n > 1 else "@p st.shared.u32 [$1], $0;"
    text = f"{{.reg .pred p; setp.ne.s32 p, ${n}, 0; {store}}}"

    def body(builder: ir.IRBuilder, args: Sequence[ir.Value], target: Target) -> None:
        if target >= (9, 0):
            _asm(builder, text, args, 0, effect=True, memory=True)

    return _differing(f"hold{n}", ir.VoidType(), [_I32] * (n + 1), body)


_HOLD = {n: _make_hold(n) for n in (4, 2, 1)}


@intrinsic
def hold(typingctx, x, never):
    """hold(x, never): everything that x, a tuple of 32-bit numbers and tuples, consists of has been computed at this point.

    Compilers move arithmetic towards its use, past ``wait_for_inputs``, where it would delay the result.  This adds another
    use, a store that they must keep, since they cannot know that the int32 ``never`` is 0.
    """

    def codegen(context, builder, sig, args):
        numbers = _numbers(builder, sig.args[0], args[0])
        while numbers:
            n = next(n for n in _HOLD if n <= len(numbers))
            stored, numbers = numbers[:n], numbers[n:]
            _HOLD[n](builder, [*stored, args[1]])
        return context.get_dummy_value()

    return types.void(x, types.int32), codegen


# --- the scalar functions, and their laws in the simulator -----------------------------------------------------

ACTIVATIONS = numerics.ACTIVATIONS
bits_float = numerics.bits_float
decay_of = numerics.decay_of
exp = numerics.exp
exp2 = numerics.exp2
finite = numerics.finite
float_bits = numerics.float_bits
float_to_half = numerics.float_to_half
fma = numerics.fma
gaussian_cutoff = numerics.gaussian_cutoff
gelu = numerics.gelu
gumbel = numerics.gumbel
half_to_float = numerics.half_to_float
inverse_root = numerics.inverse_root
log = numerics.log
magnitude_ratio = numerics.magnitude_ratio
rectified = numerics.rectified
round_product = numerics.round_product
round_to_bits = numerics.round_to_bits
scale_exponent = numerics.scale_exponent
sigmoid = numerics.sigmoid
silu = numerics.silu
softcap = numerics.softcap
softplus = numerics.softplus
stored_half = numerics.stored_half
tanh = numerics.tanh
uniform = numerics.uniform
unless_overflow = numerics.unless_overflow

if SIMULATED:
    from engine.cuda.runtime.simulator import *  # noqa: F403
