"""The laboratory: experiments on recordings and on the trainer, and the commands that run them.

Replay, matrix, bisect, parity and the step benchmark; recordings of other frameworks, editing and display. It
is built on lockstep, which never imports it: lockstep.cli.main.COMMANDS names its commands.
"""
