"""`lockstep parity compare`: losses of runs that exist, step by step."""
