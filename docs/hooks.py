"""Hooks of mkdocs: files outside docs/, the address of the repository, and old addresses of pages.

Files of benchmarks/ and examples/ are part of the site. A page in docs/ links to them as in the repository,
``../benchmarks/results/README.md``; the site has no ``docs/`` level, so the hook removes the two dots.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "benchmarks/results/*.*",
    "examples/docker/compose.yaml",
    "examples/hf_trainer.py",
    "examples/imagenet/*.*",
    "examples/imagenet_resnet50.py",
    "examples/quickstart.py",
    "examples/language/*.*",
    "examples/language_model.py",
    "examples/quickstart_sgd.py",
    "examples/ray_train.py",
    "examples/elastic.py",
    "release/c++",
    "tests/test_extending_examples.py",
)


MOVED = json.loads((ROOT / "docs" / "moved.json").read_text(encoding="utf-8"))
"""New place of each old page, or of each old heading as ``page.md#anchor``."""


def on_config(config: Any) -> Any:
    """Take the address of the repository from pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (config.repo_url,) = re.findall(r'^Repository = "(.*)"', project, re.MULTILINE)
    config.repo_name = "/".join(config.repo_url.split("/")[-2:])
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/."""
    for path in sorted(each for pattern in OUTSIDE for each in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Remove the level of docs/ from links between docs/ and files outside."""
    outside = "/" in page.file.src_uri
    return re.sub(r"(?<=\]\()((?:\.\./)+)docs/" if outside else r"(?<=\]\()\.\./", r"\1" if outside else "", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Redirect old headings of this page in the browser: a server does not see the part after #."""
    name = page.file.src_uri
    moved = {
        old.partition("#")[2]: get_relative_url(_address(new), page.url)
        for old, new in MOVED.items()
        if old.startswith(f"{name}#")
    }
    if not moved:
        return html
    script = f"const moved = {json.dumps(moved)}[location.hash.slice(1)]; if (moved) location.replace(moved);"
    return f"{html}\n<script>{{ {script} }}</script>\n"


def on_post_build(config: Any) -> None:
    """Write a page that redirects for each old page."""
    for old, new in MOVED.items():
        if "#" not in old:
            folder = Path(config["site_dir"], old.removesuffix(".md"))
            folder.mkdir(exist_ok=True)
            address = f"../{_address(new)}"
            (folder / "index.html").write_text(
                f'<script>location.replace("{address}" + location.hash)</script>\n'
                f'<meta http-equiv="refresh" content="0; url={address}"><a href="{address}">This page has moved.</a>\n'
            )


def _address(place: str) -> str:
    """Return the address of ``page.md#anchor`` from the root of the site."""
    page, mark, anchor = place.partition("#")
    return f"{page.removesuffix('.md')}/{mark}{anchor}"
