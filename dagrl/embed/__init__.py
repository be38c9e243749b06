"""Phase graphs under other people's fleets: verl, NeMo-RL."""
