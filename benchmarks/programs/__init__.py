"""Captured training steps, described machines, and a replay that says whether planning got better or worse."""
