"""Trainers of Hugging Face over the network of all trainer scripts; needs transformers and accelerate."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from lmswap.integrations.transformers import LmswapCallback
from tests.integrations.scripts import FEW, STEPS, Network, loader, weights


class Regression(nn.Module):
    """What the Trainer calls: inputs and labels in, the loss out."""

    def __init__(self, **size):
        super().__init__()
        self.network = Network(**size)

    def forward(self, x, labels=None):
        predicted = self.network(x)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


def rows(batch):
    x, labels = loader(batch).dataset.tensors
    return [{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)]


def collate_whole(batch):
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def trainer_of(folder, model=None, batch=FEW, data=None, **settings):
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        **{"max_steps": STEPS, "save_strategy": "no", "report_to": [], "logging_steps": 1, **settings},
        disable_tqdm=True,
        use_cpu=True,
    )
    data = rows(batch) if data is None else data
    return Trainer(model or Regression(), arguments, train_dataset=data, eval_dataset=data, data_collator=collate_whole)


def trained(trainer, budget=None, *, resumes=False, **options):
    """The weights after ``trainer`` has trained, with a budget if there is one, and the callback."""
    callback = LmswapCallback(trainer, budget, **options) if budget else None
    if callback:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resumes)
    return weights(trainer.model), callback
