"""The data half: network storage -> local disk -> memory of all nodes, one sample at a time.

Reading from a slow network file system in every epoch is what makes image training wait. Here every sample crosses the
storage link once: it is kept on the node's local disk for later runs, and in memory shared by the node's processes for
later epochs. A sample that another node owns comes from that node's memory.

::

    network storage --once--> local disk (LMDB) --each run--> node memory (one slab) --each epoch--> pipeline
                                                                 ^ peers: CURVE-encrypted zmq between nodes

=================  ==================================================================================
config.py          what is wanted: a frozen dataclass
manifest.py        the list of samples, kept in the cache with a fingerprint
ownership.py       which node owns which sample; pure
source.py          reads network storage through reader.py, a process that can be given up on
decode.py          the one decoder: bytes -> RGB uint8
disk_cache.py      network storage -> local disk
memory_cache.py    local disk -> node memory: slots, states, checksums
peers.py           samples from the memory of the node that owns them
store.py           `SampleStore`: composes the tiers; what pipelines read from
warm.py            fills the disk tier ahead of a run
inventory.py       what lies in a cache folder, and removing it
=================  ==================================================================================

Importing this folder imports none of lmdb, zmq, Pillow, DALI and Lightning; each is imported where it is first needed.
"""
