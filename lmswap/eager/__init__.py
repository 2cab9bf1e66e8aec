"""Serves what torch.compile cannot capture: saved-tensor hooks that follow a plan made of an earlier, recorded step."""
