"""The parts of the package's sources that kernels depend on.

A kernel depends on its own source and on everything that it names, directly or indirectly: functions, constants and tables
in any file.  This module follows the names from definition to definition in the syntax trees of the files.  So a constant of
a distant module counts, and a host function in the same file as a kernel does not.  Nothing is imported.

The digest of these definitions ignores comments, docstrings, annotations and formatting, and is equal for all versions of
Python.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

COMPILING = frozenset(("njit", "jit", "intrinsic"))
"""Names of Numba's decorators that compile a function, or make it available to compiled functions."""

ELSEWHERE = ("TYPE_CHECKING", "__name__ == '__main__'", "SIMULATED")
"""Conditions of branches that do not affect machine code; the GPU simulator runs kernels as Python."""

COMPILER = ("compile", "link")
"""Prefixes of the definitions that compile kernels, in the module of the decorator ``kernel``."""

Definition = tuple[str, int]
"""A statement of a module: the name of the module, and the index of the statement in its file."""


@dataclass
class Module:
    """A file as definitions.

    ``package``: the package that its relative imports start from; ``names``: the statements that bind each name;
    ``imports``: for each imported name its module and the name there, or "" for the module itself; ``loose``: statements
    that bind no name but may change the values of others, and functions that a decorator of the package may register.
    """

    name: str
    package: str
    body: list[ast.stmt]
    names: dict[str, list[int]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    loose: list[int] = field(default_factory=list)

    @property
    def inside(self) -> str:
        """The outermost package, e.g. ``engine``."""
        return self.name.partition(".")[0]


def parse(name: str, text: str, is_package: bool = False) -> Module:
    """The definitions of a file.  Raises SyntaxError if the text is not valid Python."""
    module = Module(name, name if is_package else name.rpartition(".")[0], [])
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in ELSEWHERE:
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            module.imports.update(_imported(statement, module.package))
            continue
        place = len(module.body)
        module.body.append(statement)
        bound = list(_bound(statement))
        for one in bound:
            module.names.setdefault(one, []).append(place)
        for node in _own(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):  # in a branch
                module.imports.update(_imported(node, module.package))
        if not bound or not isinstance(
            statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
        ):
            module.loose.append(place)
    for place, statement in enumerate(module.body):
        if isinstance(statement, ast.FunctionDef) and any(_ours(d, module) for d in statement.decorator_list):
            module.loose.append(place)
    return module


def _ours(decorator: ast.expr, module: Module) -> bool:
    """Whether a decorator belongs to Numba or to the package; those of the standard library register nothing."""
    name = _root(decorator)
    home, _ = module.imports.get(name, ("", ""))
    return name in module.names or home.partition(".")[0] in (module.inside, "numba")


def _root(node: ast.expr) -> str:
    """The first name of an expression, such as a in ``a.b(c)``."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that run when its module is imported, without those of functions and classes in it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds, or whose value it changes: ``a[0] = 1`` and ``a.b = 1`` change a."""
    for node in _own(statement):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target: ast.expr = node
            while isinstance(target, (ast.Subscript, ast.Attribute)):
                target = target.value
            if isinstance(target, ast.Name):
                yield target.id


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, tuple[str, str]]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or whole, (whole, "")
        return
    home = node.module or ""
    if node.level:
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        home = ".".join([*parents, *([home] if home else [])])
    for alias in node.names:
        yield alias.asname or alias.name, (home, alias.name)


# --- what a definition names -----------------------------------------------------------------------------------


def _children(node: ast.AST) -> Iterator[tuple[str, object]]:
    """The fields of a node that can affect machine code: not annotations of functions, docstrings, or empty fields (which
    differ between versions of Python)."""
    for name, value in ast.iter_fields(node):
        if value is None or value == [] or name in ("ctx", "kind", "type_comment", "type_params", "returns"):
            continue
        if name == "annotation" and isinstance(node, ast.arg):
            continue
        if name == "body" and isinstance(value, list):
            value = [v for v in value if not (isinstance(v, ast.Expr) and isinstance(v.value, ast.Constant))]
        yield name, value


def _walk(node: object) -> Iterator[ast.AST]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, ast.AST):
            yield node
            waiting.extend(
                value
                for name, value in _children(node)
                if not (isinstance(node, ast.AnnAssign) and name == "annotation")
            )


@dataclass(frozen=True)
class Named:
    """The names in a statement: plain names, attributes of names, and its own imports."""

    plain: frozenset[str]
    attributes: frozenset[tuple[str, str]]
    imports: Mapping[str, tuple[str, str]]
    compiles: bool


def _named(statement: ast.stmt, module: Module) -> Named:
    plain: set[str] = set()
    attributes: set[tuple[str, str]] = set()
    imports: dict[str, tuple[str, str]] = {}
    behind: set[int] = set()
    for node in _walk(statement):  # outer nodes first
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.update(_imported(node, module.package))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.add((node.value.id, node.attr))
            behind.add(id(node.value))
        elif isinstance(node, ast.Name) and id(node) not in behind:
            plain.add(node.id)
    known = module.imports | imports
    used = {*((name, "") for name in plain), *attributes}
    homes = ((known[name], attribute) for name, attribute in used if name in known)
    compiles = any(
        home.partition(".")[0] == "numba" and (attribute or original) in COMPILING
        for (home, original), attribute in homes
    )
    return Named(frozenset(plain), frozenset(attributes), imports, compiles)


def _dump(node: object, out: list[str]) -> None:
    if isinstance(node, ast.AST):
        out.append(type(node).__name__ + "(")
        for name, value in _children(node):
            out.append(name + "=")
            _dump(value, out)
        out.append(")")
    elif isinstance(node, list):
        out.append("[")
        for one in node:
            _dump(one, out)
        out.append("]")
    else:
        out.append(f"{node!r},")


@lru_cache(maxsize=1024)
def _parsed(name: str, text: str, is_package: bool) -> Module:
    return parse(name, text, is_package)


@lru_cache(maxsize=1 << 14)
def _names_of(name: str, text: str, is_package: bool, place: int) -> Named:
    module = _parsed(name, text, is_package)
    return _named(module.body[place], module)


@lru_cache(maxsize=1 << 14)
def _digest(name: str, text: str, is_package: bool, place: int) -> bytes:
    out: list[str] = []
    _dump(_parsed(name, text, is_package).body[place], out)
    return hashlib.sha256("".join(out).encode()).digest()


# --- the definitions that kernels depend on--------------------------------------------------------------------


class Sources:
    """The files of a package: ``{"engine.cpu.matmul": text}``, a package by its name with ``.__init__``.

    A file is parsed when one of its definitions is first requested.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = {
            name.removesuffix(".__init__"): (text, name.endswith(".__init__")) for name, text in texts.items()
        }

    def module(self, name: str) -> Module:
        """The definitions of a file."""
        return _parsed(name, *self._texts[name])

    def named(self, definition: Definition) -> Named:
        """The names in a definition."""
        name, place = definition
        return _names_of(name, *self._texts[name], place)

    def roots(self, part: str) -> set[Definition]:
        """The statements that compile kernels: those with a decorator of Numba or with the decorator ``kernel``, and the
        definitions of the latter.  part: "gpu", statements in a package ``cuda``; "cpu", all others."""
        found: set[Definition] = set()
        for name, (text, _) in self._texts.items():
            if ("cuda" in name.split(".")) != (part == "gpu") or not any(
                word in text for word in (*COMPILING, "kernel")
            ):
                continue
            if name.endswith(".simulator"):
                continue  # its definitions replace kernels and run as Python
            module = self.module(name)
            for place, statement in enumerate(module.body):
                decorators = [_root(d) for d in getattr(statement, "decorator_list", ())]
                if "kernel" in decorators or self.named((name, place)).compiles:
                    found.add((name, place))
            for place in module.names.get("kernel", ()) if part == "gpu" else ():
                makers = (places for maker, places in module.names.items() if maker.startswith(COMPILER))
                found |= {(name, place), *((name, p) for places in makers for p in places)}
        return found

    def reached(self, roots: Iterable[Definition]) -> set[Definition]:
        """Every definition that ``roots`` name, directly or indirectly."""
        seen: set[Definition] = set()
        waiting = list(roots)
        touched: set[str] = set()
        while waiting:
            definition = waiting.pop()
            if definition in seen:
                continue
            seen.add(definition)
            name, place = definition
            module = self.module(name)
            if name not in touched:
                touched.add(name)
                waiting.extend((name, loose) for loose in module.loose)
            named = self.named(definition)
            for plain in named.plain:
                waiting.extend(self._find(module, plain, named.imports))
                if plain in ("globals", "vars", "eval", "exec"):
                    waiting.extend(self._all(name))
            for owner, attribute in named.attributes:
                waiting.extend(self._attribute(module, owner, attribute, named.imports))
        return seen

    def _all(self, name: str) -> Iterator[Definition]:
        return ((name, place) for place in range(len(self.module(name).body)))

    def _find(self, module: Module, name: str, imports: Mapping[str, tuple[str, str]]) -> Iterator[Definition]:
        """The definitions that a name in a module refers to; all definitions of a module that is used as a value."""
        if name in imports or (name in module.imports and name not in module.names):
            home, original = imports.get(name) or module.imports[name]
            whole = f"{home}.{original}" if original else home
            if whole in self._texts:
                yield from self._all(whole)
            elif home in self._texts:
                yield from self._find(self.module(home), original, {})
            return
        for place in module.names.get(name, ()):
            yield module.name, place
        if name in module.names and name in module.imports:  # in a branch, one or the other
            home, original = module.imports[name]
            if home in self._texts and home != module.name:
                yield from self._find(self.module(home), original, {})

    def _attribute(
        self, module: Module, owner: str, attribute: str, imports: Mapping[str, tuple[str, str]]
    ) -> Iterator[Definition]:
        """The definitions that ``owner.attribute`` refers to: in the module ``owner`` if it is one, else those of
        ``owner``."""
        found = imports.get(owner) or module.imports.get(owner)
        if found is not None:
            home, original = found
            whole = f"{home}.{original}" if original else home
            if f"{whole}.{attribute}" in self._texts:
                yield from self._all(f"{whole}.{attribute}")
                return
            if whole in self._texts:
                yield from self._find(self.module(whole), attribute, {})
                return
        yield from self._find(module, owner, imports)

    def definitions(self, part: str) -> dict[Definition, bytes]:
        """Every definition that kernels of the CPU ("cpu") or of GPUs ("gpu") depend on, with a hash of its text."""
        return {
            definition: _digest(definition[0], *self._texts[definition[0]], definition[1])
            for definition in sorted(self.reached(self.roots(part)))
        }

    def digest(self, part: str) -> str:
        """A hash of the definitions that kernels of the CPU ("cpu") or of GPUs ("gpu") depend on."""
        total = hashlib.sha256()
        for (name, _), digest in self.definitions(part).items():
            total.update(name.encode() + b"\n" + digest)
        return total.hexdigest()
