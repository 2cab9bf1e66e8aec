"""The effect of the page-retaining heap on a CPU training step: `python -m benchmarks.heap`.

`step` trains the 3D U-Net in a process of its own, with or without the heap; `__main__` alternates and compares.
"""
