"""Suites for asv in ``benchmarks/suites``, and scripts for single tables and figures of the book.

``docs/benchmarks.md`` says how to run them.
"""
