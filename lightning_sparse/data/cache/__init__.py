"""The tiers of a node, and the store that reads from the nearest tier."""
