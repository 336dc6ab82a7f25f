"""`lockstep bench step`: one RL step of the same work in several ways."""
