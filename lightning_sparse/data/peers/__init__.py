"""Between nodes: each node serves the samples it keeps in memory, and reads those of other nodes."""
