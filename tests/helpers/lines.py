"""What the package says, and what a call raises."""

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
    """What a call raises, for a rank to return; empty for nothing."""
    try:
        call(*args, **options)
    except Exception as error:
        return str(error)
    return ""
