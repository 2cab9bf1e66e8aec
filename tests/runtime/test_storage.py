"""The tensors whose bytes can be swapped."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lmswap.runtime.storage import has_plain_storage

PLAIN = {
    "dense": lambda: torch.ones(4, 4),
    "a parameter": lambda: nn.Parameter(torch.ones(4)),
    "a view": lambda: torch.ones(4, 4).t()[1:],
    "bfloat16": lambda: torch.ones(4, dtype=torch.bfloat16),
    "made in inference mode": torch.inference_mode()(lambda: torch.ones(4)),
    "conjugated and resolved": lambda: torch.ones(4, dtype=torch.cfloat).conj().resolve_conj(),
}
OTHERS = {
    "zeros without memory": lambda: torch._efficientzerotensor((4,)),
    "conjugated": lambda: torch.ones(4, dtype=torch.cfloat).conj(),
    "negated": lambda: torch.ones(4, dtype=torch.cfloat).conj().imag,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse by rows": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(4, device="meta"),
    "of two tensors": lambda: TwoTensor(torch.ones(4), torch.ones(4)),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_dense_tensors_have_plain_storage_whatever_view_they_are(kind):
    assert has_plain_storage(PLAIN[kind]())


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse|quantize)")
@pytest.mark.parametrize("kind", OTHERS)
def test_tensors_whose_values_are_not_their_storages_bytes_have_none(kind):
    with torch.device("cpu"):  # kinds of which a GPU has not all
        assert not has_plain_storage(OTHERS[kind]())


@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad", "is_grads_batched"])
def test_transform_wrappers_have_a_storage_only_outside_the_transform(transform):
    seen = []

    def look(x):
        seen.append(has_plain_storage(x))
        return x.square().sum()

    x = torch.ones(4, requires_grad=True)
    if transform == "vmap":
        torch.func.vmap(look)(x.expand(3, 4))
    elif transform == "jvp":
        torch.func.jvp(look, (x,), (x,))
    elif transform == "grad":
        torch.func.grad(look)(x)
    else:
        y = x * 2
        y.register_hook(lambda gradient: seen.append(has_plain_storage(gradient)))
        torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)
    assert seen == [False]
    assert has_plain_storage(x)
