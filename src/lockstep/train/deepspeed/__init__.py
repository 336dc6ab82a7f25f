"""Train backend `deepspeed`: ZeRO 0 to 3."""
