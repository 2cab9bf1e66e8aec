"""Offsets: of host copies in a tier, and of tensors in the arena of a device."""
