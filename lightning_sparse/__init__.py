"""Data-parallel training that stays fast on ordinary networks."""
