"""The tiers of a node, and the store that reads each sample from the nearest tier that has it.

=============== ===========================================================================================
store           store.py composes tiers.py, the tiers that a process has open, and the peers
memory tier     memory.py: one segment per node and split; shared_memory.py, budget.py (name, size and format),
                free_memory.py
disk tier       disk.py: one LMDB per split; lmdb_env.py, folders.py
network storage storage.py, and storage_reader.py, the program of its child process
samples         samples.py: the samples of a split; listing.py finds them, in folders, shards (shards.py) or those of
                a list (lists.py); manifest.py keeps them; placement.py: which node owns which sample
statistics      counts.py: samples and bytes by tier; run_counters.py: of all processes of a run on a node; summary.py:
                by epoch, over all nodes
command line    warm.py: fill the disk tier before a run; inventory.py: list and remove caches
=============== ===========================================================================================
"""
