"""Frozen, typed configs: one model per component. Loads no torch, ray or engine."""
