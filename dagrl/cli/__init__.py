"""The `dagrl` command."""
