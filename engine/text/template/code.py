"""How templates become Python: Jinja's compiler, extended to show the environment every value, loop and literal.

The environment (:mod:`engine.text.template.sandbox`) already sees calls, operators, attributes and filters. This adds a tick
in every loop, a count of every list, tuple, mapping and slice, joins that keep marks, and marks on the template's own text.
"""

from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.template.marked import MarkedText, trusted


class LiteralEnvironment(ImmutableSandboxedEnvironment):
    """An environment that keeps the text of a template's literals, each marked as the template's own."""

    literals: list[MarkedText]


class TemplateGenerator(CodeGenerator):
    """Jinja's compiler to Python, plus the values and loops that it would not show to the environment."""

    environment: LiteralEnvironment

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def _literal(self, text: str) -> str:
        self.environment.literals.append(trusted(text))
        return f"environment.literals[{len(self.environment.literals) - 1}]"

    def _made(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.text, ")
        super().visit_Tuple(nodes.Tuple(node.nodes, "load"), frame)
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.getitem(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.visit(bound or nodes.Const(None), frame)
            self.write(", ")
        self.write("))")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        if node.test is not None:
            node.test = nodes.Or(tick, node.test)  # tick() is None
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        super().visit_For(node, frame)


class GenerationTag(Extension):
    """``{% generation %}`` … ``{% endgeneration %}`` marks an answer for training; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)
