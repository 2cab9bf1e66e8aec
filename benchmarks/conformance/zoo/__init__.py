"""The models, by package: names, and the trials of each."""

from benchmarks.conformance.zoo import torchvision_operators  # noqa: F401 - before any package that imports torchvision
