"""The Trio actors: one file each; they meet only through messages."""
