"""Trainings whose inputs have other sizes in each step: lmswap beside plain torch, padding and torch.compile.

- tasks: texts, speech and images for detection
- training: one way in a process of its own
- __main__: all ways in turns
"""
