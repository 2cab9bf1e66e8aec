"""Models larger than their budget whose weights are mostly frozen: lmswap beside what users would take instead.

- tasks: what is trained or run: a decoder with adapters, and a frozen 3D encoder with a trained decoder
- ways: plain torch, lmswap, and the others; each has the budget of lmswap
- paced_file, window: where the others keep weights, and double-buffered block swap
- training: one way in a process of its own
- run: all ways of a task, of which those that have no budget move the fewest blocks that fit
- table: their figures
"""
