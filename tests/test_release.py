"""Version and dependencies agree in all files of a release."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_sparse

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))


def test_changelog_begins_with_this_version() -> None:
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading is not None
    assert heading[1].rstrip(",") == lightning_sparse.__version__


def test_conda_recipe_has_this_version_and_its_dependencies() -> None:
    recipe = yaml.safe_load((ROOT / "release/conda/recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == lightning_sparse.__version__
    names = {re.match(r"[\w-]+", each)[0] for each in PROJECT["dependencies"]}  # type: ignore[index]
    assert {each.split()[0] for each in recipe["requirements"]["run"]} == (names - {"torch"}) | {"pytorch", "python"}


@pytest.mark.parametrize(("tag", "code"), [(f"v{lightning_sparse.__version__}", 0), ("v99.0", 1)])
def test_release_refuses_a_tag_of_another_version(tag: str, code: int) -> None:
    (step,) = [each for each in WORKFLOW["jobs"]["build"]["steps"] if each.get("name") == "the tag is the version"]
    done = subprocess.run(["bash", "-ec", step["run"]], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"})
    assert done.returncode == code


def test_dependencies_pin_no_versions() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(each for words in extras.values() for each in words)]
    assert [each for each in wanted if re.match(r"torch\b(?!>=)", each)] == []
    assert [each for each in wanted if re.search(r"==|<|~=", each)] == []


def test_extra_all_contains_all_user_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    of_developers = {"all", "dev", "docs", "examples", "test-storage"}
    assert set(everything.split("[")[1].rstrip("]").split(",")) == set(extras) - of_developers
