"""Runs as data for people: what `lockstep runs` and `lockstep view` show, read from run directories.

Readers are kept open. Asked again, they read what was appended. Damaged, missing and half-written files are
named in `problems`; only a run of a newer version is refused. Loads no torch.
"""
