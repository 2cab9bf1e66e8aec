"""Trials of torchvision: classification, segmentation, detection, video and optical flow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torchvision import models

from benchmarks.conformance.trial import Call, Trial


def _images(images: int, side: int) -> Callable[[], Call]:
    return lambda: ((torch.randn(images, 3, side, side),), {})


def _clip(frames: int, side: int) -> Callable[[], Call]:
    return lambda: ((torch.randn(1, 3, frames, side, side),), {})


def _annotated(images: int, side: int) -> Callable[[], Call]:
    """Images with two boxes each, their labels, masks and keypoints, as the detection models train on."""

    def target() -> dict[str, Tensor]:
        boxes = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.3, 0.2, 0.9, 0.8]]) * side
        keypoints = torch.cat([boxes[:, None, :2].expand(2, 17, 2) + 2, torch.ones(2, 17, 1)], 2)
        masks = (torch.rand(2, side, side) > 0.5).to(torch.uint8)
        return {"boxes": boxes, "labels": torch.ones(2, dtype=torch.int64), "masks": masks, "keypoints": keypoints}

    return lambda: (([torch.rand(3, side, side) for _ in range(images)], [target() for _ in range(images)]), {})


_SMALL = {"min_size": 128, "max_size": 192}
_FEW_BOXES = {**_SMALL, "rpn_pre_nms_top_n_train": 100, "rpn_post_nms_top_n_train": 50, "box_batch_size_per_image": 32}
# By name: what it is made with beside random weights, and its call.
_MODELS: dict[str, tuple[dict[str, object], Callable[[], Call]]] = {
    "alexnet": ({}, _images(8, 128)),
    "deeplabv3_mobilenet_v3_large": ({}, _images(2, 128)),
    "fasterrcnn_mobilenet_v3_large_320_fpn": (_FEW_BOXES, _annotated(2, 128)),
    "fcn_resnet50": ({}, _images(2, 96)),
    "fcos_resnet50_fpn": (_SMALL, _annotated(2, 128)),
    "lraspp_mobilenet_v3_large": ({}, _images(4, 128)),
    "maskrcnn_resnet50_fpn": (_FEW_BOXES, _annotated(1, 128)),
    "mnasnet0_5": ({}, _images(8, 128)),
    "r2plus1d_18": ({}, _clip(4, 56)),
    "raft_small": ({}, lambda: ((torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)), {"num_flow_updates": 3})),
    "retinanet_resnet50_fpn": (_SMALL, _annotated(2, 128)),
    "shufflenet_v2_x0_5": ({}, _images(8, 128)),
    "squeezenet1_1": ({}, _images(8, 128)),
    "ssdlite320_mobilenet_v3_large": ({}, _annotated(2, 128)),
    "swin3d_t": ({}, _clip(4, 64)),
}
NAMES = tuple(_MODELS)


def trials(name: str) -> Iterator[Trial]:
    """The model in training mode on one batch of noise."""
    options, make_call = _MODELS[name]
    has_backbone = "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters
    no_weights = {"weights": None, **({"weights_backbone": None} if has_backbone else {})}
    yield Trial(lambda: models.get_model(name, **no_weights, **options), make_call)
