"""What device, how much memory, what link to the host and how fast: asked of the system, or measured here."""
