"""Train backends: each owns the policy's Parameters, their float32 master, the optimizer and the schedule."""

from lockstep.registry import Registry

BACKENDS = Registry(
    "train backend",
    {
        "local": "lockstep.train.local:LocalBackend",
        "fsdp2": "lockstep.train.fsdp2.backend:FSDP2Backend",
        "deepspeed": "lockstep.train.deepspeed.backend:DeepSpeedBackend",
    },
)
"""The classes behind `train.backend`: Backend(config, model=, total_steps=, temperature=, ref=)."""
