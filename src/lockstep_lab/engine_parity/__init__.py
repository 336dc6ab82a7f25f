"""`lockstep parity engines`: inference engines side by side, on the same requests."""
