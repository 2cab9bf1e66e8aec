"""Handler for training under a byte budget with MONAI, in a script or in a bundle's configuration."""

from __future__ import annotations

from typing import Any

from ignite.engine import Engine, Events
from torch import nn

from lmswap.errors import OptionError
from lmswap.integrations.training import ManagedTraining
from lmswap.reporting import Report


class LmswapHandler:
    """Keeps the network of a `SupervisedTrainer` within a byte budget while it runs; put it first among the handlers.

    The network is enabled when the run starts, and disabled when it completes, terminates, or fails. After each epoch
    the figures of `Report.metrics` are in ``engine.state.metrics``, from where MONAI's handlers for statistics,
    TensorBoard and others read them. Ignite calls handlers of an exception only up to the first that raises it again,
    as MONAI's and this one do: after such a handler it would leave the network enabled.

    Examples:
        >>> SupervisedTrainer(..., train_handlers=[LmswapHandler("6GiB"), StatsHandler(), TensorBoardStatsHandler()])
    """

    def __init__(self, budget: int | str = "auto", **options: Any) -> None:
        """Take the arguments of `lmswap.enable`; ``optimizer=True`` stands for that of the trainer.

        Raises:
            OptionError: an argument cannot be read.
        """
        self._training = ManagedTraining(budget, options)

    @property
    def report(self) -> Report:
        """The report of the run under way, or the last one at its end; an `OptionError` before the first."""
        return self._training.report()

    def attach(self, engine: Engine) -> None:
        """Attach to the trainer, which calls it."""
        engine.add_event_handler(Events.STARTED, self._started)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._iteration_completed)
        engine.add_event_handler(Events.COMPLETED, self._completed)
        engine.add_event_handler(Events.TERMINATE, self._completed)
        engine.add_event_handler(Events.EXCEPTION_RAISED, self._exception_raised)

    def _started(self, engine: Engine) -> None:
        network = getattr(engine, "network", None)
        if not isinstance(network, nn.Module):
            raise OptionError(
                f"{type(engine).__name__} has no attribute `network`, as a SupervisedTrainer has; call lmswap.enable "
                "on the trained module before it runs"
            )
        optimizer = getattr(engine, "optimizer", None)  # an evaluator has none
        self._training.begin(network, [] if optimizer is None else [optimizer])

    def _iteration_completed(self, engine: Engine) -> None:
        # At the last iteration: before any handler reads the metrics, in whatever order they were attached.
        if engine.state.iteration % engine.state.epoch_length == 0:
            engine.state.metrics.update(self.report.metrics())

    def _completed(self, engine: Engine) -> None:
        self._training.end()

    def _exception_raised(self, engine: Engine, error: BaseException) -> None:
        self._training.abandon()
        raise error  # ignite would treat it as handled
