"""Recipes: run files that come with Lockstep, and the Python that they name."""
