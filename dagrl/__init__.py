"""dagrl: post-training phases as statically compiled Ray graphs, replayed."""

__version__ = "0.1.0"
