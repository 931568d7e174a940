"""The data half: cached samples for training on several nodes.

Each file crosses the link to network storage once. Each node keeps it on its local disk for later runs, and one node
keeps it in memory for later epochs and sends it to the other nodes.

::

    network storage -> local disk (LMDB) -> memory of the node -> batches
                                                 ^
                                  memory of other nodes (zmq, CURVE)

============== ===========================================================================
datamodule.py  what all DataModules share; those of images, and of files of any kind
tokens.py      the DataModule of token ids: windows.py cuts them, shards.py makes them of
               text.py's documents, id_files.py reads and writes them
session.py     what is open between setup and teardown, and what ranks agree on before
pipeline/      samples -> batches: sampler, loader, images (DALI and torch), workers
cache/         the tiers of a node, and the store that reads a sample from the nearest one
peers/         between nodes: server, client, addresses
sources/       the layouts of a source, and the process that reads network storage
folders.py     folders and files of the cache on local disk
decode.py      a sample, the interface of what reads samples, and the image decoder
config.py      options of the cache, and the errors
child.py       child processes
rng.py         counter-based random numbers, of which all of this is drawn
============== ===========================================================================

Imports go downwards in this table, except that `pipeline` imports neither `cache` nor `peers`. Importing this package
does not import lmdb, zmq, Pillow, DALI or Lightning.
"""
