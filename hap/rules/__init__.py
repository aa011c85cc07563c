"""Operator -> rows: which placements in give which placements out; the prover; a graph's choices."""
