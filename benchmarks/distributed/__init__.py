"""The case studies' multi-GPU rows again, each from one command: ``python -m benchmarks.distributed RECIPE``.

Reading order: `ranks` joins the processes that torchrun starts, `alarm` ends them together. `images`, `shards`,
`schedule`, `lars` and `training` are how ResNet-50 is trained on many ranks; `reduction` is how gradients are summed.
`sums` measures that alone and beside compute. `resnet50`, `allreduce`, `unet3d` and `efficiency` are what torchrun
starts; `launch` starts torchrun, `conductor` several that take turns. `published` has the figures to compare with,
`results` what was found, `tables` both side by side, and `page` puts the stored ones into the documentation.
"""
