"""Swapping by saved-tensor hooks that follow a plan of a recorded step, for what torch.compile cannot capture."""
