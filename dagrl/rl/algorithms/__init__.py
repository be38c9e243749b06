"""The algorithms that are shipped. Each is a class as in a user's own file (`dagrl.rl.algorithm`)."""
