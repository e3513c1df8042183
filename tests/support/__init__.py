"""Real servers, namespaces and clocks for the tests. Not for: fixtures (`tests/conftest.py`) or assertions."""
