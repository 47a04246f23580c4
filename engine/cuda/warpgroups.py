"""The atoms of compute capability 9.0: products of a warpgroup (128 threads), copies in bulk, and barriers for them.

They are like those of ``engine/cuda/intrinsics.py``, each beside its law, but exist on no other compute capability.  The
integer products are exact, and so are those of float16, because all of their operands and sums are small integers.

A *barrier* is a pair of words of shared memory, at an even index, that counts arrivals and bytes.  When the expected number
of both has come, its phase ends and the next one begins.  The phases of a barrier are numbered from 0, and a thread waits for
the end of one by its *parity*, the lowest bit of this number.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cuda.intrinsics import SIMULATED, _asm, _shared_place
from engine.cuda.runtime.kinds import DeviceFunction, Lowering

POSITIONS = 256
"""Positions of a product."""

CORE_WORDS = 32
"""Words of a *core matrix*: 16 bytes of each of 8 columns.  The instructions read their second operand as such matrices."""
STEP, APART = 4 * 2 * CORE_WORDS // 16, 4 * 16 * CORE_WORDS // 16
"""Units of 16 bytes from 32 positions of activations to the next, and from 8 columns to the next."""

_I32 = ir.IntType(32)


# --- barriers and copies in bulk ---------------------------------------------------------------------------------


def _make_barrier_atom(text: str, operands: int) -> DeviceFunction:
    """An atom of the barrier at p[i], $0 in ``text``, with further int32 operands."""

    def declare(p, i, *further):
        def codegen(context, builder, sig, args):
            place = _shared_place(builder, args[0], args[1])
            _asm(builder, text, [place, *args[2:]], 0, effect=True, memory=True)
            return context.get_dummy_value()

        return types.void(p, i, *[types.int32] * operands), codegen

    @intrinsic
    def without(typingctx, p, i):
        return declare(p, i)

    @intrinsic
    def with_one(typingctx, p, i, n):
        return declare(p, i)

    return with_one if operands else without


barrier_init = _make_barrier_atom("mbarrier.init.shared::cta.b64 [$0], $1;", 1)
"""barrier_init(p, i, n): make the words p[i : i + 2] a barrier whose phases end after n arrivals.  Other threads may use it
after ``barriers_ready`` and ``syncthreads``."""
barrier_expect = _make_barrier_atom("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", 1)
"""barrier_expect(p, i, n): arrive, and let the phase end only after ``bulk_copy`` has copied n bytes more."""
barrier_arrive = _make_barrier_atom("mbarrier.arrive.shared::cta.b64 _, [$0];", 0)
"""barrier_arrive(p, i): arrive.  What this thread has read and written before comes before what others do after the phase."""
barrier_wait = _make_barrier_atom(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra done; bra again; done: }", 1
)
"""barrier_wait(p, i, parity): wait until the latest phase of this parity has ended.  Before the first phase has ended, parity
1 counts as ended.  Lanes of a warp may leave at different times."""


@intrinsic
def barriers_ready(typingctx):
    """Let copies in bulk see the barriers that this thread has made."""

    def codegen(context, builder, sig, args):
        _asm(builder, "fence.mbarrier_init.release.cluster;", [], 0, effect=True, memory=True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def bulk_copy(typingctx, to, i, p, n_bytes, barriers, k):
    """Start copying n_bytes from p in global memory to shared memory to[i], both addresses and n_bytes multiples of 16.  The
    bytes count in the barrier at barriers[k].  Only one thread should call it: a warp copies for its lanes one after
    another."""

    def codegen(context, builder, sig, args):
        place, barrier = _shared_place(builder, args[0], args[1]), _shared_place(builder, args[4], args[5])
        text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
        _asm(builder, text, [place, args[2], args[3], barrier], 0, "rlrr", effect=True, memory=True)
        return context.get_dummy_value()

    return types.void(to, i, p, types.int32, barriers, k), codegen


# --- products ----------------------------------------------------------------------------------------------------


def _descriptor(builder: ir.IRBuilder, p: ir.Value, i: ir.Value) -> ir.Value:
    """The low word of a matrix descriptor (PTX ISA, "matrix descriptor format"): the address of p[i] in units of 16 bytes,
    and from bit 16 on the distance of two core matrices of the same columns."""
    place = _shared_place(builder, p, i)
    address = builder.lshr(builder.and_(place, ir.Constant(_I32, 0x3FFFF)), ir.Constant(_I32, 4))
    return builder.or_(address, ir.Constant(_I32, 4 * CORE_WORDS // 16 << 16))


def _registers(first: int, n: int) -> str:
    return ",".join(f"${k}" for k in range(first, first + n))


def _product(columns: int, signed: bool) -> str:
    """The instruction that multiplies 64 rows of bytes by columns of int8 over 32 positions."""
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.{'s8' if signed else 'u8'}.s8"


@intrinsic
def matrices(typingctx, p, i):
    """The core matrices in shared memory from p[i] on, for the atoms of ``make_step_products``."""
    return types.uint32(p, i), lambda context, builder, sig, args: _descriptor(builder, args[0], args[1])


def make_step_products(
    columns: int, signed: bool, planes: int
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """The atoms begin_products(words, x, j, dots), add_products(words, x, j, dots) and finish_products(dots): dots int32
    [planes, columns / 2] = high plane * x, low plane * x, or only the first of them, in steps of 32 positions, of which later
    ones may still be unpacked while the tensor cores compute earlier ones.

    begin_products is the first step, add_products each further one; what they write may be used after finish_products.  All
    threads of a warpgroup call them, without a divergence within a warp.  Each of its warps multiplies 16 weight rows with
    ``columns`` columns of x, int8, over positions 32 j .. 32 j + 31.

    words: the lane's four words of the high plane, ``signed`` or not, then those of the low one, which is not, in the layout
        of ``engine.cuda.intrinsics.mma32``.
    x: ``matrices``, [columns / 8, 16]: matrix k of 8 columns has positions 16 k .. 16 k + 15.
    dots: of each plane, lane 4 g + t gets rows g, g, g + 8, g + 8 with columns 8 n + 2 t, 8 n + 2 t + 1, 8 n + 2 t, 8 n + 2 t
        + 1 in dots[4 n : 4 n + 4].
    """
    words = columns // 2
    n, products = planes * words, [_product(columns, signed), _product(columns, False)][:planes]
    given = [ir.Constant(_I32, k) for k in range(n)]

    def text(at: int, first: bool) -> str:
        """at: the number of the operand of the first word."""
        issued = (
            f"{product} {{{_registers(words * m, words)}}}, {{{_registers(at + 4 * m, 4)}}}, x, p;"
            for m, product in enumerate(products)
        )
        return (
            f"{{ .reg .pred p; .reg .b64 x; mov.b64 x, {{${at + 4 * planes}, {APART}}}; setp.ne.b32 p, {int(not first)}, 0;"
            f"wgmma.fence.sync.aligned; {''.join(issued)}"
            f"wgmma.commit_group.sync.aligned; {'' if first else 'wgmma.wait_group.sync.aligned 1;'} }}"
        )

    def call(
        context: Lowering,
        builder: ir.IRBuilder,
        type_: types.Type,
        dots: ir.Value,
        text: str,
        more: list[ir.Value],
        new: bool,
    ) -> None:
        """Inline PTX whose first n operands are dots, ``new`` or changed."""
        to = context.make_array(type_)(context, builder, dots).data
        before = [] if new else [builder.load(builder.gep(to, [k])) for k in given]
        function = ir.FunctionType(ir.LiteralStructType([_I32] * n), [_I32] * (len(before) + len(more)))
        kinds = ["=&r" if new else "=r"] * n + ["r"] * len(more) + [str(k) for k in range(len(before))]
        sums = builder.call(
            ir.InlineAsm(function, text, ",".join([*kinds, "~{memory}"]), side_effect=True), [*more, *before]
        )
        for k in range(n):
            builder.store(builder.extract_value(sums, k), builder.gep(to, [given[k]]))

    def make_step(first: bool) -> Callable[..., None]:
        def codegen(context, builder, sig, args):
            own = [builder.extract_value(args[0], k) for k in range(4 * planes)]
            step = builder.mul(args[2], ir.Constant(_I32, STEP))
            operands = [*own, builder.add(args[1], step)]
            call(context, builder, sig.args[3], args[3], text(n, first), operands, first)
            return context.get_dummy_value()

        @intrinsic
        def step_products(typingctx, words, x, j, dots):
            return types.void(words, x, types.int32, dots), codegen

        return step_products

    @intrinsic
    def finish_products(typingctx, dots):
        def codegen(context, builder, sig, args):
            call(context, builder, sig.args[0], args[0], "wgmma.wait_group.sync.aligned 0;", [], False)
            return context.get_dummy_value()

        return types.void(dots), codegen

    return make_step(True), make_step(False), finish_products


def make_low_products(columns: int, shift: int) -> Callable[..., None]:
    """The atom low_products(low, x, dots): dots int32 [columns / 2] = 2**shift * dots + low plane * x, in place of
    finish_products after steps of the high plane only.

    low uint32 [32]: the lane's bytes of the low plane, unsigned, four words for each step; x, dots: as in
    ``make_step_products``.
    """
    n, product = columns // 2, _product(columns, False)
    lines = ["{ .reg .pred p; .reg .b64 x; .reg .b32 y; setp.ne.b32 p, 1, 0;", "wgmma.wait_group.sync.aligned 0;"]
    lines.extend(f"shl.b32 ${k}, ${k}, {shift};" for k in range(n))
    lines.append("wgmma.fence.sync.aligned;")
    for j in range(8):
        lines.append(f"add.u32 y, ${n + 32}, {STEP * j}; mov.b64 x, {{y, {APART}}};")
        lines.append(f"{product} {{{_registers(0, n)}}}, {{{_registers(n + 4 * j, 4)}}}, x, p;")
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
    text = "\n".join(lines)

    @intrinsic
    def low_products(typingctx, low, x, dots):
        def codegen(context, builder, sig, args):
            given, to = (context.make_array(sig.args[k])(context, builder, args[k]).data for k in (0, 2))

            def load(array: ir.Value, count: int) -> list[ir.Value]:
                return [builder.load(builder.gep(array, [ir.Constant(_I32, k)])) for k in range(count)]

            operands = [*load(given, 32), args[1], *load(to, n)]
            function = ir.FunctionType(ir.LiteralStructType([_I32] * n), [_I32] * len(operands))
            kinds = ["=r"] * n + ["r"] * 33 + [str(k) for k in range(n)]
            sums = builder.call(
                ir.InlineAsm(function, text, ",".join([*kinds, "~{memory}"]), side_effect=True), operands
            )
            for k in range(n):
                builder.store(builder.extract_value(sums, k), builder.gep(to, [ir.Constant(_I32, k)]))
            return context.get_dummy_value()

        return types.void(low, x, dots), codegen

    return low_products


def make_half_products(columns: int) -> Callable[..., None]:
    """The atom half_products(a, p, i, sums): sums float32 [columns / 2] = a * y over 16 positions of float16; exact as long
    as everything is an integer and no sum of magnitudes exceeds 2**24.

    All threads of a warpgroup call it, without a divergence within a warp.

    a: the lane's four words of 16 rows, in the layout of ``engine.cuda.intrinsics.mma_half``.
    y: core matrices in shared memory from p[i] on, [columns / 8, 2].
    sums: lane 4 g + t gets rows g, g, g + 8, g + 8 with columns 8 n + 2 t, 8 n + 2 t + 1, 8 n + 2 t, 8 n + 2 t + 1 in
        sums[4 n : 4 n + 4].
    """
    n_sums = columns // 2
    product = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    text = (
        f"{{ .reg .pred p; .reg .b64 y; setp.ne.b32 p, 0, 0; mov.b64 y, {{${n_sums + 4}, {4 * 2 * CORE_WORDS // 16}}};"
        f"wgmma.fence.sync.aligned; {product} {{{_registers(0, n_sums)}}}, {{{_registers(n_sums, 4)}}}, y, p, 1, 1, 0;"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
    )

    @intrinsic
    def half_products(typingctx, a, p, i, sums):
        def codegen(context, builder, sig, args):
            to = context.make_array(sig.args[3])(context, builder, args[3]).data
            operands = [builder.extract_value(args[0], k) for k in range(4)]
            operands.append(_descriptor(builder, args[1], args[2]))
            function = ir.FunctionType(ir.LiteralStructType([ir.FloatType()] * n_sums), [_I32] * 5)
            constraints = ",".join(["=&f"] * n_sums + ["r"] * 5 + ["~{memory}"])
            results = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), operands)
            for k in range(n_sums):
                builder.store(builder.extract_value(results, k), builder.gep(to, [ir.Constant(_I32, k)]))
            return context.get_dummy_value()

        return types.void(a, p, i, sums), codegen

    return half_products


if SIMULATED:
    from engine.cuda.runtime.simulated_warpgroups import *  # noqa: F403
