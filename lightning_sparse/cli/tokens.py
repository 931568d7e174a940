"""`lightning-sparse tokens`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from lightning_sparse.data.tokens import files_of, prepare


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Convert text files to token ids for TokenDataModule."
    parser.add_argument("out", type=Path, help="file to write, such as train.bin; train.json describes it")
    parser.add_argument(
        "texts", type=Path, nargs="+", metavar="TEXT", help="text files; their ids are written in this order"
    )
    tokenizer = "function that maps the text of a file to its ids (default: the bytes of the file)"
    parser.add_argument("--tokenizer", type=_import_function, metavar="MODULE:FUNCTION", help=tokenizer)
    parser.add_argument(
        "--vocab-size", type=int, default=256, metavar="N", help="vocabulary size (default %(default)s)"
    )
    parser.add_argument(
        "--end", type=int, metavar="ID", help="id to write after each text, to mark the end of a document"
    )
    parser.set_defaults(run=_prepare)


def _import_function(text: str) -> Callable[[str], Sequence[int]]:
    """Import a function by its name ``module:function``; the function may be an attribute of an object."""
    module, _, path = text.partition(":")
    try:
        function = import_module(module)
        for name in path.split(".") if path else ():
            function = getattr(function, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be imported as MODULE:FUNCTION ({error})") from None
    if not callable(function):
        raise argparse.ArgumentTypeError(f"{text!r} is not a function: give MODULE:FUNCTION")
    return function


def _prepare(arguments: argparse.Namespace) -> int:
    for text in arguments.texts:
        if not text.is_file():
            raise ValueError(f"{text} is not a file: give text files.")
    out = prepare(arguments.texts, arguments.out, arguments.tokenizer, arguments.vocab_size, arguments.end)
    (file,) = files_of(out)
    print(f"{file.path}: {file.tokens:,} tokens, vocabulary of {file.vocab_size:,}, {file.dtype.name}")
    return 0
