"""The directive ``accepted``: a table of the fields that each route of the server accepts, made from the tables that requests
are checked against."""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from engine.serving.accepted import OPTIONS, READING, ROUTES, Effect


class Accepted(SphinxDirective):
    """One row per route and effect."""

    def run(self) -> list[nodes.Node]:
        """The table."""
        lines = ["| route | | fields |", "| --- | --- | --- |"]
        for route, table in {**ROUTES, **READING, "options": OPTIONS}.items():
            for effect in Effect:
                names = sorted(name for name, rule in table.items() if rule.effect is effect)
                first = f"`{route}`" if effect is Effect.OBEYED else ""
                lines.append(f"| {first} | {effect.value} | {', '.join(f'`{name}`' for name in names)} |")
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("accepted", Accepted)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
