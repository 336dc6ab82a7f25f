"""The `lockstep` command: one file per subcommand, imported only when it is asked for."""
