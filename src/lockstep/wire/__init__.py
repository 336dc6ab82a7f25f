"""The code that trainer and engine share to transfer weights.

These files also run inside an engine's workers, in an environment without the rest of Lockstep: they
import the standard library, torch and safetensors only.
"""
