"""Opens channels, starts actors, owns shutdown."""
