"""A warning names a line of the user's, also from the threads in which autograd computes for GPUs."""

import _thread
import gc
import weakref
from pathlib import Path

import torch

import lmswap
from lmswap import user_frame
from lmswap.user_frame import is_users, users_frame
from tests.both_paths import Net, batch, swapping


def test_user_folders_may_have_the_names_of_torch_and_lmswap():
    assert is_users("/home/me/torch/train.py")
    assert is_users("/home/me/lmswap/train.py")
    assert not is_users(torch.nn.modules.conv.__file__)
    assert not is_users(user_frame.__file__)


def test_threads_without_user_code_name_the_line_of_the_main_thread():
    found = []
    names = {"users_frame": users_frame, "found": found}
    code = "def run(): found.append(users_frame().f_code.co_filename)"
    exec(compile(code, Path(torch.__file__).with_name("no_code_of_the_users.py"), "exec"), names)
    _thread.start_new_thread(names["run"], ())
    while not found:
        pass
    assert found == [__file__]


def test_a_step_under_hooks_keeps_no_local_of_the_calling_code_alive():
    model = swapping(Net(torch.tanh), "eager")
    data = batch()
    model(data).square().mean().backward()
    held = weakref.ref(data)
    del data
    gc.collect()
    assert held() is None
    lmswap.disable(model)
