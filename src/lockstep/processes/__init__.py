"""Processes that this one starts: none outlives it, and each ends with all that it started."""
