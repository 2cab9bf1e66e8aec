"""Private names of torch: `lmswap.torch_compat` alone uses them, and the installed torch has them."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lmswap
from lmswap.torch_compat import autograd, data_loaders, modules, tensors, versions

PACKAGE = Path(lmswap.__file__).parent
NUMERICS = sorted((PACKAGE / "capture" / "numerics").glob("[!_]*.py"))
COMPAT = sorted((PACKAGE / "torch_compat").glob("*.py"))
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if path not in COMPAT)
ALLOWED = {
    **dict.fromkeys(("_asdict", "_replace", "_fields"), "public methods of named tuples"),
    **dict.fromkeys(("_getframe", "_current_frames", "_exit"), "public functions of sys and os"),
    "_SubParsersAction": "argparse's, the only name of the type that add_subparsers returns",
    **dict.fromkeys(("_batches_that_stepped", "_logger_connector"), "Lightning's, as its own loggers number steps"),
}


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def dotted(node):
    """Return the names in ``a.b.c``, or nothing for another expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*inner, node.attr] if inner else []


def own_attributes(trees):
    """Return the private attributes of classes and instances that the code of ``trees`` defines, and its submodules."""
    own = {path.stem for path in [*PACKAGE.rglob("_*.py"), *PACKAGE.rglob("_*.pyi")]}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    targets = getattr(part, "targets", [getattr(part, "target", None)])
                    own.update([part.name] if hasattr(part, "name") else [])
                    own.update(name.id for target in targets if target for name in ast.walk(target) if dotted(name)[:1])
            is_own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_own and dotted(node.value) in (["self"], ["cls"]):
                own.add(node.attr)
    return own


def private_names(tree, own):
    """Yield line and name of each private name of a library that the code of ``tree`` uses."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and dotted(node)[:2] != ["torch", "ops"] and dotted(node)[:1] != ["_ATEN"]:
            names = [node.attr] if node.attr not in own | ALLOWED.keys() else []
        elif isinstance(node, ast.Call) and dotted(node.func)[-1:] in (["getattr"], ["hasattr"], ["attrgetter"]):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            names = [name for name in names if name not in own]
        yield from ((node.lineno, name) for name in names if any(map(is_private, name.split("."))))


def missing_names(tree):
    """Yield the names that the code of ``tree`` imports from torch, or reads of such, and that torch lacks."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name: importlib.import_module(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            try:
                module = importlib.import_module(node.module)
            except ImportError:
                yield node.module
                continue
            for alias in node.names:
                try:
                    found = getattr(module, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
                    imported[alias.asname or alias.name] = found
                except ImportError:
                    if not hasattr(module, alias.name):
                        yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        first, *rest = (dotted(node) if isinstance(node, ast.Attribute) else []) or [""]
        if first not in imported or (rest[-1].startswith("_cuda_") and not torch.backends.cuda.is_built()):
            continue
        value = imported[first]
        for name in rest:
            if not hasattr(value, name):
                yield ".".join([first, *rest])
                break
            value = getattr(value, name)


def test_private_names_of_torch_are_used_in_one_package_only():
    trees = {path: ast.parse(path.read_text()) for path in OTHERS}
    own = own_attributes(trees.values())
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in private_names(tree, own)
    ]
    assert not found, "private names of torch belong into lmswap/torch_compat:\n" + "\n".join(found)


@pytest.mark.parametrize("path", NUMERICS, ids=lambda path: path.stem)
def test_each_workaround_names_torch_version_and_upstream_issue(path):
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    assert re.search(r"torch 2\.\d+", text)
    assert re.search(r"(pytorch|[\w-]+/[\w-]+)#\d+|no upstream issue known", text)


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: path.stem)
def test_the_installed_torch_has_each_name_that_is_used(path):
    missing = sorted(set(missing_names(ast.parse(path.read_text()))))
    assert not missing, (
        f"torch {torch.__version__} lacks {missing}, which lmswap/torch_compat/{path.name} uses; this lmswap is "
        f"tested with torch {versions.tested_versions()}"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree",
        "import torch\ntorch._C._dispatch_keys(x)",
        "tensor.untyped_storage()._cdata",
        'getattr(op, "_schema", None)',
        "model._call_impl()",
    ],
)
def test_a_private_name_elsewhere_is_found(code):
    assert list(private_names(ast.parse(code), set()))


@pytest.mark.parametrize(
    "code", ["torch.ops.aten._unsafe_view(x)", "self._own", "point._replace(x=1)", "import torch.nn", "x.__dict__"]
)
def test_other_names_are_not_taken_for_private_ones_of_torch(code):
    assert not list(private_names(ast.parse(code), {"_own"}))


@pytest.mark.parametrize(
    "code",
    [
        "from torch._functorch.gone import aot",
        "from torch._functorch.aot_autograd import gone",
        "import torch\ntorch._C._gone()",
        "from torch._dynamo import config\nconfig.gone",
    ],
)
def test_a_name_that_torch_lacks_is_found(code):
    (missing,) = set(missing_names(ast.parse(code)))
    assert "gone" in missing


def test_private_attributes_exist_and_have_their_assumed_meaning():
    x, layer = torch.ones(2, requires_grad=True), nn.Linear(2, 2)
    y = x * 2
    storage = y.untyped_storage()
    assert tensors.storage_id(storage) == tensors.storage_id(y.view(1, 2).untyped_storage())
    assert tensors.storage_id(storage) != tensors.storage_id(y.clone().untyped_storage())
    assert tensors.tensor_id(x) != tensors.tensor_id(y)
    assert tensors.storage_use_count(tensors.storage_id(storage)) >= 1
    z = y.detach().clone()
    before = tensors.version_of(z)
    assert tensors.version_of(z.add_(1)) == before + 1
    assert autograd.sequence_number((y * 2).grad_fn) > autograd.sequence_number(y.grad_fn)
    assert not autograd.hooks_before_accumulation(x) and not autograd.hooks_after_accumulation(x)
    x.register_hook(lambda gradient: gradient)
    assert autograd.hooks_before_accumulation(x) and not autograd.hooks_after_accumulation(x)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert autograd.hooks_after_accumulation(layer.weight) and not autograd.hooks_before_accumulation(layer.weight)
    assert [list(held) for held in modules.own_tensors(layer)] == [["weight", "bias"], []]
    iterator = iter(DataLoader([1, 2]))
    next(iterator)
    assert data_loaders.num_yielded(iterator) == 1


def test_a_weak_reference_to_a_storage_expires_with_it():
    x = torch.ones(2)
    reference = tensors.weak_storage(x.untyped_storage())
    assert not tensors.is_expired(reference)
    del x
    assert tensors.is_expired(reference)
    tensors.free_weak_storage(reference)


def test_hooks_of_all_modules_are_numbered():
    before = modules.global_module_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert len(modules.global_module_hooks()) == len(before) + 1
    handle.remove()
    assert modules.global_module_hooks() == before
