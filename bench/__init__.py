"""Benchmarks of dispatch and combine; see README.md in this folder."""
