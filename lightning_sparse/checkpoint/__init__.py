"""Files of a checkpoint, and the decisions of a restore."""
