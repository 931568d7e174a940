"""What the package says."""

import logging

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
