"""The captured steps and their sizes; `python -m benchmarks.programs.recipes [NAME …]` stores them again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.programs.corpus import store_program
from benchmarks.programs.models import Gpt, VisionTransformer, resnet50, write_norms_out
from benchmarks.unet3d.network import UNet3d
from lmswap.capture.dry_run import capture_step
from lmswap.ir.program import Program


@dataclass(frozen=True)
class Recipe:
    """A model, the inputs of one step, and the type of both."""

    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[Tensor, ...]]
    dtype: torch.dtype = torch.float32

    def capture(self, name: str) -> Program:
        """Captures one training step on the CPU; what comes after the model is one op of unknown costs."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            program = capture_step(self.make_model, lambda _: self.make_inputs(), torch.device("cpu"))
        finally:
            torch.set_default_dtype(before)
        return replace(program, name=name, fixed=None, scratch_bytes=())


def _scan(side: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.empty(1, 4, side, side, side),)


def _images(batch: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.empty(batch, 3, 224, 224),)


def _texts(batch: int, tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.zeros(batch, tokens, dtype=torch.long), torch.zeros(batch, tokens, dtype=torch.long))


RECIPES = {
    "unet3d_96": Recipe(UNet3d, _scan(96)),
    "unet3d_144": Recipe(UNet3d, _scan(144)),
    "unet3d_192": Recipe(UNet3d, _scan(192)),
    # Parameters, inputs and everything between in bfloat16, as model.to(torch.bfloat16) trains; no autocast.
    "unet3d_192_bf16": Recipe(UNet3d, _scan(192), torch.bfloat16),
    "unet3d_192_unfused": Recipe(lambda: write_norms_out(UNet3d(head="block")), _scan(192)),
    "resnet50": Recipe(resnet50, _images(64)),
    # GPT-2 medium.
    "gpt": Recipe(lambda: Gpt(layers=24, width=1024, heads=16, tokens=1024, words=50257), _texts(8, 1024)),
    # ViT-B/16.
    "vit": Recipe(lambda: VisionTransformer(layers=12, width=768, heads=12), _images(64)),
    # Narrow, so that its activations outweigh the gradients of so many layers.
    "gpt_deep": Recipe(lambda: Gpt(layers=592, width=256, heads=4, tokens=1024, words=8192), _texts(4, 1024)),
}


def main() -> None:
    """Captures and stores the named programs; all of them when none is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(RECIPES)}")
    names = parser.parse_args().names or list(RECIPES)
    if unknown := set(names) - set(RECIPES):
        parser.error(f"no recipe for {', '.join(sorted(unknown))}")
    for name in names:
        program = RECIPES[name].capture(name)
        path = store_program(program)
        sys.stdout.write(f"{name}: {len(program.ops)} ops in {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
