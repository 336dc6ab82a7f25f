"""What every suite of the lab shares: a process per variant, its job, its deadline, the machine it ran on."""
