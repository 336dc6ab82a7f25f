"""Environments of several turns: classes of tools, the processes that they live in, exact tokens."""
