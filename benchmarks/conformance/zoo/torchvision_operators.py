"""Replacements for torchvision's C++ operators, which its wheels have for CUDA builds of torch only.

With a CPU build of torch it could not even be imported without this.
"""

from __future__ import annotations

import importlib.util
import sys

import torch
from torch import Tensor

_library = torch.library.Library("torchvision", "FRAGMENT")


def _non_maximum_suppression(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The boxes that overlap with none of higher score by more than the threshold, best first."""
    order = scores.argsort(descending=True, stable=True)
    left, top, right, bottom = boxes[order].unbind(1)
    areas = (right - left) * (bottom - top)
    width = torch.minimum(right[:, None], right) - torch.maximum(left[:, None], left)
    height = torch.minimum(bottom[:, None], bottom) - torch.maximum(top[:, None], top)
    shared = width.clamp(min=0) * height.clamp(min=0)
    overlaps = shared > iou_threshold * (areas[:, None] + areas - shared)
    dropped = torch.zeros(len(order), dtype=torch.bool)
    kept = []
    for number in range(len(order)):
        if not dropped[number]:
            kept.append(number)
            dropped |= overlaps[number]
    return order[kept]


if torch.version.cuda is None and importlib.util.find_spec("torchvision") is not None:
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.impl("nms", _non_maximum_suppression, "CPU")
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None  # the requested one is here
    # Where this operator is missing, torchvision has Inductor compile its lines in plain torch too, which rounds
    # differently from them op by op: nothing to compare with. The module is hidden behind its function.
    roi_align = sys.modules["torchvision.ops.roi_align"]
    roi_align._roi_align = roi_align._roi_align.__wrapped__  # type: ignore[attr-defined]
