"""A FAKE of SGLang for Lockstep's tests: no model, no torch. See launch_server.py."""
