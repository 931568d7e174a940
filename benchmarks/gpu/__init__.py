"""Everything that the first minutes on a GPU should tell."""
