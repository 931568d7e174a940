"""Hooks of mkdocs: files outside docs/, the address of the repository, and old addresses of pages.

Files of benchmarks/ and examples/ are part of the site. A page in docs/ links to them as in the repository,
``../benchmarks/results/README.md``; the site has no ``docs/`` level, so the hook removes the two dots.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "benchmarks/results/*.*",
    "examples/docker/compose.yaml",
    "examples/hf_trainer.py",
    "examples/imagenet/*.*",
    "examples/imagenet_resnet50.py",
    "examples/language/*.*",
    "examples/language_model.py",
    "examples/quickstart_sgd.py",
    "examples/ray_train.py",
    "examples/elastic.py",
    "release/c++",
)


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside."""
    for path in sorted(each for pattern in OUTSIDE for each in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page in docs/ to what lies outside."""
    return markdown if "/" in page.file.src_uri else re.sub(r"(?<=\]\()\.\./", "", markdown)
