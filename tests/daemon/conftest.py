"""The device and the store that tests of a whole daemon share."""

from tests.paths.conftest import device, fixture_store

__all__ = ["device", "fixture_store"]
