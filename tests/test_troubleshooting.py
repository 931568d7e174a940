"""docs/troubleshooting.md: every message of the library can be found there by a few of its words.

Messages are the string literals of at least `WORDS` words in the sources, which is more than what is raised or logged
directly: reasons are composed in functions of their own. Of the command line, whose other texts are help and tables,
only what is raised counts, and what the doctor finds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_sparse"
PAGE = ROOT / "docs" / "troubleshooting.md"
WORDS = 4
HOLE = "\0"
PLACEHOLDER = re.compile(r"%(?:\.\d+)?[sdrf]")
# For people who develop the library, and what is no message: parts of files whose texts begin so.
EXEMPT = {
    "_autoload.py": ("Hierarchical top-k gradient communication",),  # a description in Lightning's registry
    "cli/doctor.py": (  # what packages are for, options, and what is well
        *("models and data", "image decoding", "samples from"),
        *("Check versions", "can emulate", HOLE + "; or use --no-net"),
    ),
    "data/cache/disk.py": ("the cache is closed",),  # assertions
    "data/cache/inventory.py": (" (version", "  "),  # the table of `cache info`
    "data/cache/storage_reader.py": ("tuple[", "Iterator["),
    "data/cache/summary.py": ("  epoch",),
    "data/cache/warm.py": (HOLE, ", "),  # what `cache warm` reports
    "data/decode.py": ("pillow ",),  # a name in the cache
    "kernels/ops.py": (  # schemas
        *("mstopk(", "compress(", "accumulate(", "add_messages(", "round_rows(", "sum_rows("),
        *("add_change(", "write_between("),
    ),
    "lab/launch.py": ("eval ",),
    "lab/network.py": ("\necho", "127.0.0.1", "sudo -E"),
    "lab/storage.py": ("from ", "here="),
    "strategy/summary.py": (": ", "  ", ", "),  # rows of a table
}
ONLY_RAISED = ("bench/", "cli/")
FINDINGS = ("cli/doctor.py",)
UNITS = (" Gbit/s", " ms, predicted", " GB", " GiB")
NO_OBJECTION = ("ok", "none: training", "25 MiB", *(HOLE + unit for unit in UNITS))


def text_of(node: ast.expr) -> str:
    """The literal with `HOLE` for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE


def parts_of(text: str) -> list[str]:
    """The constant parts, as a reader sees them."""
    return [" ".join(part.split()) for part in PLACEHOLDER.sub(HOLE, text).split(HOLE)]


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the literals that are no docstrings and nothing of argparse."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        argparse = isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".add_argument", ".add_parser"))
        if argparse or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped |= {id(each) for each in ast.walk(node)}
        if id(node) not in skipped and isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            text = text_of(node)
            if isinstance(node, ast.BinOp) and not text.strip(HOLE):
                continue  # arithmetic, perhaps with a literal inside
            skipped |= {id(each) for each in ast.walk(node)}
            yield node.lineno, text


def messages(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what a file says to users."""
    tree: ast.AST = ast.parse(source)
    if path.startswith(ONLY_RAISED) and path not in FINDINGS:
        tree = ast.Module([node for node in ast.walk(tree) if isinstance(node, ast.Raise)], [])
    ignored = EXEMPT.get(path, ()) + (NO_OBJECTION if path in FINDINGS else ())
    for line, text in literals(tree):
        if len(" ".join(parts_of(text)).split()) >= WORDS and not text.startswith(ignored):
            yield line, text


def is_on(page: str, text: str) -> bool:
    """Whether `WORDS` words in a row are on the page; if holes leave no such row, the longest part."""
    parts = [part.replace("`", "").strip(" .,:;()=").split() for part in parts_of(text)]
    rows = [part[at : at + WORDS] for part in parts for at in range(len(part) - WORDS + 1)]
    return any(" ".join(row) in page for row in rows or [max(parts, key=len)])


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join(PAGE.read_text(encoding="utf-8").replace("`", "").split())


@pytest.mark.parametrize("path", sorted(each.relative_to(PACKAGE).as_posix() for each in PACKAGE.rglob("*.py")))
def test_every_message_can_be_found(path: str, page: str) -> None:
    found = messages(path, (PACKAGE / path).read_text(encoding="utf-8"))
    missing = [f"{path}:{line}: {text.replace(HOLE, '...')}" for line, text in found if not is_on(page, text)]
    assert not missing, "not in docs/troubleshooting.md, by any four words in a row:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise ValueError(f'density={x} is never to be found there')", 1),
        ("log.warning('%s is never to be found there', x)", 1),
        ("reason = 'never to be found there' if x else ''", 1),
        ("def f():\n    '''This docstring is no message.'''", 0),
        ("parser.add_argument('--x', help='a help text is none')", 0),
        ("x = 'two words'", 0),
    ],
)
def test_a_message_is_seen(source: str, found: int) -> None:
    texts = [text for _, text in messages("exchange/novelty.py", source)]
    assert len(texts) == found
    assert not any(is_on("nothing of the kind", text) for text in texts)
