"""Executes a `Plan`: fragments travel to the hosts of their matrices, are updated there whole, and travel back."""
