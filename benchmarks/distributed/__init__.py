"""The case studies' multi-GPU rows again, each from one command: ``python -m benchmarks.distributed RECIPE``.

Reading order: `ranks` joins the processes that torchrun starts, `alarm` ends them together. `images`, `shards`,
`schedule`, `lars` and `training` are how ResNet-50 is trained on many ranks; `reduction` is how gradients are summed.
`resnet50`, `allreduce` and `unet3d` are what torchrun starts; `launch` starts torchrun. `published` has the figures to
compare with, `results` what was found, `tables` both side by side.
"""
