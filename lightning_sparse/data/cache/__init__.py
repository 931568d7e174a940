"""The tiers of a node, and the store that reads each sample from the nearest tier that has it.

================= =====================================================================
store.py          `SampleStore`: composes the tiers and the peers
tiers.py          the tiers that a process has open
memory.py         memory tier: one shared-memory segment per run, node and split
shared_memory.py  segments that end with their run
budget.py         size, format and folder of the memory tier
disk.py           disk tier: one LMDB per split
lmdb_env.py       LMDB environments that this process has open
storage.py        network storage, read by a child process
storage_reader.py the program of that process
manifest.py       list of the samples of a split
placement.py      which node owns which sample
folders.py        folders and files of the cache on disk
counts.py         samples and bytes by tier
summary.py        the same by epoch, over all nodes
warm.py           fill the disk tier before a run
inventory.py      list and remove caches
================= =====================================================================
"""
