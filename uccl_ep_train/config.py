"""`EpConfig`: everything a buffer can be told, with unit, range and reason per field.

The environment is not read here: `EpConfig.from_env` asks `env.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from uccl_ep_train.config_checks import (
    MAX_RANKS,
    MAX_TOKENS,
    FieldInfo,
    boolean,
    choice,
    hidden_size,
    info,
    integer,
    integers,
    number,
    optional,
    permutation,
)
from uccl_ep_train.config_transport import TransportConfig
from uccl_ep_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EpConfig(TransportConfig):
    """Configuration of one `Buffer`. Frozen; validated on construction. `config_transport.py` has the fields
    that say how rows travel between domains.

    Raises `ConfigError` naming the field, the value and what is allowed. `describe()` prints all values with
    their units and where each came from. Fields marked "ranks agree" there must be equal on all ranks of the
    group, which is checked when the buffer is created.
    """

    num_experts: int = field(
        metadata=info(
            "experts",
            "1 .. 2^20, divisible by the number of ranks",
            "experts of the whole group; expert e belongs to group rank e // (num_experts / ranks)",
            integer(1, 1 << 20),
        )
    )
    hidden: int = field(
        metadata=info(
            "elements",
            "a multiple of 128, 128 .. 131072",
            "largest row length used on this buffer; slots are sized for it",
            hidden_size,
        )
    )
    dispatch_dtype: str = field(
        default="fp8",
        metadata=info(
            "",
            "'fp8' | 'bf16'",
            "fp8: BF16 rows are quantised on the wire (FP32 rows are refused); bf16: rows travel unquantised",
            choice("fp8", "bf16"),
        ),
    )
    grad_dtype: str = field(
        default="bf16",
        metadata=info(
            "",
            "'bf16' | 'fp8'",
            "wire dtype of combine's backward, a dispatch of gradients; bf16: gradients travel unquantised",
            choice("bf16", "fp8"),
        ),
    )
    combine_wire_dtype: str = field(
        default="bf16",
        metadata=info(
            "",
            "'bf16' | 'fp32' (fp32 needs max_dtype='fp32')",
            "dtype of BF16 partial sums between hops; fp32: no rounding before the last sum",
            choice("bf16", "fp32"),
        ),
    )
    fp8_scale: str = field(
        default="pow2",
        metadata=info(
            "",
            "'pow2' | 'fp32'",
            "pow2: scales are powers of two, so dequantised rows are exact in BF16; fp32: unrounded scales",
            choice("pow2", "fp32"),
        ),
    )
    max_dtype: str = field(
        default="fp32",
        metadata=info(
            "",
            "'bf16' | 'fp32'",
            "widest tensor dtype that the slots are sized for; bf16 halves the memory",
            choice("bf16", "fp32"),
        ),
    )
    budget_bytes: int = field(
        default=512 << 20,
        metadata=info(
            "bytes",
            "1 .. 2^46, at least the least budget that memory_plan() names",
            "memory of a rank for staging, landing, fold pieces, relay output, flags and rings",
            integer(1, 1 << 46),
        ),
    )
    window_tokens: int | None = field(
        default=None,
        metadata=info(
            "tokens",
            "None, or 1 .. 65536",
            "of the budget, what so many tokens of each rank need to go in one window; operations with up "
            "to eight times as many take several. None: all of the budget; GPU only",
            optional(integer(1, MAX_TOKENS)),
        ),
    )
    chunk_bytes: int | None = field(
        default=None,
        metadata=info(
            "bytes",
            "None, or 1 .. 2^30",
            "size of a chunk; None: chosen from the budget",
            optional(integer(1, 1 << 30)),
        ),
    )
    window_chunks: int | None = field(
        default=None,
        metadata=info(
            "chunks",
            "None, or 1 .. 65536",
            "slots per channel; None: chosen from the budget",
            optional(integer(1, 65536)),
        ),
    )
    arrival_timeout_s: float = field(
        default=300.0,
        metadata=info(
            "seconds",
            "> 0, at most 10^6",
            "a peer that has not entered the operation by then is an error; covers slow data loading. A "
            "pause of this process does not count",
            number(0.0, 1e6, open_low=True),
            agree=False,
        ),
    )
    progress_timeout_s: float = field(
        default=20.0,
        metadata=info(
            "seconds",
            "> 0, at most 10^6",
            "all ranks entered, and no byte or flag moved for this long: an error; a slow link is none",
            number(0.0, 1e6, open_low=True),
            agree=False,
        ),
    )
    backend: str = field(
        default="auto",
        metadata=info(
            "",
            "auto | host | cuda",
            "where the tensors of a buffer lie: in CPU memory or on a GPU; auto: cuda if there is one",
            choice("auto", "host", "cuda"),
        ),
    )
    num_sms: int = field(
        default=24,
        metadata=info(
            "SMs",
            "1 .. 1024",
            "streaming multiprocessors that the kernels may occupy; GPU only",
            integer(1, 1024),
        ),
    )
    stage_sms: int | None = field(
        default=None,
        metadata=info(
            "SMs",
            "None, or 1 .. 1024",
            "SMs that staging and the routing of a new plan may take before they leave; None: num_sms",
            optional(integer(1, 1024)),
        ),
    )
    bulk_copies: bool = field(
        default=True,
        metadata=info(
            "",
            "True | False",
            "use the copy engines that SMs of sm_90 have; False: plain loads, as on other GPUs",
            boolean,
            agree=False,
        ),
    )
    domain_size: int | None = field(
        default=None,
        metadata=info(
            "ranks",
            "None, or 1 .. 65536",
            "splits the group in consecutive domains of this size (the last may be smaller); None: probed",
            optional(integer(1, MAX_RANKS)),
        ),
    )
    domains: tuple[int, ...] | None = field(
        default=None,
        metadata=info(
            "domain ids",
            "None, or an integer >= 0 per rank of the group",
            "domain of each rank, for uneven or interleaved domains; overrides domain_size",
            optional(integers(0, MAX_RANKS - 1)),
        ),
    )
    num_proxies: int = field(
        default=1,
        metadata=info(
            "threads",
            "1 .. 4 (the host backend has 1)",
            "proxy threads of a rank that post to the transport",
            integer(1, 4),
        ),
    )
    source_order: tuple[int, ...] | None = field(
        default=None,
        metadata=info(
            "group ranks",
            "None, or a permutation of the group's ranks",
            "order of the sources inside an expert's rows; None: ascending group rank",
            optional(permutation),
        ),
    )

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            about: FieldInfo = entry.metadata["info"]
            value = getattr(self, entry.name)
            try:
                checked = about.check(value)
            except (ValueError, TypeError, OverflowError):
                raise ConfigError(f"{entry.name} = {value!r}: allowed is {about.allowed}") from None
            object.__setattr__(self, entry.name, checked)
        if self.combine_wire_dtype == "fp32" and self.max_dtype != "fp32":
            raise ConfigError(
                "combine_wire_dtype = 'fp32' with max_dtype = 'bf16': the slots would be too small; "
                "allowed is max_dtype = 'fp32'"
            )

    @classmethod
    def from_env(cls, **overrides: Any) -> EpConfig:
        """Arguments, else `UCCL_*` variables (`python -m uccl_ep_train.env` lists them), else defaults.

        Raises `ConfigError` for a bad value, naming the variable if it came from the environment, and for two
        variables that set one field to different values.
        """
        from uccl_ep_train import env

        names = {entry.name for entry in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - names)
        if unknown:
            raise ConfigError(
                f"unknown configuration field {unknown[0]!r}; allowed is one of {sorted(names)}"
            )
        found = {name: setting for name, setting in env.settings().items() if name not in overrides}
        if overrides.get("domain_size") is not None:
            found.pop("domains", None)  # It would override an argument.
        try:
            config = cls(**overrides, **{name: setting.value for name, setting in found.items()})
        except ConfigError as error:
            setting = found.get(str(error).split(" ", 1)[0])
            if setting is not None:
                raise ConfigError(f"environment variable {setting.variable.name}: {error}") from None
            raise
        sources = dict.fromkeys(overrides, "argument")
        for name, setting in found.items():
            sources[name] = f"environment {setting.variable.name}"
        config._set_sources(sources)
        return config

    def replace(self, **changes: Any) -> EpConfig:
        """A copy with some fields changed; the sources of the others are kept."""
        config = dataclasses.replace(self, **changes)
        kept = {name: source for name, source in self._sources().items() if name not in changes}
        config._set_sources(kept | dict.fromkeys(changes, "argument"))
        return config

    def describe(self) -> str:
        """A line per field: name, value, unit, source of the value, whether ranks must agree, reason."""
        sources = self._sources()
        rows = []
        inherited = {entry.name for entry in dataclasses.fields(TransportConfig)}
        for entry in sorted(dataclasses.fields(self), key=lambda entry: entry.name in inherited):
            about: FieldInfo = entry.metadata["info"]
            value = getattr(self, entry.name)
            source = sources.get(entry.name)
            if source is None:
                # A directly constructed dataclass does not know which arguments were passed.
                source = "default" if value == entry.default else "argument"
            agree = "ranks agree" if about.agree else "per rank"
            rows.append((entry.name, repr(value), about.unit, source, agree, about.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[5]
            for row in rows
        )

    def agreed_values(self) -> dict[str, Any]:
        """The fields that must be equal on every rank, JSON-ready."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.metadata["info"].agree
        }

    def _sources(self) -> Mapping[str, str]:
        return getattr(self, "_field_sources", {})

    def _set_sources(self, sources: Mapping[str, str]) -> None:
        # Not a field: two configurations with equal values are equal wherever the values came from.
        object.__setattr__(self, "_field_sources", dict(sources))
