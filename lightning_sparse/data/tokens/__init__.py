"""Token streams: windows of memory-mapped files of token ids.

============= ==========================================================================
datamodule.py the LightningDataModule
stream.py     reads windows of the files
prepare.py    writes such a file from text files
============= ==========================================================================

A file ``<name>.bin`` contains the ids, uint16 or uint32, little-endian, one after the other. Beside it, ``<name>.json``
says ``{"dtype": "uint16", "vocab_size": 50257}``, and may say more. A folder of such files is read as shards, by name.
"""

from lightning_sparse.data.tokens.prepare import prepare

__all__ = ["prepare"]
