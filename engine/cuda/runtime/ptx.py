"""Analysis of PTX: a check, without a GPU, that a kernel keeps the contract of ``engine/numerics.py``.

:func:`check` lists violations.  :func:`instructions` counts instructions, so that a test can require the instructions that a
kernel needs for its speed.  The compiler that translates PTX to machine code may contract ``mul.f32`` and ``add.f32`` without
``.rn`` (PTX ISA, "mul"), and NVVM contracts products by default.  A product that feeds a sum is therefore searched for in
the PTX that NVVM produces with ``-fma=0``, which contains every product of the source.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

APPROXIMATE = frozenset(("ex2", "lg2", "sin", "cos", "tanh", "rsqrt"))
"""Operations that have only approximate forms."""

FLOATS = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f64"))
"""Types of floating-point instructions."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$%]+)")
_LABEL = re.compile(r"\s*[\w$%]+:(?!:)")
_INSTRUCTION = re.compile(r"(@!?%\w+\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_CONSTANT = re.compile(r"\b0[fF]([0-9A-Fa-f]{8})\b")
_REGISTER = re.compile(r"%\w+")


@dataclass(frozen=True)
class Statement:
    """An instruction, or a directive if the opcode begins with a dot.  A label is represented as a directive ``.label``.

    opcode: as written, such as ``fma.rn.f32``; operands: the text after it; function: the function that contains it, or "";
    line: the line number, from 1; conditional: whether it is predicated.
    """

    opcode: str
    operands: str
    function: str
    line: int
    conditional: bool = False

    def __str__(self) -> str:
        return " ".join(f"{self.opcode} {self.operands}".split())

    @property
    def name(self) -> str:
        """The operation without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def modifiers(self) -> set[str]:
        """The modifiers of the operation, such as ``{"rn", "f32"}``."""
        return set(self.opcode.split(".")[1:])

    @property
    def result(self) -> str:
        """The first register, which is the result of most instructions."""
        found = _REGISTER.search(self.operands)
        return found[0] if found else ""

    @property
    def inputs(self) -> list[str]:
        """The other registers."""
        return _REGISTER.findall(self.operands)[1:]

    @property
    def scales(self) -> bool:
        """Whether it multiplies by a power of two, which is how NVVM divides by a power of two.  The product is exact unless
        it is subnormal, so contracting it does not change the result."""
        factor = _CONSTANT.search(self.operands)
        return self.name == "mul" and factor is not None and int(factor[1], 16) & 0x7FFFFF == 0


def statements(ptx: str) -> Iterator[Statement]:
    """The statements of a PTX text, in order."""
    text = _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), ptx)
    function, depth, inside, start = "", 0, 0, 0
    for token in re.finditer(r"[;{}]", text):
        while label := _LABEL.match(text, start, token.start()):
            yield Statement(".label", label[0].strip().rstrip(":"), function, text.count("\n", 0, label.end()) + 1)
            start = label.end()
        head = text[start : token.start()].strip()
        block = not head or (head.startswith(".") and "=" not in head)
        if token[0] == "{" and block and not inside:
            function = _function(head) or function
            depth += 1
        elif token[0] == "}" and not head and not inside:
            depth -= 1
            function = function if depth else ""
        elif token[0] == ";" and not inside:
            at = text.index(head, start)
            if statement := _statement(head, function, text.count("\n", 0, at) + 1):
                yield statement
        else:
            # Braces inside a statement hold the registers of a vector.
            inside += (token[0] == "{") - (token[0] == "}")
            continue
        start = token.end()


def _function(head: str) -> str:
    found = _FUNCTION.search(head)
    return found[1] if found else ""


def _statement(head: str, function: str, line: int) -> Statement | None:
    if head.startswith("."):
        # Some directives end at the end of the line, without a semicolon: only the last line belongs to this statement.
        *others, head = head.splitlines()
        opcode, _, operands = head.strip().partition(" ")
        return Statement(opcode, operands, function, line + len(others))
    found = _INSTRUCTION.fullmatch(head)
    return Statement(found[2], found[3], function, line, found[1] is not None) if found else None


def instructions(ptx: str) -> Counter[str]:
    """The number of occurrences of each instruction, by full name, such as ``ld.global.v4.u32``."""
    return Counter(s.opcode for s in statements(ptx) if not s.opcode.startswith("."))


def check(ptx: str) -> list[str]:
    """Violations of the contract, one sentence each; empty if there are none.

    Not allowed are: a float32 product that feeds a sum, directly or through moves and negations, unless a factor is a power
    of two; approximate operations; division and square root that do not round to nearest; flushing subnormals to zero;
    float64; and local memory.
    """
    problems = []
    functions = defaultdict(list)
    for statement in statements(ptx):
        functions[statement.function].append(statement)
        problems += [f"line {statement.line}: {problem}: {statement}" for problem in _forbidden(statement)]
    for body in functions.values():
        problems += _products_in_sums(body)
    return problems


def _forbidden(statement: Statement) -> Iterator[str]:
    name, modifiers = statement.name, statement.modifiers
    if statement.opcode.startswith("."):
        # Every access to local memory needs this declaration, so the declaration is reported.
        if re.search(r"\.local\b", str(statement)):
            yield "local memory"
        return
    if "f64" in modifiers:
        yield "float64"
    if name in APPROXIMATE or modifiers & {"approx", "full"}:
        yield "an approximation"
    elif name in ("div", "sqrt", "rcp") and modifiers & FLOATS and "rn" not in modifiers:
        yield "not rounded to nearest"
    if "ftz" in modifiers:
        yield "subnormals are flushed to zero"


def _products_in_sums(body: list[Statement]) -> Iterator[str]:
    """Products that feed sums within a function.  Each product is followed from its definition to all uses of the register
    and of its copies."""
    users, makers = defaultdict(list), Counter(s.result for s in body if s.result)
    for k, s in enumerate(body):
        carries = s.name in ("mov", "neg") and s.modifiers & {"f32", "b32"}
        if carries or (s.name in ("add", "sub") and "f32" in s.modifiers):
            for register in set(s.inputs):
                users[register].append(k)
    labels = {s.operands: k for k, s in enumerate(body) if s.opcode == ".label"}
    found: dict[tuple[str, int], Statement] = {}
    for first, product in enumerate(body):
        if product.name != "mul" or "f32" not in product.modifiers or product.scales:
            continue
        followed, left = set(), [first]
        while left:
            made = left.pop()
            if made in followed:
                continue
            followed.add(made)
            register = body[made].result
            used = users[register]
            if used and makers[register] > 1:
                # The register holds several values.
                reached = _reached(body, labels, made)
                used = [k for k in used if k in reached]
            left += [k for k in used if body[k].name in ("mov", "neg")]
            found |= {(register, k): product for k in used if body[k].name in ("add", "sub")}
    for (_, k), product in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        yield f"line {body[k].line}: a product feeds a sum: {product} (line {product.line}), {body[k]}"


def _reached(body: list[Statement], labels: dict[str, int], made: int) -> set[int]:
    """The statements at which the register written by statement ``made`` may still have this value."""
    register = body[made].result
    reached: set[int] = set()
    left = _next(body, labels, made)
    while left:
        k = left.pop()
        if k in reached or k >= len(body):
            continue
        reached.add(k)
        if body[k].result != register or body[k].conditional:
            left += _next(body, labels, k)
    return reached


def _next(body: list[Statement], labels: dict[str, int], k: int) -> list[int]:
    """The statements that may follow statement k."""
    s = body[k]
    targets = []
    if s.name in ("bra", "brx"):
        # A branch through a table may go to any label.
        targets = [labels[s.operands]] if s.operands in labels else list(labels.values())
    ends = s.name in ("bra", "brx", "ret", "exit", "trap") and not s.conditional
    return targets if ends else [*targets, k + 1]
