"""Experimental: swapping in the graphs that TorchInductor compiles, whose last bits may differ from eager mode."""
