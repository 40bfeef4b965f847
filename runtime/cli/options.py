"""Options that commands of `lowbit-run` share, and loading of the model that they describe."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.activation_modes import ACTIVATIONS
from lowbit.formats.errors import RequestError
from lowbit.formats.files.strict_json import loads
from lowbit.formats.files.user_file import read_user_file
from lowbit.formats.layout.recipes import BITS_BY_ROLE, GROUP_SIZE
from lowbit.formats.layout.scheme import GROUP_SIZES
from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.formats.shell.failure import Command
from lowbit.formats.shell.options import (
    AUTO,
    MOST,
    Count,
    at_most_cores,
    device_choice,
    exists,
    finite,
    folders,
    model_name,
    with_options,
)
from lowbit.formats.shell.output import note
from lowbit.runtime.cli.notes import note_choices
from lowbit.runtime.conversation.chat import AnswerSettings
from lowbit.runtime.engine.load_options import (
    DEFAULT_ACTIVATIONS,
    DEFAULT_KV_CACHE,
    DEFAULT_VISION_DEVICE,
    DRAFTER_MODES,
    KV_CACHES,
    METHODS,
    MODES,
    MOST_DRAFTS,
    VISION_DEVICES,
    LoadOptions,
)
from lowbit.runtime.thresholds import MOST_RANKS

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model

Decorator = Callable[[Command], Command]
SCHEMA = "JSON schema"
MOST_DIGITS = 9  # of a number in a list
ONE_THREAD_BYTES = 32 << 20  # weights below this are read faster by one core than handed around


def named_device(context: click.Context, parameter: click.Parameter, value: str) -> str | None:
    """`cpu` or `cuda`; None for `auto`, which is chosen where torch is imported."""
    return None if value == AUTO else value


def whole_number(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    """The number that a choice of numbers has given."""
    return None if value is None else int(value)


def count_option(
    *names: str,
    help: str,
    shown: str | bool = True,
    default: int | None = None,
    least: int = 1,
    most: int = MOST,
) -> Decorator:
    """An option for a whole number from `least` to `most`; `shown` describes a missing default."""
    kind = Count(least, most)
    return click.option(
        *names, type=kind, metavar="N", default=default, show_default=shown, help=help
    )


def numbers(
    among: tuple[int, ...] = (), most: int | None = None
) -> Callable[..., tuple[int, ...] | None]:
    """A callback that reads whole numbers from 1 on, separated by commas, as rising values.

    Args:
        among: numbers that may be given; any where it is empty.
        most: the largest one; None for any.
    """

    def read(
        context: click.Context, parameter: click.Parameter, value: str | None
    ) -> tuple[int, ...] | None:
        return None if value is None else tuple(sorted({number(text) for text in value.split(",")}))

    def number(text: str) -> int:
        digits = text.strip()
        fits = digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS
        if not fits or int(digits) < 1:
            raise click.BadParameter(f"`{text}` is not a whole number from 1 on.")
        if among and int(digits) not in among:
            raise click.BadParameter(f"{text} is none of {', '.join(map(str, among))}.")
        if most is not None and int(digits) > most:
            raise click.BadParameter(f"{text} is more than {most}.")
        return int(digits)

    return read


cache_options = with_options(
    count_option(
        "--context",
        "-c",
        shown="the model's, 8192, or what fits",
        help="Tokens of prompt and output together.",
    ),
    click.option(
        "--kv-cache",
        type=click.Choice(KV_CACHES),
        show_default=DEFAULT_KV_CACHE,
        help="Type of the keys and values in the cache: bf16, int8, which takes half the memory "
        "and rounds them, or auto, which is bf16 while that fits and, on a GPU, the context is at "
        "most 8192 and at most 64 answers are made together, else int8.",
    ),
)
activations_option = click.option(
    "--activations",
    type=click.Choice(ACTIVATIONS),
    show_default=DEFAULT_ACTIVATIONS,
    help="Inputs of quantized linears: exact, or int8, which rounds them to eight bits, with a "
    "scale for every 128 inputs of a token, or for each token behind the norms of rotated models. "
    "On an H100 or H200 that is faster for 4 tokens and more at a time; on a CPU it is slower. The "
    "head's inputs are rounded to 16 bits on a GPU, and stay exact on a CPU.",
)
vision_option = click.option(
    "--vision-device",
    type=click.Choice(VISION_DEVICES),
    show_default=DEFAULT_VISION_DEVICE,
    help="Where the vision tower reads images: the GPU, with room kept for it, or the CPU. auto "
    "takes the model's GPU if the cache stays as large, streams the tower onto it from the "
    "machine's memory if that leaves room, and else takes the CPU.",
)
machine_options = with_options(
    cache_options,
    activations_option,
    device_choice(named_device),
    click.option(
        "--threads",
        "-t",
        type=Count(),
        metavar="N",
        callback=at_most_cores,
        show_default="1 for small models, else what is fastest",
        help="CPU threads, at most as many as there are cores; with --tensor-parallel of each "
        "process.",
    ),
    count_option(
        "--tensor-parallel",
        shown="1",
        most=MOST_RANKS,
        help="Processes that share the model, each with some of its heads and a part of its "
        "widths, and on a GPU of its own.",
    ),
)


def _sampling_option(name: str, metavar: str, help: str, shown: str = "the model's") -> Decorator:
    """An option for a sampling setting, with the range that the setting has everywhere."""
    field = SETTINGS[name]
    whole = field.kind == "integer"
    least, most = field.least, field.most
    return click.option(
        f"--{name.replace('_', '-')}",
        type=Count(int(least), int(most))
        if whole
        else click.FloatRange(least, most, min_open=field.exclusive),
        metavar=metavar,
        callback=None if whole else finite,
        show_default=shown,
        help=help,
    )


sampling_options = with_options(
    count_option(
        "--max-new-tokens",
        "-n",
        shown="until the context is full",
        help="Stop after N tokens.",
    ),
    _sampling_option("temperature", "T", "0 takes the likeliest token."),
    _sampling_option("top_k", "K", "Draw from the K likeliest tokens; 0 is off."),
    _sampling_option(
        "top_p", "P", "Draw from the likeliest tokens that reach the probability P together."
    ),
    _sampling_option(
        "min_p", "P", "Draw from tokens that are at least P times as likely as the likeliest."
    ),
    _sampling_option("repetition_penalty", "X", "Weaken every token that has occurred; 1 is off."),
    _sampling_option(
        "presence_penalty", "X", "Subtract X from every token of the output so far; 0 is off."
    ),
    _sampling_option(
        "frequency_penalty",
        "X",
        "Subtract X from a token for each time the output has it; 0 is off.",
    ),
    _sampling_option("seed", "N", "Make sampling repeatable.", shown="another each time"),
)
talk_options = with_options(
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."
    ),
    click.option("--system", metavar="TEXT", help="System message."),
    click.option(
        "--think/--no-think",
        "thinking",
        default=None,
        show_default="the model's",
        help="Switch thinking on or off.",
    ),
    count_option(
        "--max-thinking-tokens",
        shown="no limit",
        help="End the reasoning after N tokens, so that the answer begins.",
        least=0,
    ),
    click.option(
        "--json-schema",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Answer with JSON that fits the schema in FILE; reasoning before it is free.",
    ),
)
quantize_options = with_options(
    click.option(
        "--quantize",
        type=click.Choice(tuple(BITS_BY_ROLE)),
        help="Quantize a BF16 checkpoint as it is loaded; nothing is written. int3 and "
        "int2 are of little use for most models.",
    ),
    click.option(
        "--group-size",
        type=click.Choice([str(size) for size in GROUP_SIZES]),
        callback=whole_number,
        show_default=str(GROUP_SIZE),
        help="With --quantize: weights that share a scale; a smaller size where it does not "
        "divide a row.",
    ),
    click.option(
        "--method",
        type=click.Choice(METHODS),
        show_default="rtn",
        help="With --quantize: search scales (rtn), weight the search by the inputs of a bundled "
        "text (weighted), or do not search (absmax).",
    ),
)
speculate_options = with_options(
    click.option(
        "--speculate",
        type=click.Choice(MODES),
        show_default="auto on a GPU if the model has a head, else off; bench: off",
        help="Speculative decoding: one step verifies several draft tokens. They come from n-grams "
        "of the prompt and the output (ngram), from the model's head for multi-token prediction "
        "(mtp), from a drafter (dflash), or from all that there is as long as it pays (auto). The "
        "output stays the same.",
    ),
    click.option(
        "--draft-tokens",
        type=click.IntRange(1, MOST_DRAFTS),
        metavar="K",
        show_default="as many as suit the model",
        help="With --speculate: verify at most K draft tokens in a step.",
    ),
    click.option(
        "--drafter",
        metavar="DIR|ID",
        callback=model_name,
        shell_complete=folders,
        help="With --speculate dflash or auto: a drafter for MODEL (DFlash, DSpark, xPress, "
        "Domino, DFlash2, LiLiCorr), a folder or a Hub id, packed or BF16. It stands in for the "
        "model's own head.",
    ),
)
control_option = click.option(
    "--allow-control-tokens",
    is_flag=True,
    help="Take <|im_end|> and the like in messages as the tokens that they spell, so that a text "
    "may end its turn and begin another; otherwise they are plain text.",
)
model_argument = click.argument(
    "name", metavar="MODEL", callback=model_name, shell_complete=folders
)


# Parameters of the commands that answer, as their help groups them.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Connection": (
        *("url", "api_key", "host", "port", "no_auth", "cors_origin", "allow_image_urls"),
    ),
    "Answers": (
        *("max_new_tokens", "stop", "system", "thinking", "max_thinking_tokens", "json_schema"),
        *("images", "raw"),
    ),
    "Sampling": tuple(SETTINGS),
    "Many at a time": (
        *("prompts", "out", "max_sequences", "client_sequences", "queue", "request_timeout"),
        *("grammar_memory", "http_workers"),
    ),
    "Measurement": ("prompt_tokens", "new_tokens", "runs", "sampled"),
    "Load on a server": (
        *("clients", "rate", "requests", "warm_up", "most_at_once", "api", "token_ids"),
        *("first_token_limit", "between_tokens_limit", "load_seed"),
    ),
    "Model and machine": (
        "served_name",
        "context",
        "kv_cache",
        "activations",
        "device",
        "vision_device",
        "threads",
        "tensor_parallel",
    ),
    "Quantization at load": ("quantize", "group_size", "method"),
    "Speculative decoding": ("speculate", "draft_tokens", "drafter"),
}


def check_model(name: str) -> None:
    """Refuse a name of no folder and no model on the Hub, before stdin is read.

    Raises:
        CheckpointError: the name is neither.
    """
    from lowbit.formats.hub.errors import not_found
    from lowbit.formats.hub.ids import hub_id

    if not exists(name) and hub_id(name) is None:
        raise not_found(name)


def with_load_options(command: Command) -> Command:
    """Give a command its options for loading as one `LoadOptions`, named `options`."""
    names = {field.name for field in fields(LoadOptions)}

    @wraps(command)
    def run(**parameters: Any) -> None:
        loading = {name: parameters.pop(name) for name in names & parameters.keys()}
        given = {name: value for name, value in loading.items() if value is not None}
        # None where memory decides; commands without the option answer one at a time.
        sequences = loading.get("max_sequences", 1)
        _check_quantization(given)
        _check_speculation(given)
        command(options=LoadOptions(**(given | {"max_sequences": sequences})), **parameters)

    return run


def with_settings(command: Command) -> Command:
    """Give a command its options for answers as one `AnswerSettings`, named `settings`."""
    names = {field.name for field in fields(AnswerSettings)}

    @wraps(command)
    def run(**parameters: Any) -> None:
        given = {name: parameters.pop(name) for name in names & parameters.keys()}
        sampling = {name: parameters.pop(name) for name in SETTINGS}
        given["sampling"] = {name: it for name, it in sampling.items() if it is not None}
        if given["json_schema"] is not None:
            given["json_schema"] = _read_schema(given["json_schema"])
        command(settings=AnswerSettings(**given), **parameters)

    return run


def _read_schema(path: Path) -> dict[str, Any]:
    """The JSON schema of a file.

    Raises:
        RequestError: the file cannot be read, or holds no JSON object.
    """
    try:
        content = loads(read_user_file(path, SCHEMA))
    except ValueError as error:
        raise RequestError(f"{SCHEMA} `{path}` cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"{SCHEMA} `{path}`: expected a JSON object")
    return content


def load_model(name: str, options: LoadOptions) -> "Model":
    """Load the model of a folder or Hub id; notes on stderr name choices made for the user."""
    from lowbit.runtime.engine.load import load

    if options.measures_inputs:
        note("weighted: measuring the inputs of every linear on a bundled text")
    model = load(name, options)
    note_choices(model)
    _spare_threads(model)
    return model


def load_text_model(name: str, options: LoadOptions) -> "Model":
    """`load_model` for work without images: a vision tower takes no memory."""
    return load_model(name, replace(options, takes_images=False))


def _check_quantization(given: dict[str, Any]) -> None:
    """Refuse options that have no effect without a recipe."""
    for name in ("group_size", "method"):
        if name in given and "quantize" not in given:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --quantize.")


def _check_speculation(given: dict[str, Any]) -> None:
    """Refuse options that would have no effect together."""
    mode = given.get("speculate")
    if "draft_tokens" in given and mode in (None, "off"):
        raise click.UsageError("--draft-tokens needs --speculate ngram, mtp, dflash or auto.")
    if "drafter" in given and mode not in DRAFTER_MODES:
        raise click.UsageError(f"--drafter needs --speculate {' or '.join(DRAFTER_MODES)}.")
    if "drafter" not in given and mode == "dflash":
        raise click.UsageError("--speculate dflash needs --drafter.")


def _spare_threads(model: "Model") -> None:
    """Run a small model on one thread: its operations are shorter than waiting for another."""
    import torch

    small = model.opened.weight_bytes("cpu", model.dtype) < ONE_THREAD_BYTES
    if model.device == "cpu" and model.options.threads is None and small:
        torch.set_num_threads(1)
