"""The costs of a sample: tiers, backends, storage, and the list of samples."""
