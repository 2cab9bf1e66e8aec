"""The commands of `python -m benchmarks.unet3d`, one module each: `add_to` declares the options, `run` runs it."""
