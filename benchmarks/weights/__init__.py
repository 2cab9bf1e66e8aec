"""Models larger than their budget whose weights are mostly frozen: lmswap beside what users would take instead.

- tasks: what is trained or run: a decoder with adapters, and a frozen 3D encoder with a trained decoder
- ways: plain torch, lmswap, and the others; each has the budget of lmswap
- paced_file, window: where the others keep weights, and double-buffered block swap
- training: one way in a process of its own
- run: all ways of a task

What benchmarks/state has too:

- outcomes: a run of one way, and what came of it
- comparison: all ways within one budget, of which those that have none move the fewest blocks that fit
- arguments, results, table: of its command line, and what it writes
"""
