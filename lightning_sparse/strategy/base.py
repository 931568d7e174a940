"""What all strategies have in common: the topology, and files of all ranks beside a checkpoint."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.messages import log
from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.barrier import StoreBarrier
from lightning_sparse.topology import Topology, discover


class Core:
    """Of a strategy for Trainer or Fabric."""

    _kind = "gradients"  # what its side files hold

    # The part of Lightning's strategies that is relied upon.
    root_device: torch.device
    node_rank: int
    local_rank: int
    global_rank: int
    world_size: int
    is_global_zero: bool
    _ddp_kwargs: dict[str, Any]
    _timeout: timedelta | None

    def _begin(self, config: ExchangeConfig, node_name: str | None) -> None:
        self._options = config.to_dict()
        self._node_name = node_name
        self._topology: Topology | None = None
        self._run_id = ""
        self._saved: list[side_files.Saved] = []
        self._saves: Counter[str] = Counter()

    def _discover(self, shared_options: Mapping[str, Any]) -> Topology:
        """The topology, found once. A collective then, which compares options of all ranks."""
        if self._topology is None:
            self._topology = discover(
                node_rank=self.node_rank,
                local_rank=self.local_rank,
                node_name=self._node_name,
                config={**self._options, **shared_options},
                timeout=self._timeout,
            )
            self._run_id = str(self.broadcast(side_files.new_run_id()))  # type: ignore[attr-defined]
        return self._topology

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _manifests(self) -> list[dict[str, Any]]:
        """For the main file, one a module, each with its ``save_id``; empty where there is nothing to save."""
        raise NotImplementedError

    def _side_contents(self) -> list[dict[str, Any]]:
        """What this rank alone knows, one a manifest."""
        raise NotImplementedError

    @contextmanager
    def _saving(self, path: Any, *, whole: bool) -> Iterator[list[dict[str, Any]] | None]:
        """Write this rank's side files, then the caller writes the main file with what is yielded; afterwards those of
        earlier saves are removed. No collective: one rank alone may save, from a signal handler say.

        Args:
            path: of the main file.
            whole: False for weights alone, which have no side files; None is yielded then.

        Raises:
            RuntimeError: when side files of some ranks are missing and the main file would replace a whole checkpoint.
        """
        path = os.fspath(path)
        manifests = self._manifests() if whole else []
        ids = [manifest["save_id"] for manifest in manifests]
        if manifests:
            for content, save_id in zip(self._side_contents(), ids, strict=True):
                side_files.write_side_file(content, save_id, path, self.global_rank)
            self._wait_for_side_files("/".join(ids), path)
        yield manifests or None
        if self.is_global_zero:
            side_files.remove_side_files(path, but=ids)

    def _wait_for_side_files(self, save_id: str, path: str) -> None:
        """On rank 0, wait for the side files of all ranks."""
        # Not by the path, which may differ between ranks (Ray gives each worker a folder of its own).
        self._saves[save_id] += 1
        barrier = StoreBarrier(f"lightning_sparse/{save_id}/{self._saves[save_id]}", self.world_size)
        barrier.arrive(self.global_rank, os.path.basename(path))
        missing = barrier.wait(self._timeout) if self.is_global_zero else []
        if len(set(barrier.names)) > 1:
            log.warning(
                "ranks save a checkpoint by different names (%s): a resume will not find all residuals. Log what is in "
                "the name with sync_dist=True",
                ", ".join(sorted(set(barrier.names))),
            )
        if not missing:
            return
        said = f"rank(s) {', '.join(map(str, missing))} did not write their residuals of {path} in time"
        if side_files.exists(path):
            raise RuntimeError(f"{said}: the checkpoint of that name stays as it was. Look for what stopped them.")
        log.warning("%s: it is saved without them, and they are lost on resume", said)

    def _load(self, checkpoint: Any, path: Any) -> None:
        """Read this rank's side files, for modules that are wrapped now or later."""
        saved = side_files.load(checkpoint, os.fspath(path), self.global_rank)
        self._saved = [each for each in saved if each.manifest.get("kind", "gradients") == self._kind]
        if len(self._saved) < len(saved) and self.is_global_zero:
            log.warning(
                "%s was saved by a strategy that exchanges %s: its weights are taken, and what nodes had not sent then "
                "is lost",
                path,
                "updates" if self._kind == "gradients" else "gradients",
            )
