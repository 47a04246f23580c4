"""Receipts: what an answer was computed from, in a form that others can check and replay."""
