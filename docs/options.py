"""Write docs/options.md from signatures and docstrings: python docs/options.py"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lightning_sparse.data.config import CacheConfig, ImageOptions, SampleOptions
from lightning_sparse.data.datamodule import CachedDataModuleMixin, CachedImageDataModuleMixin
from lightning_sparse.data.session import DataOptions
from lightning_sparse.data.tokens import TokenDataModuleMixin
from lightning_sparse.elastic.updates import ElasticConfig
from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.gradients import HierConfig
from lightning_sparse.gradients.config import GradientsConfig
from lightning_sparse.options import descriptions
from lightning_sparse.pto.callback import PTOMixin
from lightning_sparse.strategy.elastic import MSTopKElasticMixin
from lightning_sparse.strategy.fsdp import MSTopKFSDPMixin
from lightning_sparse.strategy.hier import MSTopKHierMixin
from lightning_sparse.strategy.local import MSTopKLocalMixin
from lightning_sparse.strategy.options import ShardsConfig
from lightning_sparse.updates import UpdatesConfig

PAGE = Path(__file__).with_name("options.md")
HEAD = """# Options

A name such as `strategy="mstopk_local"` selects the defaults. To set options, pass an object:

```python
from lightning_sparse import MSTopKLocalStrategy

strategy = MSTopKLocalStrategy(density=0.03)  # for Trainer(strategy=strategy)
```

With `lightning.pytorch`, import it first. Strategies pass other options to Lightning's strategy and to
`DistributedDataParallel`. `help(MSTopKLocalStrategy)` explains all options.
"""
EXCHANGES = (ExchangeConfig, UpdatesConfig)
SECTIONS: dict[str, dict[str, tuple[type, ...]]] = {
    "Strategies": {
        "hier": (ExchangeConfig, GradientsConfig, HierConfig, MSTopKHierMixin),
        "local": (*EXCHANGES, MSTopKLocalMixin),
        "elastic": (*EXCHANGES, ElasticConfig, MSTopKElasticMixin),
        "fsdp": (ExchangeConfig, GradientsConfig, UpdatesConfig, ShardsConfig, MSTopKFSDPMixin),
    },
    "DataModules": {
        "images": (CacheConfig, DataOptions, ImageOptions, CachedImageDataModuleMixin),
        "samples": (CacheConfig, DataOptions, SampleOptions, CachedDataModuleMixin),
        "tokens": (TokenDataModuleMixin,),
    },
    "PTOCallback": {"": (PTOMixin,)},
}
NOTES = {
    "Strategies": "If only some strategies have an option, parentheses name them: *hier* is `MSTopKHierStrategy`, etc. "
    "`MSTopKElasticFSDPStrategy` takes the *elastic* options and `save_distributed_checkpoint`.",
    "DataModules": "*images* is `CachedImageDataModule`, *samples* `CachedDataModule`, and *tokens* `TokenDataModule`.",
}


def _shorten(text: str) -> str:
    """Return the first sentence, and the sentences that say when to change the option."""
    first, *others = re.split(r"(?<=\.)\s+(?=[A-Z`\"])", " ".join(text.split()))
    return " ".join([first, *(each for each in others if each.startswith(("Use ", "Set ", "Choose ")))])


def options(classes: tuple[type, ...]) -> dict[tuple[str, str], str]:
    """Return the default of each (option, sentence) of a class, whose sentences override those of its configs."""
    said: dict[str, str] = {}
    for each in classes:
        said.update({name: _shorten(words) for name, words in descriptions(each).items()})
    given = inspect.signature(classes[-1]).parameters.values()
    return {
        (p.name, said[p.name]): _default(p)
        for p in given
        if p.kind is not p.VAR_KEYWORD and not said[p.name].startswith("Deprecated")
    }


def table(owners: dict[str, tuple[type, ...]]) -> str:
    """Return a table with one row for each option and sentence."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for owner, classes in owners.items():
        for option, default in options(classes).items():
            rows.setdefault(option, {})[owner] = default
    lines = ["| option | default | description |", "|---|---|---|"]
    for (name, said), defaults in sorted(rows.items(), key=lambda row: -len(row[1])):
        where = "" if len(defaults) == len(owners) else f" ({', '.join(defaults)})"
        several = len(set(defaults.values())) > 1
        default = ", ".join(
            f"{value} ({', '.join(each for each in defaults if defaults[each] == value)})" if several else value
            for value in dict.fromkeys(defaults.values())
        )
        lines.append(f"| `{name}`{where} | {default} | {_cell(said)} |")
    return "\n".join(lines)


def _default(parameter: inspect.Parameter) -> str:
    return "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, owners in SECTIONS.items():
        note = f"{NOTES[title]}\n\n" if title in NOTES else ""
        parts.append(f"\n## {title}\n\n{note}{table(owners)}\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
