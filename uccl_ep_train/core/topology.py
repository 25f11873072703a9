"""`Topology`: the domains of a group, however they were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings.config import EpConfig


@dataclass(frozen=True)
class Topology:
    """The domains of a group.

    domain_of  domain of each group rank; ids are dense and ordered by their lowest rank
    members    group ranks of each domain, ascending; the index in it is the local rank

    Domains may differ in size and their ranks may interleave.
    """

    domain_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def from_domains(cls, ids: Sequence[int]) -> Topology:
        """From any domain id per rank; the ids are renumbered."""
        if len(ids) == 0:
            raise ConfigError("domains = (): allowed is an id per rank of the group")
        dense: dict[int, int] = {}
        domain_of = tuple(dense.setdefault(domain, len(dense)) for domain in ids)
        members = tuple(
            tuple(rank for rank, domain in enumerate(domain_of) if domain == wanted)
            for wanted in range(len(dense))
        )
        return cls(domain_of=domain_of, members=members)

    @classmethod
    def split(cls, num_ranks: int, domain_size: int) -> Topology:
        """Consecutive domains of `domain_size` ranks; the last may be smaller."""
        if num_ranks < 1 or domain_size < 1:
            raise ConfigError(
                f"domain_size = {domain_size} with {num_ranks} ranks: allowed is at least 1 of each"
            )
        return cls.from_domains([rank // domain_size for rank in range(num_ranks)])

    @classmethod
    def from_config(cls, config: EpConfig, num_ranks: int) -> Topology | None:
        """The domains that the configuration sets, or None: to be probed."""
        if config.network.domains is not None:
            if len(config.network.domains) != num_ranks:
                raise ConfigError(
                    f"domains = {config.network.domains}: allowed is an id for each of the {num_ranks} ranks"
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
