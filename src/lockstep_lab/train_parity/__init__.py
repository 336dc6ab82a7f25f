"""`lockstep parity train`: train stacks side by side, from the same weights and data."""
