"""What a sample costs: tiers, backends, storage, and the list of samples."""
