"""Random small changes of the code that computes, caches, drafts and samples, and the tests of its room that find them.

    python -m tests.mutations --seed 1 -n 100 -j 2 --json mutations.json

A seed always gives the same changes of the same sources. A change (a *mutant*) is found if a test fails or times out.

The tool changes operators, comparisons and their bounds, constants, bounds of ``range``, the operands of operations that do
not commute, and arguments of calls; it replaces an ``fma`` by a product and a sum; and it exchanges two statements of which
the second depends on the first.

It does not change code that cannot, or need not, affect a result:

- docstrings and other texts, error messages, assertions, annotations, decorators, imports;
- the length of scratch memory (``np.empty``, ``cuda.local.array``, ``cuda.shared.array``, ...): more of it has no effect;
- masks "for the compiler", such as ``cuda.threadIdx.x & 255``;
- hints to the hardware: ``prefetch``, ``let_next_begin``, ``hold``;
- the division of work, which by contract does not affect results: computations of the host before a kernel is made or
  launched (in ``engine/cuda`` only functions that run on the device are changed), and the constants of :data:`TUNING`;
- the two factors of ``fma``, a difference in ``abs``, and other operands that commute;
- host code of the GPU backend, the simulator and the checks of PTX, which are not kernels.
"""

import argparse
import ast
import functools
import json
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.copies import Outcome, Runner, write_table

ROOMS: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    "cpu": (
        30,
        {
            "engine/numerics.py": ("tests/test_numerics.py", "tests/decode/test_sampler.py"),
            "engine/cpu/accept.py": ("tests/speculative/test_accept.py",),
            "engine/cpu/altup.py": ("tests/cpu/test_altup.py", "tests/cpu/test_bounds.py -k alternating"),
            "engine/cpu/attention.py": (
                "tests/cpu/test_attention.py",
                "tests/cpu/test_quantized_cache.py",
                "tests/cpu/test_bounds.py -k attention",
            ),
            "engine/cpu/compressed_attention.py": (
                "tests/cpu/test_compressed.py",
                "tests/cpu/test_bounds.py -k compressed",
            ),
            "engine/cpu/compressor.py": ("tests/cpu/test_compressed.py", "tests/cpu/test_bounds.py -k compressed"),
            "engine/cpu/delta_net.py": ("tests/cpu/test_delta_net.py", "tests/cpu/test_bounds.py -k recurrence"),
            "engine/cpu/dry.py": ("tests/decode/test_dry.py",),
            "engine/cpu/embed.py": ("tests/gguf/test_quants.py", "tests/cpu/test_matmul.py"),
            "engine/cpu/fold.py": (
                "tests/cpu/test_operations.py",
                "tests/cpu/test_matmul.py",
                "tests/cpu/test_bounds.py -k operations",
            ),
            "engine/cpu/glu.py": (
                "tests/cpu/test_operations.py",
                "tests/models/test_oracle.py",
                "tests/cpu/test_bounds.py -k operations",
            ),
            "engine/cpu/hyper.py": ("tests/cpu/test_compressed.py",),
            "engine/cpu/indexer.py": ("tests/cpu/test_compressed.py", "tests/cpu/test_bounds.py -k compressed"),
            "engine/cpu/lanes.py": ("tests/cpu/test_lanes.py",),
            "engine/cpu/latent_attention.py": ("tests/cpu/test_latent_attention.py",),
            "engine/cpu/mtp.py": ("tests/models/test_mtp.py", "tests/cuda/simulated/test_mtp.py"),
            "engine/cpu/per_layer.py": ("tests/models/test_gemma4.py", "tests/models/test_oracle.py"),
            "engine/cpu/products/dense.py": ("tests/cpu/test_matmul.py -k float",),
            "engine/cpu/products/experts.py": ("tests/cpu/test_experts.py", "tests/cpu/test_bounds.py -k experts"),
            "engine/cpu/products/panel.py": ("tests/cpu/test_matmul.py -k many_rows",),
            "engine/cpu/products/router.py": ("tests/cpu/test_router.py",),
            "engine/cpu/products/law.py": ("tests/cpu/test_matmul.py",),
            "engine/cpu/products/matmul.py": ("tests/cpu/test_matmul.py",),
            "engine/cpu/products/quantize.py": ("tests/cpu/test_matmul.py",),
            "engine/cpu/products/repack.py": ("tests/cpu/test_repack.py",),
            "engine/cpu/products/unpack.py": ("tests/gguf/test_quants.py", "tests/cpu/test_matmul.py"),
            "engine/cpu/quantized_cache.py": (
                "tests/cpu/test_quantized_cache.py",
                "tests/cpu/test_bounds.py -k quantized",
            ),
            "engine/cpu/layer_norm.py": ("tests/cpu/test_operations.py -k layer_norm",),
            "engine/cpu/rms_norm.py": (
                "tests/cpu/test_operations.py",
                "tests/models/test_oracle.py",
                "tests/cpu/test_bounds.py -k operations",
            ),
            "engine/cpu/rope.py": ("tests/cpu/test_operations.py", "tests/cpu/test_bounds.py -k operations"),
            "engine/cpu/runs.py": (
                "tests/cpu/test_delta_net.py",
                "tests/cpu/test_kda.py",
                "tests/cpu/test_mamba.py",
                "tests/cpu/test_short_conv.py",
            ),
            "engine/cpu/runtime/pool.py": ("tests/cpu/test_programs.py",),
            "engine/cpu/runtime/program.py": ("tests/cpu/test_team.py", "tests/cpu/test_programs.py"),
            "engine/cpu/runtime/walk.py": ("tests/cpu/test_team.py",),
            "engine/cpu/sample.py": ("tests/decode/test_sampler.py",),
            "engine/cpu/kda.py": ("tests/cpu/test_kda.py", "tests/cpu/test_bounds.py -k kda"),
            "engine/cpu/mamba.py": ("tests/cpu/test_mamba.py", "tests/cpu/test_bounds.py -k mamba"),
            "engine/cpu/short_conv.py": ("tests/cpu/test_short_conv.py", "tests/cpu/test_bounds.py -k short"),
            "engine/cpu/softcap.py": (
                "tests/cpu/test_operations.py",
                "tests/models/test_oracle.py",
                "tests/cpu/test_bounds.py -k operations",
            ),
            "engine/cpu/sparsify.py": ("tests/cpu/test_altup.py", "tests/cpu/test_bounds.py -k alternating"),
            "engine/cpu/xtc.py": ("tests/decode/test_xtc.py",),
        },
    ),
    "cuda": (
        40,
        {
            "engine/cuda/accept.py": ("tests/cuda/simulated/test_accept.py",),
            "engine/cuda/add.py": ("tests/cuda/simulated/test_operations.py -k sums",),
            "engine/cuda/altup.py": ("tests/cuda/simulated/test_altup.py",),
            "engine/cuda/attention/attend.py": ("tests/cuda/simulated/test_attention.py",),
            "engine/cuda/products/chain.py": (
                "tests/cuda/simulated/test_operations.py -k matmul",
                "tests/cuda/simulated/test_experts.py -k 'products and not many_rows'",
            ),
            "engine/cuda/attention/combine.py": (
                "tests/cuda/simulated/test_attention.py",
                "tests/cuda/simulated/test_integer_attention.py -k sizes_of_heads_of_steps",
            ),
            "engine/cuda/delta_net.py": ("tests/cuda/simulated/test_delta_net.py -k 'not wide'",),
            "engine/cuda/attention/direct.py": ("tests/cuda/simulated/test_direct_attention.py",),
            "engine/cuda/embed.py": ("tests/cuda/simulated/test_operations.py -k embed",),
            "engine/cuda/products/experts.py": (
                "tests/cuda/simulated/test_experts.py -k 'products and not many_rows'",
                "tests/cuda/simulated/test_experts.py -k 'single_row or several_rows'",
                "tests/cuda/simulated/test_mixture.py",
            ),
            "engine/cuda/fold.py": (
                "tests/cuda/simulated/test_operations.py -k norm",
                "tests/cuda/simulated/test_rope.py",
            ),
            "engine/cuda/glu.py": (
                "tests/cuda/simulated/test_operations.py -k gate",
                "tests/cuda/simulated/test_parity.py",
            ),
            "engine/cuda/products/join.py": (
                "tests/cuda/simulated/test_experts.py -k 'end_of'",
                "tests/cuda/simulated/test_experts.py -k 'single_row or several_rows'",
                "tests/cuda/simulated/test_mixture.py",
            ),
            "engine/cuda/products/heads.py": ("tests/cuda/simulated/test_latent.py -k 'products or operations'",),
            "engine/cuda/attention/latent.py": ("tests/cuda/simulated/test_latent.py -k 'not products'",),
            "engine/cuda/latent.py": ("tests/cuda/simulated/test_latent.py -k 'queries or operations'",),
            "engine/cuda/products/matmul.py": ("tests/cuda/simulated/test_operations.py -k matmul",),
            "engine/cuda/mtp.py": ("tests/cuda/simulated/test_mtp.py",),
            "engine/cuda/per_layer.py": ("tests/cuda/simulated/test_per_layer.py",),
            "engine/cuda/products/quantize.py": ("tests/cuda/simulated/test_operations.py",),
            "engine/cuda/quantized_cache.py": (
                "tests/cuda/simulated/test_rope.py",
                "tests/cuda/simulated/test_direct_attention.py",
            ),
            "engine/cuda/attention/quantized_tile.py": ("tests/cuda/simulated/test_tiled_attention.py",),
            "engine/cuda/layer_norm.py": ("tests/cuda/simulated/test_operations.py -k layer_norm",),
            "engine/cuda/rms_norm.py": ("tests/cuda/simulated/test_operations.py -k norm",),
            "engine/cuda/rope.py": ("tests/cuda/simulated/test_rope.py",),
            "engine/cuda/products/router.py": (
                "tests/cuda/simulated/test_router.py",
                "tests/cuda/simulated/test_experts.py -k chooses",
                "tests/cuda/simulated/test_experts.py -k single_row",
            ),
            "engine/cuda/sample.py": ("tests/cuda/simulated/test_sample.py",),
            "engine/cuda/attention/scores.py": ("tests/cuda/simulated/test_direct_attention.py",),
            "engine/cuda/kda.py": ("tests/cuda/simulated/test_kda.py",),
            "engine/cuda/mamba.py": ("tests/cuda/simulated/test_mamba.py",),
            "engine/cuda/short_conv.py": ("tests/cuda/simulated/test_short_conv.py",),
            "engine/cuda/softcap.py": ("tests/cuda/simulated/test_operations.py -k softcap",),
            "engine/cuda/sparsify.py": ("tests/cuda/simulated/test_altup.py",),
            "engine/cuda/attention/tile.py": ("tests/cuda/simulated/test_tiled_attention.py",),
            "engine/cuda/attention/tiled.py": (
                "tests/cuda/simulated/test_tiled_attention.py",
                "tests/cuda/simulated/test_latent.py -k prompt",
            ),
            **dict.fromkeys(
                (f"engine/cuda/products/{name}.py" for name in ("lanes", "unpack", "unpack_bits", "unpack_grid")),
                ("tests/cuda/simulated/test_operations.py", "tests/cuda/simulated/test_wide_matmul.py"),
            ),
            "engine/cuda/attention/warp_chunk.py": ("tests/cuda/simulated/test_direct_attention.py",),
            "engine/cuda/attention/weigh.py": ("tests/cuda/simulated/test_attention.py",),
            "engine/cuda/attention/weighted_values.py": ("tests/cuda/simulated/test_direct_attention.py",),
            "engine/cuda/products/wide_chain.py": ("tests/cuda/simulated/test_wide_matmul.py",),
            "engine/cuda/wide_delta_net.py": ("tests/cuda/simulated/test_delta_net.py -k wide",),
            "engine/cuda/products/wide_experts.py": (
                "tests/cuda/simulated/test_experts.py -k 'pairs_by_expert or products_of_many_rows'",
                "tests/cuda/simulated/test_experts.py -k test_many_rows",
            ),
            "engine/cuda/products/wide_matmul.py": ("tests/cuda/simulated/test_wide_matmul.py",),
        },
    ),
    "cache": (
        10,
        {
            "engine/cache/kv.py": (
                "tests/cache/test_cache.py",
                "tests/models/test_recurrent.py",
                "tests/speculative/test_speculation.py",
                "tests/verify/test_parity.py -k pages_of_two",
            ),
            "engine/cache/pages.py": ("tests/cache/test_cache.py", "tests/models/test_gemma4.py -k taken_back"),
            "engine/cache/recurrent.py": ("tests/models/test_recurrent.py",),
            "engine/cache/sequence.py": (
                "tests/cache/test_cache.py",
                "tests/models/test_recurrent.py",
                "tests/models/test_deepseek4.py -k beginning",
            ),
            "engine/cache/types.py": ("tests/cache/test_cache.py", "tests/cpu/test_quantized_cache.py"),
        },
    ),
    "speculation": (
        12,
        {
            "engine/speculative/acceptance.py": ("tests/speculative/test_ratio.py",),
            "engine/speculative/assistant.py": ("tests/models/test_assistant.py",),
            "engine/speculative/allotment.py": ("tests/speculative/test_allotment.py",),
            "engine/speculative/controller.py": (
                "tests/speculative/test_controller.py",
                "tests/speculative/test_allotment.py",
            ),
            "engine/speculative/draft_model.py": (
                "tests/speculative/test_draft_model.py",
                "tests/speculative/test_ratio.py",
                "tests/cuda/simulated/test_speculation.py",
            ),
            "engine/speculative/lookup.py": ("tests/speculative/test_lookup.py",),
            "engine/speculative/speculation.py": (
                "tests/speculative/test_speculation.py",
                "tests/speculative/test_ratio.py",
                "tests/cuda/simulated/test_speculation.py",
            ),
            "engine/speculative/mtp.py": ("tests/models/test_mtp.py", "tests/cuda/simulated/test_speculation.py"),
            "engine/speculative/params.py": ("tests/speculative/test_speculation.py", "tests/cli/test_flags.py"),
            "engine/speculative/passes.py": ("tests/speculative/test_passes.py", "tests/speculative/test_allotment.py"),
            "engine/speculative/proposal.py": ("tests/speculative/test_speculation.py",),
            "engine/decode/host_steps.py": ("tests/speculative/test_speculation.py", "tests/speculative/test_ratio.py"),
        },
    ),
    "sampler": (
        8,
        {
            "engine/sampling/params.py": (
                "tests/decode/test_sampler.py",
                "tests/decode/test_dry.py",
                "tests/decode/test_xtc.py",
            ),
            "engine/sampling/processors.py": ("tests/decode/test_processors.py",),
            "engine/sampling/sampler.py": (
                "tests/decode/test_sampler.py",
                "tests/decode/test_dry.py",
                "tests/decode/test_xtc.py",
            ),
        },
    ),
}
"""The share of each room in a hundred mutants, and the tests of each of its files, the fastest first."""

ON_DEVICE = "engine/cuda/"
"""In files below this folder only functions that run on the device are changed: the others make kernels or divide work."""

TUNING = frozenset(
    ("FEW", "_BLOCK", "WINDOW", "SEEN", "MEMORY", "PRIOR", "GAIN", "FIRST_PAUSE", "LONGEST_PAUSE", "MEASURED")
    + (
        "ALIKE",
        "ROW",
        "AHEAD_OF_LOOKUP",
        "DRAFT_MAX",
        "IN_FLIGHT",
        "step",
        "shares",
        "__all__",
        "SPINS",
        "YIELDS",
        "LINGERS",
        "TILE_NS",
        "LEAST_NS",
        "MANY",
        "TILE",
        "grain",
    )
)
"""Names of constants that affect only speed."""

SCRATCH = frozenset(("empty", "zeros", "empty_like", "zeros_like", "array", "full"))
HINTS = frozenset(("prefetch", "let_next_begin", "hold", "set_num_threads", "print"))
COMMUTE = frozenset(
    ("min", "max", "fma", "isinstance", "join", "zip", "range", "getattr", "pick_bytes")
    # of LLVM
    + ("and_", "or_", "xor", "fadd", "fmul")
)

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
}
COMPARISONS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}


@dataclass(frozen=True)
class Mutant:
    """A change of one place: bytes [start, end) of a file become ``new``."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The text of the file with the change."""
        raw = text.encode()
        assert raw[self.start : self.end].decode() == self.old
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests of its file."""
        return next(files[self.file] for _, files in ROOMS.values() if self.file in files)

    def __str__(self) -> str:
        old, new = (" ".join(part.split()) for part in (self.old, self.new))
        return f"{self.file}:{self.line} {self.kind}: {old} -> {new}"


class Places(ast.NodeVisitor):
    """All possible changes of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.raw = file, text.encode()
        self._begins = [0]
        for line in self.raw.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))
        self.found: list[Mutant] = []
        self._functions = 0
        # Differences of which only the magnitude counts.
        self._magnitudes: set[ast.expr] = set()
        self.visit(ast.parse(text))

    # --- where ----------------------------------------------------------------------------------------------------

    def _span(self, node: ast.AST) -> tuple[int, int]:
        n: ast.expr = node  # type: ignore[assignment]
        assert n.end_lineno is not None and n.end_col_offset is not None
        return self._begins[n.lineno - 1] + n.col_offset, self._begins[n.end_lineno - 1] + n.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.raw[start:end].decode()

    def _add(self, kind: str, node: ast.AST, start: int, end: int, new: str) -> None:
        old = self.raw[start:end].decode()
        if old != new:
            self.found.append(Mutant(self.file, getattr(node, "lineno", 0), kind, start, end, old, new))

    # --- what is left out -------------------------------------------------------------------------------------------

    def visit_Module(self, node: ast.Module) -> None:
        self._block(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._block(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        decorators = {ast.unparse(d) for d in node.decorator_list}
        if self.file.startswith(ON_DEVICE) and not decorators & {"device", "cuda.jit"}:
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, ast.FunctionDef):
                    self.visit(inner)
            return
        self._functions += 1
        self._block(node.body)
        self._functions -= 1

    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        # A branch that only raises an error contains a message: its condition is changed, its body is not.
        self.visit(node.test)
        self._block(node.body)
        self._block(node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._block(node.body)
        self._block(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._block(node.body)

    def visit_With(self, node: ast.With) -> None:
        self._block(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assigned([node.target], node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node.targets, node.value)

    def _assigned(self, targets: list[ast.expr], value: ast.expr | None) -> None:
        names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if value is None or names & TUNING:
            return
        for target in targets:
            if isinstance(target, ast.Subscript):
                self.visit(target)
        self.visit(value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        # ``kernel[grid]`` and types are not indices, but the changed code contains neither.
        self.visit(node.value)
        self.visit(node.slice)

    # --- statements -------------------------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.visit(statement)
        if not self._functions:
            return
        simple = (ast.Assign, ast.AugAssign, ast.Expr)
        for first, second in zip(body, body[1:], strict=False):
            if isinstance(first, simple) and isinstance(second, simple) and self._needs(second, first):
                (a, b), (c, d) = self._span(first), self._span(second)
                swapped = self.raw[c:d] + self.raw[b:c] + self.raw[a:b]
                self._add("order of statements", first, a, d, swapped.decode())

    def _needs(self, second: ast.stmt, first: ast.stmt) -> bool:
        """Whether a statement reads a value that the statement before it has changed, other than by its first assignment."""
        written = {n.id for n in ast.walk(first) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} | {
            n.value.id
            for n in ast.walk(first)
            if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name)
        }
        return bool(written & {n.id for n in ast.walk(second) if isinstance(n, ast.Name)})

    # --- expressions ------------------------------------------------------------------------------------------------

    def _between(self, node: ast.AST, left: ast.AST, right: ast.AST, kind: str, old: str, new: str) -> None:
        """Add the replacement of the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.raw[start:end].decode()
        if gap.count(old) == 1 or (len(old) == 1 and gap.strip(" ()\n") == old):
            at = start + gap.index(old)
            self._add(kind, node, at, at + len(old), new)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = self._text(node)
        if isinstance(node.op, ast.BitAnd) and re.search(r"cuda\.\w+Idx", text):
            return
        if isinstance(node.op, ast.BitOr) and isinstance(node.left, ast.Name) and node.left.id[0].isupper():
            return  # a union of types
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            return
        self.visit(node.left)
        self.visit(node.right)
        if type(node.op) in OPERATORS:
            self._between(node, node.left, node.right, "operator", *OPERATORS[type(node.op)])
        if (
            isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift))
            and node not in self._magnitudes
        ):
            (a, b), (c, d) = self._span(node.left), self._span(node.right)
            if self.raw[b:c].count(b"(") == self.raw[b:c].count(b")"):
                self._swap("order of operands", node, (a, b), (c, d))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if type(node.op) in OPERATORS:
            old, new = OPERATORS[type(node.op)]
            self._between(node, node.target, node.value, "operator", f"{old}=", f"{new}=")

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            if type(op) in COMPARISONS:
                self._between(node, left, right, "comparison", *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._between(node, node.values[0], node.values[1], "operator", old, new)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        start = self._span(node)[0]
        if isinstance(node.op, ast.Not):
            self._add("operator", node, start, self._span(node.operand)[0], "")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._add("operator", node, start, start + 1, "+")

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        if isinstance(node.value, bool):
            self._add("constant", node, start, end, str(not node.value))
        elif isinstance(node.value, int):
            text = hex(node.value + 1) if self._text(node).startswith("0x") else str(node.value + 1)
            self._add("constant", node, start, end, text)
        elif isinstance(node.value, float):
            self._add("constant", node, start, end, repr(node.value * 2 if node.value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in SCRATCH | HINTS or name.endswith("Error"):
            return
        if name == "abs":
            self._magnitudes.update(child for child in node.args if isinstance(getattr(child, "op", None), ast.Sub))
        for child in (*node.args, *(k.value for k in node.keywords)):
            self.visit(child)
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
        if name in ("range", "prange"):
            for argument in node.args[:2]:
                text = self._text(argument)
                text = text if isinstance(argument, (ast.Name, ast.Constant, ast.Attribute)) else f"({text})"
                for change in ("+ 1", "- 1"):
                    self._add("bound of range", node, *self._span(argument), f"{text} {change}")
        elif name == "fma" and len(node.args) == 3:
            a, b, c = map(self._text, node.args)
            self._add("contraction", node, *self._span(node), f"(({a}) * ({b}) + ({c}))")
            self._swap("order of arguments", node, self._span(node.args[1]), self._span(node.args[2]))
        elif name not in COMMUTE and len(node.args) >= 2:
            for one, other in zip(node.args, node.args[1:], strict=False):
                if type(one) is type(other) and not isinstance(one, ast.Starred) and ast.dump(one) != ast.dump(other):
                    self._swap("order of arguments", node, self._span(one), self._span(other))

    def _swap(self, kind: str, node: ast.AST, one: tuple[int, int], other: tuple[int, int]) -> None:
        (a, b), (c, d) = one, other
        self._add(kind, node, a, d, (self.raw[c:d] + self.raw[b:c] + self.raw[a:b]).decode())


def mutants(seed: int, n: int) -> list[Mutant]:
    """n changes, drawn by ``seed``: each room has its share, and within a room all places of a kind are equally likely."""
    rng = random.Random(seed)
    total = sum(share for share, _ in ROOMS.values())
    drawn: list[Mutant] = []
    shares = [share for share, _ in ROOMS.values()]
    ends = [round(n * sum(shares[: k + 1]) / total) for k in range(len(shares))]
    for (_, files), begin, end in zip(ROOMS.values(), [0, *ends], ends, strict=False):
        places = [mutant for file in files for mutant in _places(file)]
        taken: set[tuple[str, int]] = set()
        while len(taken) < end - begin:
            mutant = rng.choice(places)
            # One change per line is enough.
            if (mutant.file, mutant.line) not in taken and _is_change(mutant):
                taken.add((mutant.file, mutant.line))
                drawn.append(mutant)
    return drawn


@functools.cache
def _places(file: str) -> tuple[Mutant, ...]:
    """The changes of a file."""
    return tuple(dict.fromkeys(Places(file, _read(file)).found))


def _is_change(mutant: Mutant) -> bool:
    """Whether the result is a valid program that differs from the original."""
    text = _read(mutant.file)
    try:
        return ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


@functools.cache
def _read(file: str) -> str:
    return (REPOSITORY / file).read_text(encoding="utf-8")


Result = tuple[Mutant, Outcome]


def table(results: Sequence[Result]) -> str:
    """How many mutants of each room were found, and those that were not, as Markdown."""
    lines = ["| room | changes | found |", "| --- | --- | --- |"]
    for room, (_, files) in ROOMS.items():
        noticed = [outcome.noticed for mutant, outcome in results if mutant.file in files]
        lines.append(f"| {room} | {len(noticed)} | {sum(noticed)} |")
    lines.append(f"| all | {len(results)} | {sum(outcome.noticed for _, outcome in results)} |")
    lines += ["", "| not found: place | change |", "| --- | --- |"]
    for mutant, outcome in results:
        if not outcome.noticed:
            old, new = (" ".join(part.split()).replace("|", "\\|") for part in (mutant.old, mutant.new))
            lines.append(f"| `{mutant.file}` line {mutant.line} | {mutant.kind}: `{old}` → `{new}` |")
    return "\n".join(lines)


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Write the results as JSON, one object per mutant."""
    found = [asdict(mutant) | {"how": o.how, "found": o.found, "seconds": o.seconds} for mutant, o in results]
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.  Returns 0 if at least nine of ten mutants are found, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description="Make random small changes of the sources, and report the tests that find them.",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the mutants (default: %(default)s)")
    parser.add_argument("-n", type=int, default=100, help="number of mutants (default: %(default)s)")
    parser.add_argument(
        "-j", type=int, default=os.cpu_count() or 1, help="number of mutants at a time (default: one per core)"
    )
    parser.add_argument("-k", default="", help="only mutants whose file and change contain this text")
    parser.add_argument("--json", type=Path, help="write the results to this file, as they arrive")
    parser.add_argument("--markdown", type=Path, help="write a table of the results to this page")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    args = parser.parse_args(arguments)
    drawn = [mutant for mutant in mutants(args.seed, args.n) if args.k in str(mutant)]
    if args.list or not drawn:
        print("\n".join(map(str, drawn)))
        return 0
    started = time.perf_counter()
    results: list[Result] = []
    with Runner[Mutant](args.j) as runner:
        print("Without a change:", flush=True)
        runner.unchanged(drawn)
        print(f"{time.perf_counter() - started:.0f} s", flush=True)
        for mutant, outcome in runner.run(drawn):
            results.append((mutant, outcome))
            results.sort(key=lambda result: drawn.index(result[0]))
            print(f"{len(results):3} {mutant}: {outcome} ({outcome.seconds:.0f} s)", flush=True)
            if args.json:
                write_json(args.json, results)
    if args.markdown:
        write_table(args.markdown, "mutations", table(results))
    survivors = [mutant for mutant, outcome in results if not outcome.noticed]
    print(f"{len(results) - len(survivors)} of {len(results)} found in {time.perf_counter() - started:.0f} s.")
    for mutant in survivors:
        print(f"not found: {mutant}")
    return 0 if 10 * len(survivors) <= len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
