"""Log lines of the package, and errors of calls."""

import logging
from collections.abc import Callable

from lightning_sparse.messages import log


class Lines(logging.Handler):
    """Collects the lines that the package logs from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def raised(call: Callable[..., object], *args: object, **options: object) -> str:
    """Return the message of the exception that a call raises, or "" if it raises none. A rank can return it."""
    try:
        call(*args, **options)
    except Exception as error:
        return str(error)
    return ""
