"""The options of `lmswap.enable`, validated before anything starts."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from lmswap.errors import OptionError
from lmswap.ir.bytesize import AUTO, SHARE, parse_budget, parse_bytes, parse_share, unit_of
from lmswap.ir.emulation import EmulatedLink
from lmswap.planner import check_policy

TIERS = ("auto", "host", "disk", "compressed", "device", "peer")
COMPILERS = ("fx", "inductor", "eager")
WEIGHTS = ("auto", "keep", "swap")
NEEDS_GRAPHS = ("recompute",)  # policies

always_verify = False  # set by `lmswap verify`, which overrides the script


@dataclass(frozen=True)
class Options:
    """The checked arguments of `lmswap.enable`.

    ``budget_bytes`` None stands for "auto", or for ``budget_share`` of a step's unplanned peak; ``host_budget_bytes``
    None is no limit. ``peer`` is the requested GPU: "cuda:1" if ``tier`` was given as "peer:1".
    """

    budget_bytes: int | None
    budget_share: float | None
    host_budget_bytes: int | None
    policy: str
    tier: str
    peer: str | None
    compiler: str
    min_swap_bytes: int
    verify: bool
    wipe: bool
    disk_directory: str | None
    link: EmulatedLink | None
    plan: str | None = None  # the file to follow
    together: bool = True
    weights: str = "auto"
    budget_unit: tuple[str, int] = ("MiB", 2**20)  # of the budget as given, for messages on it

    @property
    def swap_limits(self) -> dict[str, Any]:
        """The limits of swapping that plans are searched, priced and checked by: tier and least bytes of a buffer."""
        return {"tier": self.tier, "min_swap_bytes": self.min_swap_bytes}

    @staticmethod
    def parse(
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
    ) -> Options:
        """Validate every argument.

        Raises:
            OptionError: an unknown name or a byte count that cannot be read; states which, and what would be valid.
        """
        tier, peer = _tier_and_peer(tier)
        check_names(policy, tier, compiler)
        check_weights(weights, compiler, tier)
        for name, given in (("verify", verify), ("wipe", wipe), ("together", together)):
            if not isinstance(given, bool):
                raise OptionError(f"{name} must be True or False, not {given!r}")
        if disk_directory is not None and not isinstance(disk_directory, (str, PathLike)):
            raise OptionError(f"disk_directory must be a path, not {disk_directory!r}")
        if disk_directory is not None and tier not in ("auto", "disk"):  # "auto" is the disk for some devices
            raise OptionError(
                f"disk_directory has no effect with tier='{tier}', which has no files: leave one of them out"
            )
        if link is not None and not isinstance(link, (str, EmulatedLink)):
            raise OptionError(f'link must be a string such as "11.7GB/s", or an EmulatedLink, not {link!r}')
        if plan is not None and not isinstance(plan, (str, PathLike)):
            raise OptionError(f"plan must be the path of a file that lmswap.save_plan wrote, not {plan!r}")
        budget_bytes, budget_share = _budget(budget)
        if tier == "device" and plan is None and (link is None or budget_bytes is None):
            raise OptionError(
                "tier='device' keeps swapped tensors on the device itself, which saves no memory: it stands in for a "
                "faster link, so it needs link=..., and a budget in bytes beside which there is memory to spare"
            )
        return Options(
            budget_bytes=budget_bytes,
            budget_share=budget_share,
            host_budget_bytes=None if host_budget is None else parse_budget(host_budget, what="host_budget"),
            policy=policy,
            tier=tier,
            peer=peer,
            compiler=compiler,
            min_swap_bytes=parse_bytes(min_swap_bytes, what="min_swap_bytes"),
            verify=verify or always_verify,
            wipe=wipe,
            disk_directory=None if disk_directory is None else fspath(disk_directory),
            link=EmulatedLink.parse(link) if isinstance(link, str) else link,
            plan=None if plan is None else fspath(plan),
            together=together,
            weights=weights,
            budget_unit=unit_of(budget),
        )

    @staticmethod
    def from_mapping(options: Mapping[str, Any]) -> Options:
        """Validate the ``options`` of ``torch.compile(model, backend="lmswap", options=...)``: the same names.

        Raises:
            OptionError: as `parse`, or a name that `lmswap.enable` does not have.
        """
        refuse_unknown(options)
        return Options.parse(**options)


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise OptionError if one of the names is no option; suggest the one that may have been meant."""
    known = list(inspect.signature(Options.parse).parameters)
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"lmswap has {', '.join(known)}"
        raise OptionError(f"unknown option {name!r}; {hint}")


def _budget(budget: float | str) -> tuple[int | None, float | None]:
    """Return bytes, or a share; neither for "auto"."""
    if budget == "auto":
        return None, None
    share = parse_share(budget, of="what the step's tensors take unplanned") if isinstance(budget, str) else None
    return (parse_budget(budget, also=(AUTO, SHARE)), None) if share is None else (None, share)


def _tier_and_peer(tier: str) -> tuple[str, str | None]:
    name, colon, number = tier.partition(":") if isinstance(tier, str) else (tier, "", "")
    if name == "peer" and colon:
        if not number.isdecimal():
            raise OptionError(f"tier {tier!r} names no GPU; write its number as torch counts, such as 'peer:1'")
        return name, f"cuda:{int(number)}"
    return tier, None


def check_names(policy: str, tier: str, compiler: str) -> None:
    """Raise OptionError if one of them is unknown, or if they exclude each other."""
    check_policy(policy)
    _one_of("tier", tier, TIERS)
    _one_of("compiler", compiler, COMPILERS)
    if compiler == "eager" and policy in NEEDS_GRAPHS:
        raise OptionError(f"policy '{policy}' recomputes tensors, which needs graphs; compiler='eager' has none")


def check_weights(weights: str, compiler: str, tier: str) -> None:
    """Raise OptionError if ``weights`` is unknown, or excludes one of the others."""
    _one_of("weights", weights, WEIGHTS)
    if weights == "swap" and (compiler != "fx" or tier not in ("auto", "host", "disk")):
        raise OptionError(
            f"weights='swap' needs compiler='fx', whose graphs fetch weights, and a tier that the device reads in "
            f"place, 'host' or 'disk'; not compiler='{compiler}' and tier='{tier}'"
        )


def _one_of(what: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise OptionError(f"unknown {what} {given!r}; known are {', '.join(known)}")
