"""What travels between actors, grouped by path."""
