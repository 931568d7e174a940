"""Where `import torch` enters: torch calls `autoload` of every installed package of the group ``torch.backends``.

This file is next to the package, and an editable install copies it (pyproject.toml). The metadata of an editable
install stays when the checkout is moved or removed, and ``import torch`` raises if it cannot load an entry point. So
this module always loads, and reports missing parts.
"""

from __future__ import annotations

import logging


def autoload() -> None:
    """Register our strategies with Lightning. It never raises, even if the package is damaged."""
    try:
        from lightning_sparse._autoload import autoload as register

        register()
    except Exception as error:
        # Not a warning: a program that makes errors of warnings could not import torch.
        logging.getLogger("lightning_sparse").warning(
            "lightning-sparse is installed, but its package cannot be imported (%s: %s). Was the checkout of an "
            "editable install moved? Install it again, or run pip uninstall lightning-sparse",
            type(error).__name__,
            error,
        )
