"""Where `import torch` enters: torch calls `autoload` of every installed package of the group ``torch.backends``.

It lies beside the package, and an editable install copies it (pyproject.toml): the metadata of an editable install
outlives a checkout that is moved or removed, and ``import torch`` raises for an entry point that it cannot load. So
this one always loads, and says what is missing.
"""

from __future__ import annotations

import logging


def autoload() -> None:
    """Register our strategies with Lightning. Raises nothing, whatever state the package is in."""
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
