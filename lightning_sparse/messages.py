"""How the package speaks to its user: its logger, and what is said where the flavours of Lightning meet."""

import logging

log = logging.getLogger("lightning_sparse")


def show_log_lines() -> None:
    """As Lightning does for its own: notices of one line are seen unless the program has set up logging itself."""
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def described(cls: type, details: str) -> str:
    """What an object of a flavour's class is printed as. Lightning prints it when it is given one of the other flavour,
    so it names the way out."""
    other = {"pytorch_lightning": "lightning", "lightning": "pytorch_lightning"}.get(cls.__module__.rpartition(".")[2])
    way_out = f", not for {other}: there use lightning_sparse.flavours.{other}.{cls.__name__}" if other else ""
    return f"<{cls.__module__}.{cls.__name__}({details}){way_out}>"
