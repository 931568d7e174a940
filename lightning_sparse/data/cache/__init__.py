"""The tiers of a node, and the store that reads each sample from the nearest tier that has it."""
