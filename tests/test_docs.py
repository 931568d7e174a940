"""Links of documents, Python code in documents and docstrings, and the site."""

import doctest
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lightning_sparse import cli
from lightning_sparse.data.datamodule import CachedImageDataModuleMixin
from lightning_sparse.strategy.local import MSTopKLocalMixin

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(
        part.startswith(".") or part in ("runs", "build", "node_modules") for part in path.relative_to(ROOT).parts
    )
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Return the broken links of a page."""
    found = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            found.append(f"{link}: there is no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text(encoding="utf-8")):
            found.append(f"{link}: no such heading; there are {sorted(anchors(path.read_text(encoding='utf-8')))}")
    return found


def test_document_links_lead_to_files_and_headings() -> None:
    assert {str(page): found for page in PAGES if (found := broken(page))} == {}


def test_doctest_examples_in_documents_run() -> None:
    result = doctest.testfile(str(ROOT / "docs" / "extending.md"), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", ["cli", "options"])
def test_generated_page_is_current(name: str) -> None:
    written = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))["page"]()
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == written, f"run python docs/{name}.py"


def test_pages_stay_short() -> None:
    assert sum(len(page.read_text(encoding="utf-8")) for page in (ROOT / "docs").glob("*.md")) <= 95_000


def test_old_addresses_lead_to_existing_headings() -> None:
    moved = json.loads((ROOT / "docs" / "moved.json").read_text(encoding="utf-8"))
    for old, new in moved.items():
        page, _, anchor = new.partition("#")
        place = ROOT / page if "/" in page else ROOT / "docs" / page
        assert place.exists(), f"{old} -> {new}"
        assert not anchor or anchor in anchors(place.read_text(encoding="utf-8")), f"{old} -> {new}"
        old_page, _, old_anchor = old.partition("#")
        if old_anchor:
            headings = anchors((ROOT / "docs" / old_page).read_text(encoding="utf-8"))
            assert old_anchor not in headings, f"{old} exists, so it must not redirect"
        else:
            assert not (ROOT / "docs" / old_page).exists(), f"{old} exists"


def test_readme_is_short_and_shows_the_quick_start() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text) <= 8000, "move details into docs/"
    for command in ("make demo", "make test", "lightning-sparse doctor"):
        assert command in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8").endswith(code), (
        "the README must show the whole example"
    )


def test_plan_commands_of_the_readme_run() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in re.findall(r"`lightning-sparse (plan [^`]*)`", text):
        assert cli.main(command.split()) == 0, command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "page", "command", "says"),
    [
        (
            "quickstart",
            "README.md",
            r"`lightning-sparse (lab [^`]*)`",
            [
                "2 node(s) x 1 device(s): nodes exchange the largest 1% of the updates after each step",
                "`max_epochs=3` reached",
            ],
        ),
        (
            "quickstart_sgd",
            "examples/quickstart_sgd.py",
            r"(?m)^lightning-sparse (lab .*)$",
            ["1 sparse, at density", "`max_epochs=5` reached"],
        ),
    ],
)
def test_quick_start_trains(script: str, page: str, command: str, says: list[str], tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("sklearn")
    (words,) = re.findall(command, (ROOT / page).read_text(encoding="utf-8"))
    there = re.sub(rf"(examples/)?{script}\.py", str(ROOT / "examples" / f"{script}.py"), words)
    start = [sys.executable, "-m", "lightning_sparse.cli", *there.split()]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for each in says:
        assert each in said
    if "sgd" in script:
        assert float(re.findall(r"val_accuracy=([\d.]+)", said)[-1]) > 0.8


@pytest.mark.slow
def test_docs_site_builds(tmp_path: Path) -> None:
    """mkdocs --strict checks links, names in the API pages, and that the navigation has all pages."""
    pytest.importorskip("material", reason="the site is built with mkdocs-material")
    pytest.importorskip("mkdocstrings", reason="the API's pages are made of docstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "site" / "how-it-works" / "index.html").exists()
    assert "MSTopKHierStrategy" in (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert "url=../hier/" in (tmp_path / "site" / "density" / "index.html").read_text(encoding="utf-8")
    assert '"install": "install/"' in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_python_in_documents_runs(tmp_path: Path) -> None:
    """All names and options exist. The process imports only one Lightning package."""
    pytest.importorskip("pytorch_lightning")
    program = ""
    for path in sorted((ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        runnable = [block for block in blocks if ">>>" not in block]
        program += "".join(f"exec(compile({block!r}, {path.name!r}, 'exec'), {{}})\n" for block in runnable)
    assert program.count("exec(") >= 4
    one = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}  # variables of a launcher
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **one}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning", "lightning_fabric", "fabric", "ray"])
def test_public_classes_have_help_texts(package: str) -> None:
    module = pytest.importorskip(f"lightning_sparse.flavours.{package}")
    classes = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    assert classes
    assert [each.__name__ for each in classes if not each.__doc__] == []


def test_options_are_described_once_in_the_order_of_the_signature() -> None:
    init = CachedImageDataModuleMixin.__init__
    text = init.__doc__ or ""
    described = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    assert described == [name for name in inspect.signature(init).parameters if name in described]
    assert {"backend", "lists", "limit"} <= set(described)
    assert "draws the augmentation" in text, "a later class overrides the text"
    assert init.__qualname__ == "CachedImageDataModule.__init__"


def test_option_of_a_subclass_overrides_the_text_of_its_base() -> None:
    text = MSTopKLocalMixin.__init__.__doc__ or ""
    assert text.count("    exchange: ") == 1
    assert '"auto"`` is only for' in text
    assert "inter_gbps: " not in text


# -- docstrings --------------------------------------------------------------------------------------------------------

MODULES = [
    "lightning_sparse.topology",
    "lightning_sparse.sharding",
    "lightning_sparse.exchange.paths",
    "lightning_sparse.gradients.config",
    "lightning_sparse.kernels.ops",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
