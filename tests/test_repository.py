"""Files that hosts of repositories read: how the project is cited, and how the book is published."""

import re
import tomllib
from typing import Any

import yaml

from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]

REQUIRED = {"authors", "cff-version", "message", "title"}
"""The keys that the schema of the Citation File Format 1.2.0 requires."""

FURTHER = {
    *("abstract", "commit", "contact", "date-released", "doi", "identifiers", "keywords", "license", "license-url"),
    *(
        "preferred-citation",
        "references",
        "repository",
        "repository-artifact",
        "repository-code",
        "type",
        "url",
        "version",
    ),
}
"""The others that it allows."""


def read(path: str) -> Any:
    return yaml.safe_load((REPOSITORY / path).read_text(encoding="utf-8"))


def test_the_citation_is_that_of_the_package() -> None:
    citation = read("CITATION.cff")
    assert REQUIRED <= citation.keys() <= REQUIRED | FURTHER
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert (citation["title"], str(citation["version"])) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"] and citation["keywords"] == PROJECT["keywords"]
    assert citation["abstract"] == PROJECT["description"] + "."
    # An author is a person or an entity, which has nothing but a name.
    assert citation["authors"] == PROJECT["authors"] and all(author.keys() == {"name"} for author in PROJECT["authors"])


def test_what_is_published_is_the_book() -> None:
    workflow = read(".github/workflows/pages.yml")
    build, deploy = workflow["jobs"]["build"], workflow["jobs"]["deploy"]
    (command,) = [step["run"] for step in build["steps"] if step.get("run", "").startswith("sphinx-build")]
    (upload,) = [step for step in build["steps"] if step.get("uses", "").startswith("actions/upload-pages-artifact@")]
    assert re.search(r"--fail-on-warning docs (\S+)$", command)[1] == upload["with"]["path"]  # type: ignore[index]
    (last,) = deploy["steps"]
    assert last["uses"].startswith("actions/deploy-pages@")
    assert deploy["needs"] == "build" and deploy["permissions"] == {"pages": "write", "id-token": "write"}
    assert workflow["permissions"] == {"contents": "read"}  # of the job that runs code of others
    assert f"steps.{last['id']}.outputs.page_url" in deploy["environment"]["url"]
    # README links to the pages without the name of a host: relative to the repository.
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f"](../../deployments/{deploy['environment']['name']})" in readme.partition("\n## ")[0]
