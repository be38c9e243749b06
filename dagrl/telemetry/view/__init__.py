"""`dagrl view`: a page of a run's curves, samples and conversations, served live or written to one file."""
