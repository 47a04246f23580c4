"""The shape of the package: no import runs in a circle, and every room is described by a sentence."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import structure
from tests.conftest import REPOSITORY

MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (REPOSITORY / "engine").rglob("*.py")
}
"""Every module of the package by its dotted name."""

API = "engine"
"""The package itself imports the modules behind its names when they are first used; nothing inside imports the package."""


def imports(name: str) -> set[str]:
    """The modules of the package that ``name`` imports, wherever in its text: also inside functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{name}: relative imports hide what is imported"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    # Importing a module runs its package first.
    found |= {".".join(parts[:n]) for parts in (module.split(".") for module in found) for n in range(1, len(parts))}
    return {module for module in found if module in MODULES} - {API, name}


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                yield sorted(component)

    for node in sorted(graph):
        if node not in index:
            yield from visit(node)


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": {"f"}, "f": {"g"}, "g": {"e"}}
    assert list(circles(graph)) == [["b", "c"], ["e", "f", "g"]]


def test_no_import_runs_in_a_circle() -> None:
    graph = {name: imports(name) for name in MODULES if name != API}
    assert sum(map(len, graph.values())) > 300
    assert list(circles(graph)) == []


def room(module: str) -> str:
    """The folder of the package that a module lies in, or the module itself if it lies in none."""
    return module.split(".")[1]


def rooms() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    graph: dict[str, set[str]] = {room(name): set() for name in MODULES if name != API}
    for name in MODULES:
        if name != API:
            graph[room(name)] |= {room(module) for module in imports(name)} - {room(name)}
    return graph


def test_no_import_between_rooms_runs_in_a_circle() -> None:
    graph = rooms()
    assert len(graph) > 30
    assert list(circles(graph)) == []


def test_a_room_stands_on_those_above_it_in_the_book() -> None:
    text = (REPOSITORY / "docs" / "structure.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(machine\n.*?)^```", text, re.M | re.S)
    graph, folders = rooms(), {room(name) for name, path in MODULES.items() if name != API and name.count(".") > 1}
    seen: set[str] = set()
    for line in block.splitlines():
        names = line.split()
        for name in names:
            assert graph[name] & folders <= seen, f"{name} imports a room that the book does not list above it"
        seen |= set(names)
    assert seen == folders


def test_a_backend_knows_no_model_and_no_sampler() -> None:
    graph = rooms()
    backends = graph["cpu"] | graph["cuda"] | graph["ops"]
    assert "models" not in backends
    assert not {"grammar", "sampling", "speculative", "decode"} & (backends | graph["models"])


def test_only_commands_know_the_command_line() -> None:
    assert {name for name, others in rooms().items() if "cli" in others} == {"bench", "parity", "run", "serve"}


def test_what_keeps_memory_does_not_know_of_drafting() -> None:
    graph = {name: imports(name) for name in MODULES if name != API}
    seen: set[str] = set()
    waiting = [name for name in graph if name.startswith("engine.cache.")]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    assert not [name for name in seen if name.startswith(("engine.speculative", "engine.decode"))]


def calls(name: str, *methods: str) -> list[int]:
    """The lines of a module in which one of these methods is called."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [method.lineno for method in called if isinstance(method, ast.Attribute) and method.attr in methods]


def test_models_multiply_by_a_matrix_in_one_file() -> None:
    """What is added to all linear layers, such as an adapter, is added there."""
    rooms = [name for name in MODULES if name.startswith("engine.models.")]
    users = {name: calls(name, "matmul", "matmul_add") for name in rooms}
    assert {name for name, lines in users.items() if lines} == {"engine.models.linear"}
    assert len(users["engine.models.linear"]) == 2


def test_a_room_is_described_by_one_sentence() -> None:
    rooms = [path for path in MODULES.values() if path.name == "__init__.py" and path.parent.name != "engine"]
    assert len(rooms) >= 12
    for path in rooms:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        text = ast.get_docstring(tree)
        assert text, f"{path} has no docstring"
        assert text.split("\n\n")[0].rstrip().endswith("."), f"{path}: the first paragraph is a sentence"


def test_the_book_describes_files_as_they_describe_themselves() -> None:
    text = structure.PAGE.read_text(encoding="utf-8")
    assert structure.filled(text) == text, "docs/structure.md is out of date; run: python -m docs.structure"


def test_a_changed_docstring_changes_the_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "REPOSITORY", tmp_path)
    (tmp_path / "house" / "room" / "inner").mkdir(parents=True)
    for name, text in {
        "house/__init__.py": "Not shown.",
        "house/a.py": "First.",
        "house/room/__init__.py": "A room.\n\nMore.",
        "house/room/b.py": "Rows ``[a | b]``, 2**n of them\nor fewer.",
        "house/room/inner/c.py": "Within.",
    }.items():
        (tmp_path / name).write_text(f'"""{text}"""\n', encoding="utf-8")
    page = "".join(f"<!-- files: {name} -->\nold\n<!-- end of files -->\n" for name in ("house", "house/room"))
    head = "| file | what it is |\n| --- | --- |\n"
    assert structure.filled(page) == (
        f"<!-- files: house -->\n{head}| `house/a.py` | First. |\n<!-- end of files -->\n"
        f"<!-- files: house/room -->\nA room.\n\n{head}"
        "| `house/room/b.py` | Rows `[a \\| b]`, 2\\*\\*n of them or fewer. |\n"
        "| `house/room/inner/c.py` | Within. |\n<!-- end of files -->\n"
    )
    (tmp_path / "house" / "a.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no docstring"):
        structure.filled(page)


def test_loggers_are_named_like_the_distribution() -> None:
    """``logging.getLogger("bitmirror")`` reaches all of them."""
    named: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getLogger" and node.args:
                name = ast.literal_eval(node.args[0])
                named.setdefault(name.partition(".")[0], set()).add(module)
    assert len(named.pop("bitmirror")) > 10
    assert named == {"huggingface_hub": {"engine.hub.repository"}}


def untyped(module: str) -> Iterator[ast.FunctionDef]:
    """The functions of a module without types, but for compiled ones, which have a decorator, and those within others, which
    compiled ones are made of."""

    def visit(node: ast.AST, within: bool) -> Iterator[ast.FunctionDef]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                arguments = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
                typed = child.returns is not None or any(argument.annotation for argument in arguments)
                if not (typed or within or (child.decorator_list and isinstance(node, ast.Module))):
                    yield child
            yield from visit(child, within or isinstance(child, ast.FunctionDef))

    yield from visit(ast.parse(MODULES[module].read_text(encoding="utf-8")), False)


def test_only_compiled_functions_have_no_types() -> None:
    """mypy allows functions without types in the rooms of kernels."""
    assert {
        module: [f"{f.lineno}: {f.name}" for f in untyped(module)] for module in MODULES if any(untyped(module))
    } == {}


OUTSIDE_THE_CORE = ("engine.cli", "engine.serving", "engine.tools")

MIRRORED = {"AltUpOperations", "Backend", "CompressedOperations", "Plan", "Plans", "Pool", "Recorder", "Unpack"}
"""Names that a class of the CPU and its counterpart of the GPU share.  No other two classes of the core have one name."""


def test_a_class_of_the_core_has_a_name_of_its_own() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if not module.startswith(OUTSIDE_THE_CORE):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(module)
    assert len(homes) > 300
    repeated = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert {name: modules for name, modules in repeated.items() if name not in MIRRORED} == {}
    assert {name: sorted(map(room, repeated.get(name, ()))) for name in MIRRORED} == dict.fromkeys(
        MIRRORED, ["cpu", "cuda"]
    )
