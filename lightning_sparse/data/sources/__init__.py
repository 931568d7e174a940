"""Where samples come from: the layouts of a source, and network storage, which is read in a process of its own."""
