"""The 3D U-Net for brain tumours: the model and the protocol of the case study that lmswap is measured against.

Reading order: `network`, `loss` and `recipe` are the model and how it is trained; `brats`, `synthetic` and
`preprocess` turn scans into cubes; `memory` measures a process; `train` runs one configuration, `study` runs several,
each in a fresh process, and judges them; `table` and `plot` show the outcome; `cli` and `demo` are the two commands.
"""
