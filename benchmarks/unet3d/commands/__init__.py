"""The commands of `lmswap bench unet3d`, one module each: `add_to` declares the options, `run` runs it."""
