"""Lockstep: RLHF post-training whose parts are interchangeable and proven to agree."""

__version__ = "0.1.0"
