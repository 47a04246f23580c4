"""The check of commit messages: which commits it looks at, and what it finds."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

GOOD = "Rename: a good subject\n\nWhy."
SCRIPT = Path(".ci", "commits")


def git(folder: Path, *words: str) -> None:
    who = {f"GIT_{role}_{key}": "x@y.z" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "-C", str(folder), *words], env=os.environ | who | nobody, check=True, capture_output=True)


def commit(folder: Path, message: str) -> None:
    git(folder, "commit", "--quiet", "--allow-empty", "-m", message)


def add_script(folder: Path) -> None:
    (folder / SCRIPT).parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / SCRIPT, folder / SCRIPT)


def check(folder: Path, *words: str) -> tuple[int, str]:
    """The exit status of the check in a repository, and what it prints."""
    ran = subprocess.run([str(folder / SCRIPT), *words], capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose first commit would not pass, and whose second one adds the check."""
    git(tmp_path, "init", "--quiet", "r")
    folder = tmp_path / "r"
    commit(folder, "without a body")
    add_script(folder)
    git(folder, "add", ".")
    commit(folder, GOOD)
    return folder


def test_commits_since_the_check_exists(repository: Path) -> None:
    assert check(repository) == (0, "")
    commit(repository, GOOD)
    commit(repository, f"{'ü' * 72}\n\nWhy.")
    assert check(repository) == (0, "")
    commit(repository, f"{'x' * 73}\n\nWhy.")
    commit(repository, "Only a subject")
    commit(repository, GOOD)
    status, text = check(repository)
    assert status == 1 and len(text.splitlines()) == 2
    assert "has 73 characters; the limit is 72" in text and "Only a subject: there is no body" in text


def test_a_range(repository: Path) -> None:
    commit(repository, GOOD)
    assert check(repository, "HEAD^!") == (0, "")
    assert check(repository, "HEAD")[0] == 1
    assert check(repository, "nowhere..HEAD")[0] not in (0, 1)


@pytest.mark.parametrize(("depth", "status"), [(1, 0), (2, 1)])
def test_a_shallow_clone(repository: Path, tmp_path: Path, depth: int, status: int) -> None:
    """Its oldest commit, which may be older than the check, is not looked at."""
    commit(repository, "Only a subject")
    git(tmp_path, "clone", "--quiet", f"--depth={depth}", repository.as_uri(), "shallow")
    assert check(tmp_path / "shallow")[0] == status


def test_no_repository(tmp_path: Path) -> None:
    add_script(tmp_path)
    status, text = check(tmp_path)
    assert status == 0 and "no commits to check" in text
