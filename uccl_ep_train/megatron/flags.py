"""Command-line options of the dispatcher, made from `EpConfig`'s fields: `--uccl-ep-dispatch-dtype fp8` etc.

Every setting of its sections is an option, whose text is read as that of its variable.
"""

from __future__ import annotations

import argparse
from typing import Any

from uccl_ep_train.errors import ConfigError
from uccl_ep_train.megatron import plugin
from uccl_ep_train.megatron.compat import UnsupportedMegatronError
from uccl_ep_train.megatron.plugin import DISPATCHER_NAME, REUSE_OPTION
from uccl_ep_train.settings import variables
from uccl_ep_train.settings.checks import MAX_TIMEOUT_S, MAX_TOKENS, boolean
from uccl_ep_train.settings.sections import SETTINGS, Deadlines

DISPATCHER_OPTION = "--moe-token-dispatcher-type"
_PREFIX = "uccl_ep_"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--uccl-ep-*`, each unset by default, so that the environment still counts."""
    group = parser.add_argument_group("uccl_ep dispatcher")
    for name, setting in SETTINGS.items():
        info = setting.info
        unit = f" [{info.unit}]" if info.unit else ""
        group.add_argument(
            "--" + (_PREFIX + name).replace("_", "-"),
            dest=_PREFIX + name,
            type=setting.spec.kind.parse,
            metavar=setting.form.upper() if " " not in setting.form else "VALUE",
            help=f"{info.reason}{unit}; {info.allowed}".replace("%", "%%"),
        )
    group.add_argument(
        "--" + (_PREFIX + REUSE_OPTION).replace("_", "-"),
        dest=_PREFIX + REUSE_OPTION,
        type=boolean,
        metavar="VALUE",
        help="recomputed layers use the plans of their first run and exchange no routing (1, the default), "
        "or make new ones (0), as routing that differs there needs; 0 | 1",
    )


def options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The dispatcher's options that were given, as keyword arguments of `plugin.enable`."""
    given = {name: getattr(namespace, _PREFIX + name, None) for name in (*SETTINGS, REUSE_OPTION)}
    return {name: value for name, value in given.items() if value is not None}


def extend_megatron_parser(parser: argparse.ArgumentParser) -> None:
    """Lets a Megatron parser accept `--moe-token-dispatcher-type uccl_ep` and `--uccl-ep-*`.

    Parsing then enables the plug-in and leaves the carrier's values in the namespace, for Megatron to read.
    Raises UnsupportedMegatronError for a parser without that option.
    """
    actions = parser._option_string_actions
    if DISPATCHER_OPTION not in actions:
        raise UnsupportedMegatronError(f"this script's parser has no {DISPATCHER_OPTION}")
    action = actions[DISPATCHER_OPTION]
    if action.choices is not None:
        action.choices = [*action.choices, DISPATCHER_NAME]
    add_options(parser)
    stock = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        namespace, rest = stock(*args, **kwargs)
        try:
            select_dispatcher(namespace)
        except ConfigError as error:
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]


def window_tokens(namespace: argparse.Namespace) -> int | None:
    """Tokens per dispatch of a rank, from Megatron's arguments; None if they do not determine it."""
    length, size = (getattr(namespace, name, None) for name in ("seq_length", "micro_batch_size"))
    if not length or not size:
        return None
    size = max(size, getattr(namespace, "eval_micro_batch_size", None) or 0)
    parts = getattr(namespace, "context_parallel_size", 1)
    if getattr(namespace, "sequence_parallel", False):
        parts *= namespace.tensor_model_parallel_size
    return min(-(-length * size // parts), MAX_TOKENS)


def patience_s(namespace: argparse.Namespace) -> float | None:
    """Seconds that torch.distributed waits, by Megatron's arguments; None if no longer than a buffer does."""
    minutes = getattr(namespace, "distributed_timeout_minutes", None)
    if minutes is None or 60.0 * minutes <= Deadlines.arrival_timeout_s:
        return None
    return min(60.0 * minutes, MAX_TIMEOUT_S)


def select_dispatcher(namespace: argparse.Namespace) -> None:
    """Enables the plug-in if the parsed arguments ask for it; ConfigError if they contradict each other."""
    given = options(namespace)
    if namespace.moe_token_dispatcher_type != DISPATCHER_NAME:
        if given:
            option = "--" + (_PREFIX + next(iter(given))).replace("_", "-")
            raise ConfigError(
                f"{option} needs {DISPATCHER_OPTION} {DISPATCHER_NAME}, "
                f"not {namespace.moe_token_dispatcher_type}"
            )
        plugin.retire()
        return
    if getattr(namespace, "moe_enable_deepep", False):
        raise ConfigError(f"--moe-enable-deepep contradicts {DISPATCHER_OPTION} {DISPATCHER_NAME}")
    tokens = window_tokens(namespace)
    if tokens is not None and "window_tokens" not in variables.said():
        given.setdefault("window_tokens", tokens)
    patience = patience_s(namespace)
    if patience is not None and "arrival_timeout_s" not in variables.said():
        given.setdefault("arrival_timeout_s", patience)
    for name, value in plugin.enable(**given).items():
        setattr(namespace, name, value)
