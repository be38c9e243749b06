"""What runs a `PhaseGraph`: `compiled` (Ray Compiled Graphs) or `eager` (plain actor calls)."""
