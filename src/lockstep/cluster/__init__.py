"""Where ranks run: providers that place, start, watch and stop them (lockstep.protocols.cluster).

`ray.py` alone imports Ray. No tensor travels through a provider: ranks talk to each other.
"""
