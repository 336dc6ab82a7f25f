"""`lockstep.record`: hooks on the modules of other programs."""
