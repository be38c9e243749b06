"""Carrying: one rank's end of a refit, from packing to the commit."""
