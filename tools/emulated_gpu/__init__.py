"""An emulated NVIDIA GPU: torch's CUDA build runs on it, and so lmswap's CUDA path, on machines without a GPU.

What is real: all of torch down to CUDA's runtime and driver, its caching allocators, streams, events and autograd
threads, and lmswap's engine. What is emulated: the libraries below, which `build` puts where torch looks for NVIDIA's.

- device: memory, streams, events, copy engines, faults, and what finds uses without an order
- faces: libcudart and libcuda over it, and what CUDA has no call for
- kernels: the CPU's in the place of torch's CUDA kernels, queued on streams, over the emulated device's memory
- machine: all of that from Python; plugin: in pytest

It shows wrong bytes, orders, errors and memory. It measures nothing: its times are those of a CPU.
"""
