"""A train backend's state as files, for exact resume under any backend."""
