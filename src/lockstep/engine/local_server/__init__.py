"""`engine.process = "separate"`: an engine of Lockstep's in a process of its own, behind HTTP on loopback."""
