"""Training whose parameters, gradients and optimizer state exceed the budget: lmswap beside what users would take.

- tasks: models with their optimizers: a decoder, ResNet-50, a 3D U-Net, adapters on a frozen base, a vision transformer
- ways: plain torch, lmswap, and the others
- moved: optimizer state that is elsewhere between updates, without overlap
- training: one way in a process of its own, with accumulation, clipping, a schedule, saving and loading
- run: all ways of a task, by benchmarks/weights/comparison.py
- table: their figures, and the goals
"""
