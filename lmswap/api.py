"""The public API: enable, disable, report, explain, program, dry_run, save_plan, and the torch.compile backend."""

from __future__ import annotations

import atexit
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Never, TypeVar

import torch
from torch import fx, nn

from lmswap.call_monitor import CALL_MONITOR
from lmswap.capture.dry_run import capture_step
from lmswap.dispatch import ModelCall
from lmswap.errors import NotManaged, OptionError, UntestedTorch, not_enabled, without_path
from lmswap.hardware.device import default_device
from lmswap.hardware.mkl_init import initialize_mkl
from lmswap.ir.emulation import EmulatedLink
from lmswap.ir.program import Program
from lmswap.log_output import set_up_logging
from lmswap.module_checks import (
    alive_parameters,
    check_apart,
    check_has_values,
    check_module,
    check_swappable,
    list_optimizers,
    one_device,
    parameters_of,
    target_device,
)
from lmswap.options import Options, refuse_unknown
from lmswap.reporting import Explanation, Report, make_explanation
from lmswap.runtime.ops import find_engine
from lmswap.session.diagnostics import warn
from lmswap.session.out_of_memory import explain_out_of_memory
from lmswap.session.planned_step import PlannedStep
from lmswap.session.session import Session
from lmswap.session.snapshot import snapshot
from lmswap.torch_compat.dynamo import OptimizedModule, backend_of, isolate_traces, running_backend
from lmswap.torch_compat.modules import compiled_call, named_buffers, named_parameters, set_compiled_call
from lmswap.torch_compat.versions import take_untested_notice
from lmswap.training_state import TrainingState
from lmswap.training_state.cpu_update_trial import check_updates_on_cpu
from lmswap.training_state.optimizer_trial import why_updates_are_whole
from lmswap.verify.summary import Verified

ModuleT = TypeVar("ModuleT", bound=nn.Module)

set_up_logging()
initialize_mkl()  # the package does so itself only if torch was imported before it

_sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
_compiled: weakref.WeakKeyDictionary[object, Session] = weakref.WeakKeyDictionary()  # by `running_backend`
_verified: list[Verified] = []  # of all sessions of the process


def enable(
    model: ModuleT,
    budget: float | str = "auto",
    *,
    host_budget: float | str | None = None,
    policy: str = "auto",
    tier: str = "auto",
    compiler: str = "fx",
    min_swap_bytes: int | str = 2**20,
    verify: bool = False,
    wipe: bool = False,
    disk_directory: str | PathLike[str] | None = None,
    link: str | EmulatedLink | None = None,
    plan: str | PathLike[str] | None = None,
    together: bool = True,
    weights: str = "auto",
    device: str | torch.device | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    optimizer_device: str | None = None,
    **unknown: Never,
) -> ModuleT:
    """Make ``model`` train within a byte budget; the training loop stays as it was.

    On CUDA the budget bounds what torch reserves on the device; on the CPU, what the process's resident memory grows
    by from this call on. The first call with inputs of new shapes captures, plans and compiles.

    Examples:
        >>> model = lmswap.enable(model, budget="6GiB")

    Args:
        model: the module to train, with all parameters on one device, CPU or CUDA.
        budget: bytes, a string with a unit ("6GiB", "800 MB"), "auto": 90 % of what is free now, or a share, "50%", of
            the unplanned peak of the largest step so far, plus all else that counts; at most "auto".
        host_budget: what swapped tensors may occupy in their tier, compressed if it compresses, in bytes or as a
            string; None: the tier's capacity.
        policy: "auto" (keep, swap or recompute, whatever is fastest); "swap" or "recompute" (only that); for
            comparisons: "none", "swap_all", "tflms".
        tier: where swapped tensors go: "host" (pinned memory), "disk", or "auto": host for CUDA, disk for the CPU.
            "compressed": host memory that holds them losslessly compressed; on the CPU in addition to ``budget``.
            "device", only with ``link``: the GPU's own spare memory, not counted by torch, to emulate a link that
            is faster than the real one; copies then also take bandwidth of the GPU's memory. "peer": spare memory of
            another visible GPU, the one with the fastest copies, or a given one, "peer:1".
        compiler: what runs the graphs; "fx" is generated Python code that calls torch's own operators, "inductor"
            (experimental) is torch.compile's own compiler with the layouts as traced (it fuses operators: a copy that
            splits a fused reduction can change the last bits of it, predicted memory is that of the unfused operators,
            and random operators are never recomputed). "eager"
            has no graphs: the model runs as it is, and saved-tensor hooks swap by a plan made from a recording of the
            first step, in which everything is swapped; nothing can be recomputed. The other two fall back to it when
            torch.compile captures nothing of the model, or when ops outside of its graphs save tensors of at least
            ``min_swap_bytes``; the report's notes state the reason.
        min_swap_bytes: smaller buffers are not swapped.
        verify: a check of swapping itself, slower and beyond the budget: runs every graph also without swaps, compares
            outputs and gradients bitwise, checksums every copy at both ends, and fills released memory with NaN.
        wipe: swap files, host memory and memory of another GPU are overwritten with zeros when their bytes are no
            longer needed, at the latest when the model is disabled or the interpreter exits. Not guaranteed: a killed
            process leaves the blocks of its (unlinked) file as they are, and a disk may keep old copies of overwritten
            blocks (remapping of SSDs, snapshots, file systems that copy on write). Tensors of torch are not wiped.
        disk_directory: where the disk tier puts its (unlinked) file; default: a directory on a real disk.
        link: an emulated link; copies are paced to it instead of running at full speed: "11.7GB/s" each way,
            "11.7GB/s out, 10.9GB/s in", "pcie3", "pcie4", "pcie5", "nvlink2", "c2c", or an `EmulatedLink`. Plans are
            made for it, and reports state that it was emulated.
        plan: a file that `save_plan` wrote. Its plans are followed, without planning or replanning; budget, policy,
            tier, compiler, min_swap_bytes and link are the file's.
        together: with several processes of torchrun on this machine and torch.distributed initialized, they measure
            and plan together: all of them must then enable a model at this point, or each with ``together=False``.
            No collective is issued.
        weights: "swap" lets plans place frozen parameters, too, and trained ones with ``optimizer``: those of at least
            ``min_swap_bytes`` that no longer fit are non-resident, and are copied in when a graph reads them; a call
            without gradients is then captured and planned as well, with all parameters. On a CPU the budget then counts
            the parameters. "keep": parameters stay on the device. "auto": on a GPU "swap", as soon as a step does not
            fit otherwise; on a CPU "swap" with ``optimizer``, else "keep".
        device: move the model there, a GPU, from the CPU: it may be larger than the device. Parameters of at least
            ``min_swap_bytes`` go to host memory that the device reads, and ``weights`` is "swap".
        optimizer: one, or several. Where a step does not fit otherwise, or is faster so, their state, parameters and
            gradients are non-resident between their steps; each copies them in and out, a few parameters at a time.
            Where an update does not give the same bits parameter by parameter, which is tried on small copies, all
            stay resident, with a warning (LBFGS).
        optimizer_device: "cpu" updates parameters on the CPU instead, where the optimizer's state then stays, with the
            bits of the CPU: for steps on a GPU that are too small to hide copies of the state. Gradients are copied out
            as they are computed, and resident parameters out and in.
        **unknown: refused; the error suggests the option that may have been meant.

    Returns:
        ``model`` itself.

    Raises:
        OptionError: an argument cannot be read or is not available on this device, or a module inside of ``model``, or
            around it, is enabled.
        TierError: the tier's memory or directory cannot be used.
        DriverError: the device, or the other GPU, cannot be used.
        PlanMismatch: ``plan`` is for another device or, raised by the first call of the model, for another step.
        RankMissing: another process of this machine does not enable a model, within the time that the store of
            torch.distributed waits (5 minutes by default).
        PlanInfeasible: raised by the first call of the model, before any op has run: no plan fits the budget; with
            saved-tensor hooks by the second call, as they know the step only at its end.
    """
    try:
        refuse_unknown(unknown)
        options = Options.parse(
            budget,
            host_budget=host_budget,
            policy=policy,
            tier=tier,
            compiler=compiler,
            min_swap_bytes=min_swap_bytes,
            verify=verify,
            wipe=wipe,
            disk_directory=disk_directory,
            link=link,
            plan=plan,
            together=together,
            weights=weights,
        )
    except OptionError as error:
        raise error.with_traceback(None) from None  # the frames of the parser are of no use to the caller
    check_module(model)
    if (notice := take_untested_notice()) is not None:
        warn(notice, UntestedTorch)
    _collect_unreferenced()
    check_apart(model, _sessions.keyrefs())  # keyrefs: a list, as other threads may enable models meanwhile
    parameters = parameters_of(model)
    check_has_values(model)
    optimizers = list_optimizers(optimizer, parameters, type(model).__name__)
    lies_on = one_device([*parameters, *model.buffers()])
    target = target_device(device, lies_on, options)
    if target != lies_on:
        options = replace(options, weights="swap")
    if options.weights == "swap":
        check_swappable(parameters, type(model).__name__)
    if optimizer_device is not None:
        check_updates_on_cpu(optimizer_device, optimizers, target)
    disable(model)
    if any(session.updates.are_of(each) for session in sessions() for each in optimizers):
        raise OptionError("optimizer=: another enabled model has it; leave it out here, or train both as one module")
    on_cpu = optimizer_device is not None
    whole = {each: why for each in optimizers if not on_cpu and (why := why_updates_are_whole(each)) is not None}
    in_chunks = [each for each in optimizers if each not in whole]
    reference: weakref.ref[nn.Module] = weakref.ref(model)
    state = TrainingState(partial(named_parameters, reference), partial(named_buffers, reference), in_chunks, on_cpu)
    session = _make_session(type(model).__name__, options, target, state, has_hooks=True)
    if target != lies_on:
        try:
            session.load(model)
        except BaseException:
            session.close()
            raise
    for each, why in whole.items():
        sentence = f"optimizer={type(each).__name__}: its state, and what it updates, stay resident: {why}"
        warn(sentence, NotManaged)
        session.notes.append(sentence)
    _guard_compile()
    if (given := compiled_call(model)) is not None:
        session.notes.append(
            f"what {session.name}.compile() made does not run while the model is enabled; lmswap.disable restores it"
        )
    set_compiled_call(model, ModelCall(model, session, instead_of=given))
    _sessions[model] = session
    CALL_MONITOR.add(model, session.name, session.recorder)
    if target.type == "cuda":
        explain_out_of_memory(_idle_sessions)
    session.close_with(model)
    return model


def disable(model: nn.Module) -> None:
    """Restore ``model`` as it was before `enable` and free its host memory and files; no effect if not enabled.

    Swapped weights become resident; of those that cannot, it warns: the device has no room, or something beside the
    model holds their memory.

    Args:
        model: an enabled model, or a module made by ``torch.compile(backend="lmswap")``, which cannot be called
            afterwards; the module inside it can.
    """
    session = _find_session(model)
    if session is None:
        return
    if model in _sessions:
        del _sessions[model]
        _restore_call(model)
    CALL_MONITOR.discard(model)
    try:
        session.restore()
    finally:
        session.close()
    del session
    Session.collect_closed()


def _collect_unreferenced() -> None:
    """Free what nothing refers to but cycles: the memory of such models would count as in use."""
    if _sessions:
        gc.collect()
    Session.collect_closed()


def _restore_call(model: nn.Module) -> None:
    if isinstance(call := compiled_call(model), ModelCall):
        set_compiled_call(model, call.instead_of)
        call.close()


def is_enabled(model: nn.Module) -> bool:
    """Whether ``model`` is enabled; for the callbacks of trainers."""
    return model in _sessions


def report(model: nn.Module) -> Report:
    """Report what the last step of ``model`` moved, held and waited for, and what was predicted.

    The last step is the last that had a backward; if none had one, the last call.

    Args:
        model: an enabled model, or a module made by ``torch.compile(backend="lmswap")``.

    Returns:
        The report: figures as fields; ``str`` of it is a table.

    Raises:
        OptionError: the model is not enabled.
        ForkedProcess: it was enabled in the process that this one was forked from.
    """
    return snapshot(_session(model))


def least_budget(model: nn.Module) -> int:
    """Find the least budget that the last step of ``model`` can be planned in; takes about a second.

    Where the last call was refused with PlanInfeasible, that is the budget which the refusal names.

    One call of the model is enough, without a backward, if it was enabled with a budget beyond its needs ("auto", say).
    What a process holds differs by some MiB from start to start. A slightly smaller budget may suffice, too.

    Args:
        model: an enabled model, or a module made by ``torch.compile(backend="lmswap")``.

    Returns:
        The budget in bytes.

    Raises:
        OptionError: the model is not enabled, or nothing is planned yet.
        TierError: the tier has no room for what would have to be swapped.
    """
    session = _session(model)
    if (refusal := session.planning.refusal) is not None:
        return refusal.needed_bytes
    return session.streaming.least_budget(_planned(model))


def explain(model: nn.Module, *, all_buffers: bool = False) -> Explanation:
    """Explain the plan of ``model``'s step: each buffer's size, first and last op, decision and reason.

    The step is the one that `report` describes; if that followed no plan, the one that was planned last.

    Args:
        model: an enabled model, or a module made by ``torch.compile(backend="lmswap")``.
        all_buffers: print all buffers instead of the ten largest.

    Returns:
        The explanation: figures as fields; ``str`` of it is a table.

    Raises:
        OptionError: the model is not enabled, or nothing is planned yet.
    """
    step = _planned(model)
    session = _session(model)
    return make_explanation(
        step.merged.program,
        step.plan,
        policy=session.options.policy,
        plan_notes=session.plan_notes,
        free_seconds=step.costs.free_seconds,
        all_buffers=all_buffers,
    )


def program(model: nn.Module) -> Program:
    """Return the captured step of ``model`` as a program.

    It is the step of `explain`, with the memory outside of it that its budget counts, as `lmswap plan` counts it.

    Args:
        model: an enabled model, or a module made by ``torch.compile(backend="lmswap")``.

    Returns:
        Ops and buffers, with JSON (`Program.to_json`) and graph (`Program.to_networkx`) forms.

    Raises:
        OptionError: the model is not enabled, or nothing is planned yet.
    """
    return _session(model).plans.described(_planned(model))


def dry_run(
    make_model: Callable[[], nn.Module],
    *inputs: Any,
    device: str | torch.device | None = None,
    forward_only: bool = False,
) -> Program:
    """Capture a step without the memory of its model: no op runs, and no tensor has bytes.

    The program is the one that `program` returns after the first step of the same model, up to what only measurements
    show: strides that torch traces wrongly, scratch memory, and ops whose results differ from run to run. Its budget
    counts the model, but no optimizer state and no margin.

    Examples:
        >>> program = lmswap.dry_run(lambda: Llama(layers=48), torch.empty(2, 4096, dtype=torch.long, device="meta"))

    Args:
        make_model: returns the model, and is called with torch's fake tensors. A model that returns its loss has the
            loss in the program; else the loss takes what `enable` assumes: three fp32 tensors of the outputs' size.
        *inputs: the model's arguments; of tensors only shape, strides and dtype count.
        device: where the model runs, as operators differ by device; None: a GPU if torch can use one, else the CPU.
        forward_only: capture a forward in eval mode without gradients, not a training step.

    Returns:
        The program; ``gradients`` has the parameters that are trained, by their names in ``buffers``.

    Raises:
        OptionError: no module is made, or torch cannot use the device.
        CaptureError: the model's code needs values, or saves large tensors outside of captured graphs.
    """
    device = default_device() if device is None else torch.device(device)
    return capture_step(make_model, inputs, device, forward_only=forward_only)


def save_plan(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the plans that ``model`` follows now to a JSON file, for ``enable(model, plan=path)`` and for people.

    It holds each step that was planned: shapes, train and eval. Save after the fifth step, when a plan is final.

    Args:
        model: an enabled model, or a module made by ``torch.compile(backend="lmswap")``.
        path: the file to write.

    Raises:
        OptionError: the model is not enabled, nothing is planned yet, or the file cannot be written.
    """
    _planned(model)
    try:
        Path(path).write_text(_session(model).pinned().to_json(), encoding="utf-8")
    except (OSError, ValueError) as error:  # a path with NUL is a ValueError
        raise OptionError(f"cannot write plan '{path}': {without_path(error)}") from error


def sessions() -> tuple[Session, ...]:
    """Return the sessions of all models that are enabled now, for the profiler."""
    return (*_sessions.values(), *(session for session in _compiled.values() if session.is_open))


def _idle_sessions() -> Iterator[Session]:
    """Yield the sessions of enabled models of which no call is under way in this thread."""
    for model, session in [*_sessions.items()]:
        if not (isinstance(call := compiled_call(model), ModelCall) and call.is_running):
            yield session


def verified() -> tuple[Verified, ...]:
    """Return the verification of every model that this process enabled with ``verify=True``, in order."""
    return tuple(_verified)


def compile_backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph: the backend of ``torch.compile(model, backend="lmswap", options={"budget": "6GiB"})``.

    `report`, `explain`, `program` and `disable` accept the compiled module.

    Args:
        module: the graph that Dynamo captured.
        inputs: its inputs.
        options: the arguments of `enable`.

    Returns:
        The function that runs instead of the graph.
    """
    backend = running_backend()
    if backend is None:
        raise OptionError('the backend of lmswap is called by torch.compile(model, backend="lmswap") only')
    session = _compiled.get(backend)
    if session is None:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        parsed = Options.from_mapping(options or {})
        if parsed.weights == "swap":
            raise OptionError("weights='swap' needs lmswap.enable(model, ...), which knows the model's parameters")
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        session = _make_session(
            "compiled model",
            parsed,
            one_device(tensors),
            TrainingState(partial(alive_parameters, [weakref.ref(parameter) for parameter in parameters])),
            has_hooks=False,
        )
        isolate_traces(backend)
        session.evict_with(backend)
        _compiled[backend] = session
    if not session.is_open:
        return partial(_refuse_closed, session.engine.number)  # holds no session, as nothing evicts its trace
    return session(module, inputs)


def _refuse_closed(engine: int, *_: object) -> None:
    find_engine(engine)


def _make_session(
    name: str, options: Options, device: torch.device, state: TrainingState, *, has_hooks: bool
) -> Session:
    session = Session(name, options, device, state, has_hooks=has_hooks)
    if session.verified is not None:
        _verified.append(session.verified)
    return session


def _guard_compile() -> None:
    """Make ``model.compile()`` refuse enabled models from now on: it would silently replace lmswap."""
    compile_in_place = nn.Module.compile
    if getattr(compile_in_place, "refuses_enabled", False):
        return

    @functools.wraps(compile_in_place)
    def compile_or_refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self in _sessions:
            raise OptionError(
                f"{type(self).__name__} is enabled, and what compile() makes would run instead of it: take "
                "lmswap.enable(model, compiler='inductor') for compiled graphs, or call lmswap.disable(model) first"
            )
        compile_in_place(self, *args, **kwargs)

    compile_or_refuse.refuses_enabled = True  # type: ignore[attr-defined]
    nn.Module.compile = compile_or_refuse  # type: ignore[method-assign]


@atexit.register
def _close_all() -> None:
    """Close all sessions at the interpreter's exit, also after an exception: files and memory may have to be wiped."""
    for session in sessions():
        session.close()


def _session(model: nn.Module) -> Session:
    session = _find_session(model)
    if session is None:
        name = type(model).__name__
        inside = next((path for path, module in model.named_modules() if module in _sessions), None)
        if inside is not None:
            raise OptionError(f"{name} is not enabled, its module '{inside}' is: pass that")
        raise not_enabled(model)
    session.check_caller()
    return session


def _find_session(model: nn.Module) -> Session | None:
    if not isinstance(model, OptimizedModule):
        return _sessions.get(model)
    backend = backend_of(model)
    session = _compiled.get(backend) if backend is not None else None
    return session if session is not None and session.is_open else None


def _planned(model: nn.Module) -> PlannedStep:
    session = _session(model)
    step = session.current_step() or session.plans.newest()
    if step is None:
        raise OptionError(
            "nothing is planned yet: the first call of the model captures and plans its step; one that is served by "
            "saved-tensor hooks is planned by the second call, if it saved tensors of at least min_swap_bytes"
        )
    return step
