"""The 3D U-Net for brain tumours: the model and the protocol of the case study that lmswap is measured against.

Reading order: `network`, `loss` and `recipe` are the model and how it is trained; `brats`, `synthetic` and
`preprocess` turn scans into cubes, `dataset` a folder of them. Training for real: `split`, `augment` and `loader` say
which subject comes when, `train` trains, `checkpoint` keeps what it has, `predict`, `scores` and `evaluate` judge the
result. Comparing: `memory` measures a process; `run` runs one configuration, `study` runs several, each in a fresh
process, and `verdict` judges them. `__main__` has the commands, one file each in `commands`; `demo` is `make demo`.
"""
