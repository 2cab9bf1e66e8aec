"""Carries out a `Plan` on fx graphs: inserts recomputes and swap ops. It decides nothing."""
