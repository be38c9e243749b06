"""The phases that dagrl ships: short Python functions, found by the import paths in `phases.*` of the configuration."""
