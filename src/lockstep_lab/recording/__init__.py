"""Recordings as files: made from the dumps of other frameworks, sliced, merged and shown."""
