"""Recordings of what other frameworks dumped."""
