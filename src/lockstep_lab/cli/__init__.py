"""The laboratory's commands: one file per command of `lockstep`, imported only when it is asked for."""
