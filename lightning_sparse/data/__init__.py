"""Cached samples for training on several nodes.

Each file crosses the link to network storage once. Each node keeps it on its local disk for later runs. One node keeps
it in memory for later epochs, and sends it to the other nodes. ::

    network storage -> local disk (LMDB) -> memory of the node -> batches
                                                 ^
                                  memory of other nodes (zmq, CURVE)

============== ==========================================================================
datamodule.py  base class of all DataModules; DataModules of images and of other files
tokens.py      DataModule of token ids; windows.py, shards.py, text.py, id_files.py
session.py     stores and loaders between setup and teardown
pipeline/      samples -> batches: sampler, loader, images (DALI and torch), workers
cache/         the tiers of a node, and the store that reads from the nearest tier
peers/         between nodes: server, client, addresses
sources/       the layouts of a source, and the process that reads network storage
others         folders.py, decode.py, config.py, child.py, rng.py, split_names.py
============== ==========================================================================

Modules import only modules below them; `pipeline` imports neither `cache` nor `peers`. The package imports lmdb, zmq,
Pillow, DALI and Lightning only on use.
"""
