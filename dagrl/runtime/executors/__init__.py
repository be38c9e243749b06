"""Executors of a `PhaseGraph`: `compiled` (static graphs) and `eager` (plain actor calls)."""
