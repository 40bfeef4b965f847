"""`lowbit-run serve`."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.machine.system import install_command, install_hint
from lowbit.formats.sequence_counts import CHOSEN_SEQUENCES, MOST_SEQUENCES
from lowbit.formats.shell.config_file import config_option
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import finite, parse_size, sequences_option
from lowbit.formats.shell.output import note
from lowbit.formats.shell.sections import Sectioned
from lowbit.runtime.cli.notes import note_vision
from lowbit.runtime.cli.options import (
    SECTIONS,
    control_option,
    count_option,
    load_model,
    machine_options,
    model_argument,
    quantize_options,
    speculate_options,
    vision_option,
    with_load_options,
)
from lowbit.runtime.engine.load_options import FEW_SEQUENCES, SEQUENCES, SHORT
from lowbit.runtime.serve.request.hosts import allowed_hosts
from lowbit.runtime.serve.settings import ServeSettings, check_exposure

if TYPE_CHECKING:
    from socket import socket

    from lowbit.runtime.engine.load_options import LoadOptions
    from lowbit.runtime.engine.model import Model
    from lowbit.runtime.serve.link.messages import Facts
    from lowbit.runtime.serve.link.process import EngineProcess

PORT = 8000
ANY = "*"  # a name for every name
QUEUE = 64
GRAMMAR_MEMORY = "1GB"
TIMEOUT_S = 600.0
DAY_S = 86_400.0
MOST_QUEUE = 65_536
MOST_HTTP_WORKERS = 64
LIBRARIES = ("fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn")
FASTER_ROUNDED = 4  # answers together from which linears with rounded inputs are faster


@click.command(
    cls=Sectioned,
    sections=SECTIONS,
    short_help="Serve the model over HTTP.",
    epilog=f"""\b
    Examples ({install_command("serve")} in the clone first):
      lowbit-run serve qwen3-8b-int4
      LOWBIT_API_KEY=... lowbit-run serve qwen3-8b-int4 --host 0.0.0.0
      lowbit-run serve --config serve.toml
      curl localhost:8000/v1/models
    """,
)
@model_argument
@config_option(("name", "drafter"))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    metavar="PORT",
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--api-key",
    envvar="LOWBIT_API_KEY",
    metavar="KEY",
    show_envvar=True,
    help="Key that requests must show; the variable keeps it out of the list of processes.",
)
@click.option("--no-auth", is_flag=True, help="Let other machines use the server without a key.")
@sequences_option(
    help="Answers that are made together.",
    shown=f"up to {SEQUENCES} on a CPU, up to {CHOSEN_SEQUENCES} on a GPU, by memory",
)
@count_option(
    "--queue",
    default=QUEUE,
    help="Answers that may wait; more are refused with 429.",
    least=0,
    most=MOST_QUEUE,
)
@count_option(
    "--client-sequences",
    shown=f"all but one, of {FEW_SEQUENCES} or more",
    help=f"Answers of one client that are made together; those of up to {SHORT} tokens may be "
    "more.",
    most=MOST_SEQUENCES,
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, DAY_S, min_open=True),
    metavar="S",
    default=TIMEOUT_S,
    show_default=True,
    callback=finite,
    help="Seconds that a request may take in all.",
)
@click.option(
    "--served-name",
    multiple=True,
    metavar="NAME",
    show_default="the folder's",
    help="Name of the model in requests and answers; repeat it for others, * for any.",
)
@count_option(
    "--max-thinking-tokens",
    shown="no limit",
    help="Tokens of reasoning before the answer must begin, where a request names none.",
    least=0,
)
@click.option(
    "--grammar-memory",
    callback=parse_size,
    metavar="SIZE",
    default=GRAMMAR_MEMORY,
    show_default=True,
    help="Memory of the grammars of all requests; one that does not fit waits.",
)
@count_option(
    "--http-workers",
    default=1,
    help="Processes that read requests and write answers, before one engine; more where one has a "
    "core to itself and is busy all the time, as `top` shows.",
    most=MOST_HTTP_WORKERS,
)
@click.option(
    "--restart-engine",
    is_flag=True,
    help="Load the model again if the engine's process ends; without it the server ends, too.",
)
@click.option(
    "--compile-ahead/--no-compile-ahead",
    default=True,
    show_default=True,
    help="Compile the kernels of all steps beside the first answers, on a GPU; without it each is "
    "compiled when an answer needs it.",
)
@click.option("--log-prompts", is_flag=True, help="Write prompts and answers to the log.")
@click.option(
    "--cors-origin",
    multiple=True,
    metavar="O",
    help="Web page, such as https://example.org, that may use the server (repeatable).",
)
@click.option(
    "--allow-image-urls",
    multiple=True,
    metavar="HOST",
    help="Host, such as example.org or example.org:8443, from which images that clients name by "
    "http and https addresses are fetched (repeatable); * for all that are public.",
)
@click.option(
    "--refuse-late-system",
    is_flag=True,
    help="Refuse system messages that the chat template refuses; otherwise those at the beginning "
    "are joined, and later ones become marked text.",
)
@control_option
@machine_options
@vision_option
@quantize_options
@speculate_options
@reported
@with_load_options
def serve(*, name: str, options: "LoadOptions", compile_ahead: bool, **given: Any) -> None:
    """Serve MODEL to clients of OpenAI's and Anthropic's APIs, and a page at /.

    /docs describes the API. A request takes a row of the batch as soon as one is free. Ctrl-C lets
    running requests finish; pressed twice, it does not.
    """
    settings = _settings(name, **given)
    check_exposure(settings.host, settings.api_key, settings.no_auth)
    try:
        _run(settings, partial(load_noted, name, options, compile_ahead))
    except ModuleNotFoundError as error:
        raise _missing(error) from None


def _settings(name: str, served_name: Sequence[str], **given: Any) -> ServeSettings:
    """Settings of the server, from the options that the command was given."""
    _check_key(given["api_key"])
    if given["http_workers"] > 1 and sys.platform == "win32":
        raise click.UsageError("--http-workers: Windows lets no process hand a connection on.")
    given["request_timeout_s"] = given.pop("request_timeout")
    given["grammar_bytes"] = given.pop("grammar_memory")
    given["cors_origins"] = given.pop("cors_origin")
    given["image_hosts"] = allowed_hosts(given.pop("allow_image_urls")).names
    return ServeSettings(
        names=tuple(each for each in served_name if each != ANY)
        or (Path(name).resolve().name if Path(name).exists() else name,),
        any_name=ANY in served_name,
        **given,
    )


def _check_key(key: str | None) -> None:
    """Refuse a key that no header can show as it is: servers drop blanks around a value."""
    if key is None or (key and key.isascii() and key.isprintable() and key == key.strip()):
        return
    raise click.UsageError(
        "--api-key is empty, or has line ends, blanks around it or characters that no header "
        "can hold."
    )


def _run(settings: ServeSettings, load: "Callable[[], Model]") -> None:
    """Listen, let a process load the model, and serve it until the end."""
    from lowbit.runtime.serve.link.process import start_engine
    from lowbit.runtime.serve.server import listen

    taken = listen(settings.host, settings.port)  # before a minute is spent on loading
    with taken:
        if settings.http_workers > 1:
            others = settings.http_workers
            _serve_by_workers(settings, partial(start_engine, load, others), taken)
        else:
            _serve_here(settings, partial(start_engine, load), taken)


def _serve_here(
    settings: ServeSettings, start_engine: "Callable[[], EngineProcess]", taken: "socket"
) -> None:
    """Serve by this process and that of the engine."""
    from lowbit.runtime.serve.app import build_app
    from lowbit.runtime.serve.link.engines import Engines
    from lowbit.runtime.serve.logs import set_up_logs
    from lowbit.runtime.serve.served_model import load_prompts, served_model
    from lowbit.runtime.serve.server import Server, end_threads, tune_process
    from lowbit.runtime.serve.service import Service

    engine = start_engine()
    facts = engine.facts()
    engines = Engines(engine, start_engine, settings.restart_engine)
    try:
        model = served_model(facts, load_prompts(facts))
        set_up_logs()
        tune_process()
        service = Service(model, settings, engine.channel, engines.follow)
        _note_loaded(settings, facts)
        Server(build_app(service), service, lambda: _note_address(settings, taken)).run([taken])
    finally:
        hung = not engines.current.stop()
    if not end_threads() or hung:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)  # the interpreter would wait for them
    if service.engine.lost or not service.draining:
        raise _engine_ended(engines.current)


def _serve_by_workers(
    settings: ServeSettings, start_engine: "Callable[[], EngineProcess]", taken: "socket"
) -> None:
    """Serve by several HTTP processes and that of the engine; this one hands them connections."""
    import asyncio

    from lowbit.runtime.serve.link.engines import Engines
    from lowbit.runtime.serve.logs import set_up_logs
    from lowbit.runtime.serve.server import allow_connections
    from lowbit.runtime.serve.supervisor import Supervisor

    engine = start_engine()
    facts = engine.facts()
    engines = Engines(engine, start_engine, settings.restart_engine)
    try:
        set_up_logs()
        allow_connections()
        supervisor = Supervisor(settings, taken, engines)
        _note_loaded(settings, facts)
        try:
            asyncio.run(supervisor.serve(lambda: _note_address(settings, taken)))
        except BaseException:  # Ctrl-C at the start; a channel may be on its way to a process
            engines.current.kill()
            raise
    finally:
        hung = not engines.current.stop()
    if supervisor.engine_ended:
        raise _engine_ended(engines.current)
    if supervisor.error is not None:
        raise supervisor.error
    if hung:
        sys.exit(1)  # as the log says


def _note_loaded(settings: ServeSettings, facts: "Facts") -> None:
    workers = settings.http_workers
    by = "" if workers == 1 else f", {workers} HTTP processes"
    note(
        f"{settings.names[0]}: up to {facts.sequences} answers at a time, context of "
        f"{facts.limits.context:,} tokens{by}, loaded in {facts.load_s:.1f} s"
    )


def _note_address(settings: ServeSettings, taken: "socket") -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{taken.getsockname()[1]}"
    note(f"{url} has a chat page; {url}/v1 is the base URL for clients of OpenAI's API")


def _engine_ended(engine: "EngineProcess") -> LowbitError:
    hint = "the log above says why"
    return LowbitError(f"the engine's process has ended: {engine.ending}", hint=hint)


def load_noted(name: str, options: "LoadOptions", ahead: bool = False) -> "Model":
    """Load the model of a folder or Hub id in the engine's process; notes go to stderr.

    ahead: begin to compile what its steps may need.
    """
    model = load_model(name, options)
    note_vision(model)
    _note_rounding(model)
    if ahead:
        from lowbit.runtime.lab.compile_ahead import compile_ahead  # needs torch

        compile_ahead(model)
    return model


def _note_rounding(model: "Model") -> None:
    """Point to --activations int8 on stderr where its linears are faster."""
    exact = model.options.activations == "exact" and model.opened.packs_layers
    if not exact or model.device == "cpu" or model.cache.sequences < FASTER_ROUNDED:
        return
    from lowbit.runtime.kernels.launch.device import card_of  # needs triton

    if card_of(model.engine.runner.tables).is_hopper:
        note(
            f"linears of {FASTER_ROUNDED} answers and more at a time, and of long prompts, are "
            "faster on this GPU with --activations int8, which rounds their inputs"
        )


def _missing(error: ModuleNotFoundError) -> LowbitError:
    """The error for a server's library that is not installed; other modules are a bug."""
    if (error.name or "").split(".")[0] not in LIBRARIES:
        raise error
    return ResourceError(f"`{error.name}` is not installed", hint=install_hint("serve"))
