"""Owns how hypothesis runs here: never against the clock, for the cores are shared."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
