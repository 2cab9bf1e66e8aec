"""What does each command of `lmswap bench unet3d` do? One file a command: `add_to` declares options, `run` does it."""
