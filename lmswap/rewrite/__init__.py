"""Carries a `Plan` out on fx graphs: inserts swap ops and release points. It decides nothing."""
