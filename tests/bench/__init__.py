"""Benchmarks: each prints a table and, last, one line of JSON. `make bench NAME=<file>`."""
