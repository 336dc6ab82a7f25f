"""Experiments on recordings: replay, the compatibility matrix, bisect."""
