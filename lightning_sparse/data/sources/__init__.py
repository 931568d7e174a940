"""The layouts of a source, and network storage, which a separate process reads."""
