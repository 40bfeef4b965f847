"""`lowbit-run bench --url`: a load on a running server."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lowbit.formats.errors import ResourceError
from lowbit.formats.shell.options import finite, with_options
from lowbit.formats.shell.output import note, print_json
from lowbit.runtime.cli.options import count_option, numbers
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.lab.http_load.requests import APIS, MOST_AT_ONCE

if TYPE_CHECKING:
    from lowbit.runtime.lab.bench_settings import BenchSettings
    from lowbit.runtime.lab.http_load.bench import ServerResult
    from lowbit.runtime.lab.http_load.clients import OfferedLoad

CLIENTS = (1, 8)
A_CLIENT = 4  # requests
ARRIVALS_S = 30.0  # seconds of arrivals
LEAST_REQUESTS = 16
SEED_BITS = 31
LOCAL = ("runs", "sampled")  # options for a model that is loaded here


def rates(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """Rates above 0, separated by commas, as rising values."""
    if value is None:
        return None
    found = set()
    for text in value.split(","):
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if rate <= 0 or not isfinite(rate):
            raise click.BadParameter(f"`{text}` is not a number above 0.")
        found.add(rate)
    return tuple(sorted(found))


def _limit(name: str, help: str) -> Any:
    kind = click.FloatRange(0, min_open=True)
    return click.option(name, type=kind, metavar="S", callback=finite, help=help)


server_options = with_options(
    click.option(
        "--url",
        metavar="URL",
        help="Measure a running server of OpenAI's API, such as http://localhost:8000, instead of "
        "a model here. MODEL is then a name that the server knows; its first where left out.",
    ),
    click.option(
        "--api-key",
        envvar="LOWBIT_API_KEY",
        metavar="KEY",
        show_envvar=True,
        help="With --url: key.",
    ),
    click.option(
        "--clients",
        metavar="N,N",
        callback=numbers(),
        show_default=",".join(map(str, CLIENTS)),
        help="Clients that each ask one request after another; several numbers are measured in "
        "turn.",
    ),
    click.option(
        "--rate",
        metavar="R,R",
        callback=rates,
        help="Requests that arrive a second as a Poisson process, instead of --clients; several "
        "are measured in turn.",
    ),
    count_option(
        "--requests",
        shown=f"{A_CLIENT} a client or {ARRIVALS_S:g} s of arrivals, at least {LEAST_REQUESTS}",
        help="Requests of each load that count.",
    ),
    count_option(
        "--warm-up",
        shown="1 a client or 1 s of arrivals",
        least=0,
        help="Requests before them that do not count.",
    ),
    count_option(
        "--most-at-once",
        shown=str(MOST_AT_ONCE),
        help="With --rate: requests under way, beyond which others wait; their times then begin "
        "when they were due.",
    ),
    click.option(
        "--api",
        type=click.Choice(APIS),
        show_default=APIS[0],
        help="Ask /v1/completions or /v1/chat/completions.",
    ),
    click.option(
        "--token-ids",
        is_flag=True,
        help="Send prompts as ids of tokens, which completions of lowbit and vLLM take, instead of "
        "words.",
    ),
    _limit(
        "--first-token-limit",
        "Seconds to the first token within which an answer counts as goodput.",
    ),
    _limit(
        "--between-tokens-limit",
        "Seconds a token after the first, in the mean of an answer, within which it counts as "
        "goodput.",
    ),
    count_option(
        "--seed",
        "load_seed",
        least=0,
        shown="another each time",
        help="Draw the same prompts and arrivals again; a server may have them in its cache.",
    ),
)


def check_without_server(given: Mapping[str, Any]) -> None:
    """Refuse options for a server where none is named.

    Args:
        given: values of `server_options`.

    Raises:
        click.UsageError: there is one.
    """
    for name in given:
        if name != "url" and _on_command_line(name):
            raise click.UsageError(f"{_option(name)} needs --url.")


def measure_server(
    name: str | None,
    options: LoadOptions,
    settings: "BenchSettings",
    given: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Measure the server that --url names, and show the figures.

    Args:
        name: of the model there; None for its first.
        options: for loading a model, which must be those of a command without any.
        settings: lengths of prompts and answers.
        given: values of `server_options`.

    Raises:
        click.UsageError: options exclude each other.
        LowbitError: the server cannot be measured, or a load got no answer.
    """
    _check(options, given)
    from lowbit.formats.shell.tables import progress_bars
    from lowbit.runtime.lab.http_load.bench import bench_server
    from lowbit.runtime.lab.http_load.connection import address_of
    from lowbit.runtime.lab.http_load.result import LatencyLimits
    from lowbit.runtime.lab.http_load.server import RequestSettings
    from lowbit.runtime.lab.tables import show_server

    seed = given["load_seed"]
    seed = secrets.randbits(SEED_BITS) if seed is None else seed
    loads = _loads(given)
    asked = RequestSettings(
        model=name,
        api=given["api"] or APIS[0],
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        token_ids=given["token_ids"],
    )
    limits = LatencyLimits(given["first_token_limit"], given["between_tokens_limit"])
    note(f"seed of prompts and arrivals: {seed}")
    with progress_bars({load.title: load.title for load in loads}, quiet=as_json) as on_progress:
        address = address_of(given["url"], given["api_key"])
        result = bench_server(address, asked, loads, seed, limits, on_progress)
    for text in result.notes:
        note(text)
    if as_json:
        print_json(asdict(result))
    else:
        show_server(result)
    _check_answered(result)


def _loads(given: Mapping[str, Any]) -> "list[OfferedLoad]":
    """The loads that the options ask for."""
    from lowbit.runtime.lab.http_load.clients import OfferedLoad

    if given["rate"] is None:
        return [
            OfferedLoad(
                requests=given["requests"] or max(A_CLIENT * clients, LEAST_REQUESTS),
                warm_up=clients if given["warm_up"] is None else given["warm_up"],
                clients=clients,
            )
            for clients in given["clients"] or CLIENTS
        ]
    return [
        OfferedLoad(
            requests=given["requests"] or max(ceil(ARRIVALS_S * rate), LEAST_REQUESTS),
            warm_up=ceil(rate) if given["warm_up"] is None else given["warm_up"],
            rate=rate,
            most_at_once=given["most_at_once"] or MOST_AT_ONCE,
        )
        for rate in given["rate"]
    ]


def _check(options: LoadOptions, given: Mapping[str, Any]) -> None:
    """Refuse options that have no effect together."""
    if options != LoadOptions(max_sequences=1):
        raise click.UsageError("--url takes no option for loading a model: the server has done it.")
    for name in LOCAL:
        if _on_command_line(name):
            raise click.UsageError(f"{_option(name)} is for a model that is loaded, not for --url.")
    if given["clients"] is not None and given["rate"] is not None:
        raise click.UsageError("--clients and --rate exclude each other.")
    if given["most_at_once"] is not None and given["rate"] is None:
        raise click.UsageError("--most-at-once needs --rate.")
    if given["token_ids"] and given["api"] == "chat":
        raise click.UsageError("--token-ids needs --api completions: a chat takes text alone.")


def _check_answered(result: "ServerResult") -> None:
    """Let the command fail where a load got no answer.

    Raises:
        ResourceError: there is one.
    """
    for load in result.loads:
        if load.requests and not load.answered:
            failure = load.failures[0]
            raise ResourceError(
                f"{result.url}: none of {load.requests} requests was answered; {failure.message}"
            )


def _on_command_line(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source == ParameterSource.COMMANDLINE


def _option(name: str) -> str:
    """The option of a parameter, as users write it."""
    parameters = {each.name: each.opts[0] for each in click.get_current_context().command.params}
    return parameters[name]
