"""What the page-retaining heap makes of a CPU training step: `python -m benchmarks.heap`.

`step` trains the 3D U-Net in a process of its own, with or without the heap; `__main__` alternates and compares.
"""
