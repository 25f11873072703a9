"""`Topology`: the domains of a group, however they were found."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from uccl_ep_train.common.shown import shown
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings.checks import integer
from uccl_ep_train.settings.config import EpConfig

_MOST_RANKS = 1 << 17
"""kMaxRanks of csrc/layout/words.h."""


@dataclass(frozen=True)
class Topology:
    """The domains of a group.

    domain_of  domain of each group rank; ids are dense and ordered by their lowest rank
    members    group ranks of each domain, ascending; the index in it is the local rank
    host_of    likewise the host of each rank, whose memory its ranks can share; (): not known yet

    Domains may differ in size and their ranks may interleave.
    """

    domain_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def from_domains(cls, ids: Sequence[Hashable]) -> Topology:
        """From any domain id per rank; the ids are renumbered. Raises ConfigError."""
        try:
            # Elements of a tensor differ from each other whatever their values.
            domain_of = _dense(ids.tolist() if hasattr(ids, "tolist") else ids)
        except TypeError:
            domain_of = ()
        if not domain_of:
            raise ConfigError(f"domains = {shown(ids)}: allowed is an id per rank of the group")
        members: list[list[int]] = [[] for _ in range(1 + max(domain_of))]
        for rank, domain in enumerate(domain_of):
            members[domain].append(rank)
        return cls(domain_of=domain_of, members=tuple(map(tuple, members)))

    def on_hosts(self, ids: Sequence[Hashable]) -> Topology:
        """With any host id per rank; the ids are renumbered."""
        return replace(self, host_of=_dense(ids))

    @classmethod
    def split(cls, num_ranks: int, domain_size: int) -> Topology:
        """Consecutive domains of `domain_size` ranks; the last may be smaller. Raises ConfigError."""
        num_ranks = checked_number("num_ranks", num_ranks, 1, _MOST_RANKS)
        domain_size = checked_number("domain_size", domain_size, 1, _MOST_RANKS)
        return cls.from_domains([rank // domain_size for rank in range(num_ranks)])

    @classmethod
    def from_config(cls, config: EpConfig, num_ranks: int) -> Topology | None:
        """The domains that the configuration sets, or None: to be probed."""
        if config.network.domains is not None:
            if len(config.network.domains) != num_ranks:
                raise ConfigError(
                    f"domains = {shown(config.network.domains)}: allowed is an id for each of the "
                    f"{num_ranks} ranks"
                )
            return cls.from_domains(config.network.domains)
        if config.network.domain_size is not None:
            return cls.split(num_ranks, config.network.domain_size)
        return None

    @property
    def num_ranks(self) -> int:
        return len(self.domain_of)

    @property
    def num_domains(self) -> int:
        return len(self.members)

    def local_rank(self, rank: int) -> int:
        """Index of a rank inside its domain."""
        return self.members[self.domain_of[rank]].index(rank)

    def rail(self, src: int, domain: int) -> int:
        """The group rank of `domain` that relays the rows of rank `src` of another domain."""
        ranks = self.members[domain]
        return ranks[self.local_rank(src) % len(ranks)]

    def __str__(self) -> str:
        domains = ", ".join("{" + ", ".join(map(str, ranks)) + "}" for ranks in self.members)
        return f"{self.num_ranks} ranks in {self.num_domains} domain(s): {domains}"


def checked_number(name: str, value: object, least: int, most: int) -> int:
    """Raises ConfigError."""
    try:
        return integer(least, most).check(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} = {shown(value)}: allowed is {least} .. {most}") from None


def _dense(ids: Sequence[Hashable]) -> tuple[int, ...]:
    """Numbers in place of ids: 0 for the first, 1 for the first that differs from it, ..."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(entry, len(numbers)) for entry in ids)
