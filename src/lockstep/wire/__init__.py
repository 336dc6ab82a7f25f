"""What trainer and engine have in common while weights travel.

These files also run inside an engine's workers, in an environment that has nothing else of Lockstep: they
import the standard library, torch and safetensors only.
"""
