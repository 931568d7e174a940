"""The tiers of a node, and the store that reads each sample from the nearest tier that has it.

=============== ====================================================================================================
store           store.py: opens the tiers, reads them in turn, and knows which node owns which sample
memory tier     memory.py: one segment per node and split; segment.py: memory that processes share
disk tier       disk.py: one LMDB per split
statistics      counts.py: samples and bytes by tier, of all processes of a run on a node; by epoch, over all nodes
command line    commands.py: fill the disk tier before a run, list and remove caches
=============== ====================================================================================================
"""
