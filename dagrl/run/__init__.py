"""A run from start to end: preflight, cluster, workers, session, checkpoints, restarts."""
