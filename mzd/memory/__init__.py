"""Arena, swap spaces, token logs: everything that holds bytes."""
