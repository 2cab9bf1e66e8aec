"""How does a MONAI trainer train under a byte budget? By a handler, in a script or in a bundle's configuration."""

from __future__ import annotations

from typing import Any

from ignite.engine import Engine, Events
from torch import nn

from lmswap.errors import OptionError
from lmswap.integrations.training import ManagedTraining
from lmswap.reporting import Report


class LmswapHandler:
    """Keeps the network of a `SupervisedTrainer` within a byte budget while it runs; put it first among the handlers.

    The network is enabled when the run starts, and given back when it is completed, terminated, or fails. After each
    epoch the figures of `Report.metrics` are in ``engine.state.metrics``, from where MONAI's handlers for statistics,
    TensorBoard and others take them. Ignite tells of an exception only the handlers up to the first that raises it
    again, as MONAI's do and this one: behind such a one it would leave the network enabled.

    Example:
        >>> SupervisedTrainer(..., train_handlers=[LmswapHandler("6GiB"), StatsHandler(), TensorBoardStatsHandler()])
    """

    def __init__(self, budget: int | str = "auto", **options: Any) -> None:
        """Takes the arguments of `lmswap.enable`.

        Raises:
            OptionError: an argument cannot be read.
        """
        self._training = ManagedTraining(budget, options)

    @property
    def report(self) -> Report:
        """Of the run under way, or of the last one as it ended; an `OptionError` before."""
        return self._training.report()

    def attach(self, engine: Engine) -> None:
        """Called by the trainer that the handler was given to."""
        engine.add_event_handler(Events.STARTED, self._started)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._iteration_completed)
        engine.add_event_handler(Events.COMPLETED, self._completed)
        engine.add_event_handler(Events.TERMINATE, self._completed)
        engine.add_event_handler(Events.EXCEPTION_RAISED, self._exception_raised)

    def _started(self, engine: Engine) -> None:
        network = getattr(engine, "network", None)
        if not isinstance(network, nn.Module):
            raise OptionError(
                f"{type(engine).__name__} has no attribute `network`, as a SupervisedTrainer has; enable what it "
                "trains by lmswap.enable before it runs"
            )
        self._training.begin(network)

    def _iteration_completed(self, engine: Engine) -> None:
        # The last of its epoch: before any handler can take the metrics, in whatever order they were attached.
        if engine.state.iteration % engine.state.epoch_length == 0:
            engine.state.metrics.update(self.report.metrics())

    def _completed(self, engine: Engine) -> None:
        self._training.end()

    def _exception_raised(self, engine: Engine, error: BaseException) -> None:
        self._training.abandon()
        raise error  # ignite would take it for handled
