"""Where do the models come from? A file for each package: names, and what is tried under each."""

from benchmarks.conformance.zoo import torchvision_operators  # noqa: F401 - before any package that imports torchvision
