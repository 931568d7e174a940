"""Writes docs/options.md, the options as tables, from signatures and docstrings: python docs/options.py"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lightning_sparse.data.config import CacheConfig, ImageOptions, SampleOptions
from lightning_sparse.data.datamodule import CachedDataModuleMixin, CachedImageDataModuleMixin
from lightning_sparse.data.session import DataOptions
from lightning_sparse.data.tokens import TokenDataModuleMixin
from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.gradients import HierConfig
from lightning_sparse.gradients.config import GradientsConfig
from lightning_sparse.pto.callback import PTOMixin
from lightning_sparse.strategy.options import ShardsConfig
from lightning_sparse.strategy.trainer import MSTopKElasticMixin, MSTopKFSDPMixin, MSTopKHierMixin, MSTopKLocalMixin
from lightning_sparse.updates import UpdatesConfig
from lightning_sparse.updates.elastic import ElasticConfig

PAGE = Path(__file__).with_name("options.md")
HEAD = """# Options

A strategy by its name (`strategy="mstopk_local"`) has the defaults. To set options, give an object instead:

```python
from lightning_sparse import MSTopKLocalStrategy

strategy = MSTopKLocalStrategy(density=0.03)  # for Trainer(strategy=strategy)
```

With `lightning.pytorch`, import it first. Other options are passed on: to Lightning's own strategy, and to
`DistributedDataParallel`. (`python docs/options.py` writes this page from the docstrings, which
`help(MSTopKLocalStrategy)` shows, too.)
"""
TABLES: tuple[tuple[str, type, tuple[type, ...]], ...] = (
    ("`MSTopKHierStrategy`, `mstopk_hier`", MSTopKHierMixin, (ExchangeConfig, GradientsConfig, HierConfig)),
    ("`MSTopKLocalStrategy`, `mstopk_local`", MSTopKLocalMixin, (ExchangeConfig, UpdatesConfig)),
    ("`MSTopKElasticStrategy`, `mstopk_elastic`", MSTopKElasticMixin, (ExchangeConfig, UpdatesConfig, ElasticConfig)),
    (
        "`MSTopKFSDPStrategy`, `mstopk_fsdp`",
        MSTopKFSDPMixin,
        (ExchangeConfig, GradientsConfig, UpdatesConfig, ShardsConfig),
    ),
    ("`CachedImageDataModule`", CachedImageDataModuleMixin, (CacheConfig, DataOptions, ImageOptions)),
    ("`CachedDataModule`", CachedDataModuleMixin, (CacheConfig, DataOptions, SampleOptions)),
    ("`TokenDataModule`", TokenDataModuleMixin, ()),
    ("`PTOCallback`", PTOMixin, ()),
)


def described(cls: type) -> dict[str, str]:
    """The Args of a docstring, by name."""
    text = re.split(r"\n    \*\*\w+: ", inspect.getdoc(cls) or "")[0]
    found = re.search(r"^Args:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    entries = re.findall(r"^    ([\w, ]+): ((?:.|\n(?!    \w[\w, ]*: |\n))*)", found[1] if found else "", re.MULTILINE)
    return {name.strip(): " ".join(said.split()) for names, said in entries for name in names.split(",")}


def table(cls: type, configs: tuple[type, ...]) -> str:
    """A row for each option, by the class's own words where it has some."""
    said: dict[str, str] = {}
    for each in (*configs, cls):
        said.update(
            {name: words for name, words in described(each).items() if not words.startswith(("as `", "see below"))}
        )
    given = inspect.signature(cls).parameters.values()
    rows = [f"| `{p.name}` | {_default(p)} | {_cell(said[p.name])} |" for p in given if p.kind is not p.VAR_KEYWORD]
    return "\n".join(["| option | default | what it does |", "|---|---|---|", *rows])


def _default(parameter: inspect.Parameter) -> str:
    return "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n## {title}\n\n{table(cls, configs)}\n" for title, cls, configs in TABLES)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
