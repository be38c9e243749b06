"""A campaign of faults against real runs: what is disturbed (faults), what runs (scenarios), what must hold (trial)."""
