"""Processes that work together: how they are started, find each other, and end when one of them does."""
