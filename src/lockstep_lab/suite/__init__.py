"""Shared by the suites of the lab: a process per variant, its job, its deadline, the machine it ran on."""
