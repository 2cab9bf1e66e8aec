"""Published measurements of three write-ups of 2018 on many GPUs, as data.

ImageNet on 64 V100s (eight machines of eight, 25 Gb/s); ImageNet in four minutes on P40s (Jia et al., arXiv
1807.11205); Keras on K80s. IBM's case study is in `benchmarks.case_study.published`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageNet:
    """ResNet-50 for 90 epochs; ``efficiency`` is against one of its machines."""

    system: str
    gpus: int
    batch: int
    images_per_second: float
    efficiency: float
    minutes: float
    accuracy: float


IMAGENET = (
    ImageNet("64 V100, Horovod, TensorFlow", 64, 256, 41_000, 0.90, 50, 0.7554),
    ImageNet("64 V100, parameter servers, MXNet", 64, 256, 44_000, 0.92, 47, 0.7575),
)


# Efficiency on 1,024 P40s without and with fused tensors and hierarchical all-reduce.
FLAT_EFFICIENCY, HIERARCHICAL_EFFICIENCY = 0.090, 0.992
FUSION_SPEED_UP = {"AlexNet": 3, "ResNet-50": 11}  # at most, over all-reduce without

# Seconds of the same work on 1, 2 and 4 K80s: in as many machines (Horovod), and in one (Keras' multi_gpu_model).
KERAS_GPUS = (1, 2, 4)
KERAS_SECONDS = {
    "out: K80s in machines of their own, Horovod": (166, 143, 89),
    "up: K80s in one machine": (150, 127, 82),
}
