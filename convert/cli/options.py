"""Options that several commands of `lowbit-convert` share, and the objects they describe."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from lowbit.convert.budget.frequent import FREQUENT_ROWS
from lowbit.formats.activation_modes import ACTIVATIONS
from lowbit.formats.errors import LowbitError, QuantizationError, RequestError, ResourceError
from lowbit.formats.layout.recipes import BITS_BY_ROLE
from lowbit.formats.layout.scheme import GROUP_SIZES
from lowbit.formats.printable import printable
from lowbit.formats.shell.failure import Command, Failure
from lowbit.formats.shell.options import (
    AUTO,
    Count,
    device_choice,
    folders,
    model_name,
    parse_size,
    with_options,
)

if TYPE_CHECKING:
    from lowbit.convert.measure.gate import Condition, Outcome
    from lowbit.convert.plan.recipe import Override, Recipe
    from lowbit.convert.quantize.session import CalibrationRequest
    from lowbit.convert.texts.evaluation import Text


def gathered(
    name: str, make: Callable[..., Any], *options: Callable[[Command], Command]
) -> Callable[[Command], Command]:
    """Options that a command gets as one object: `make` of their values, under this name.

    Their names are those of the parameters of `make`. Its errors are shown as those of a command.
    """

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            own = {key: values.pop(key) for key in inspect.signature(make).parameters}
            try:
                made = make(**own)
            except LowbitError as error:
                raise Failure(error) from None
            command(**{name: made}, **values)

        return with_options(*options)(run)

    return add


def file_option(
    *names: str, metavar: str = "FILE", **settings: Any
) -> Callable[[Command], Command]:
    """An option that names a file or a folder, as click's otherwise."""
    return click.option(*names, type=click.Path(path_type=Path), metavar=metavar, **settings)


def new_folder(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    """Refuse, before any work, a name that is not UTF-8: reports hold it."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"`{printable(str(value))}` is not valid UTF-8.") from None
    return value


def parsed(read: Callable[[Any], Any]) -> Callable[..., Any]:
    """A callback that gives what `read` makes of a value, and its error as a usage error."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return () if value is None or ctx.resilient_parsing else read(value)
        except (QuantizationError, RequestError) as error:
            hint = f"; {error.hint}" if error.hint else ""
            raise click.BadParameter(f"{error}{hint}.") from None

    return callback


def read_overrides(texts: tuple[str, ...]) -> tuple["Override", ...]:
    """Overrides, each given as `PATTERN=BITS` or `PATTERN=BITSgGROUP`."""
    from lowbit.convert.plan.recipe import Override

    return tuple(map(Override.parse, texts))


def read_method(text: str) -> str:
    """The name of a method: `auto`, or text that `Method.parse` takes."""
    from lowbit.convert.plan.method import Method

    if text != AUTO:
        Method.parse(text)
    return text


def read_conditions(text: str) -> tuple["Condition", ...]:
    """The conditions of a gate."""
    from lowbit.convert.measure.gate import parse_gate

    return parse_gate(text)


def list_of(known: Sequence[int], what: str) -> Callable[..., tuple[int, ...] | None]:
    """A callback that reads a list like `4,8` of different numbers that are known."""

    def callback(
        ctx: click.Context, param: click.Parameter, text: str | None
    ) -> tuple[int, ...] | None:
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        if any(part not in map(str, known) for part in parts) or len(set(parts)) != len(parts):
            names = ", ".join(map(str, known))
            raise click.BadParameter(f"{text!r} is not a list of different {what} out of {names}.")
        return tuple(sorted(map(int, parts)))

    return callback


def methods(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of methods."""
    from lowbit.convert.plan.method import METHODS

    names = [AUTO, *METHODS]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def method_option(
    help: str, default: str | None = AUTO, shown: str | bool = True
) -> Callable[[Command], Command]:
    """The name of a method; `shown` says what is taken without one."""
    return click.option(
        "--method",
        callback=parsed(read_method),
        shell_complete=methods,
        default=default,
        show_default=shown,
        metavar="METHOD",
        help=help,
    )


def original_option(help: str, default: str | bool = False) -> Callable[[Command], Command]:
    """The original of a packed folder; `default` says what is taken without one."""
    return click.option(
        "--source",
        metavar="SRC",
        callback=model_name,
        shell_complete=folders,
        show_default=default,
        help=help,
    )


def shard_option(more: str = "") -> Callable[[Command], Command]:
    """The limit of a weight file; `more` ends its sentence."""
    return click.option(
        "--max-shard-size",
        "max_shard_bytes",
        callback=parse_size,
        metavar="SIZE",
        default="5GB",
        show_default=True,
        help=f"Limit of a weight file{more}.",
    )


revision = click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub id.")


def parse_rows(ctx: click.Context, param: click.Parameter, text: str) -> int | None:
    """A number of rows, None for `auto`."""
    return None if text == AUTO else Count(0).convert(text, param, ctx)


recipe_options = (
    click.option(
        "--recipe",
        "base",
        type=click.Choice(tuple(BITS_BY_ROLE)),
        default="int4",
        show_default=True,
        help="int4: linears INT4, the head and DeltaNet's outputs INT8. int8: all linears INT8. "
        "int3, int2: the MLP in 3 or 2 bits, attention and DeltaNet in one more; most models lose "
        "too much, see the report, and lowbit-run alone serves them.",
    ),
    click.option(
        "--bits",
        "overrides",
        callback=parsed(read_overrides),
        multiple=True,
        metavar="PATTERN=BITS[gGROUP]",
        help="Give modules that match other bits, as in '*.down_proj=8', and another group size, "
        "as in '*.o_proj=4g32'; 16 leaves them as they are. A pattern that begins with mtp, as in "
        "'mtp.*=8', means multi-token prediction, which no other reaches (repeatable).",
    ),
    click.option(
        "--group-size",
        type=click.Choice([*map(str, GROUP_SIZES), "row"]),
        metavar="N|row",
        default="128",
        show_default=True,
        help=f"Weights that share a scale: {', '.join(map(str, GROUP_SIZES))} or a whole row.",
    ),
    method_option(
        "rtn searches for the best scales; absmax takes |w|max, faster and worse. Calibrated "
        "on a text, weighted weighs that search by the inputs, and gptq chooses codes that make "
        "up for errors. gptq+rotate first turns the hidden states into another basis: the same "
        "model, with weights that are easier to quantize; adapters trained on SRC do not fit it. "
        "These and rtn may be followed by +autoround, which learns rounding and scales layer by "
        "layer. auto: rtn where all linears have 8 bits or more, else gptq+rotate (gptq for "
        "Qwen3.5, for mixtures of experts and where the head stays the embedding), or weighted "
        "where that would take longer than 15 minutes on a CPU.",
        default=None,
        shown="as --effort says; auto with a target",
    ),
    click.option(
        "--lm-head",
        "head",
        type=click.Choice(["int4", "int8", "bf16"]),
        show_default="the recipe's, int8",
        help="Bits of the output head.",
    ),
    click.option(
        "--frequent-rows",
        callback=parse_rows,
        metavar="N|auto",
        default="0",
        show_default=True,
        help="Also pack, to INT8 in frequent/, the rows of the head for the N tokens that the "
        "bundled calibration text uses most; the head then has 4 bits unless --lm-head or --bits "
        "gives others. lowbit-run alone reads them: other engines and exports have the head by "
        f"itself. auto: {FREQUENT_ROWS[0]:,} to {FREQUENT_ROWS[-1]:,} where bits are chosen and "
        "that costs less than a head by itself, else none.",
    ),
    click.option(
        "--embedding",
        type=click.Choice(["int8", "bf16"]),
        default="bf16",
        show_default=True,
        help="int8: pack the embedding in groups too, rounded to nearest; lowbit-run alone serves "
        "it. A head that is tied to it shares its codes unless the method rotates.",
    ),
    click.option(
        "--mtp",
        type=click.Choice(["int4", "int8", "bf16", "drop"]),
        show_default="int4 where SRC has one",
        help="Bits of the head for multi-token prediction, by which lowbit-run and vLLM draft "
        "tokens; more bits make better drafts, never other answers. bf16 leaves it as it is, drop "
        "leaves it out.",
    ),
    click.option(
        "--draft-vocabulary",
        type=Count(0),
        metavar="N",
        show_default="32768 with multi-token prediction and more than 100,000 tokens",
        help="Also pack, to INT4 in draft/, the N rows of the head that a text uses most: drafts "
        "are chosen from them alone, which is faster. 0 for none.",
    ),
    click.option(
        "--positive-scales",
        is_flag=True,
        help="Take positive scales only, for engines that need them; a little worse.",
    ),
    click.option(
        "--drop-vision",
        is_flag=True,
        help="Leave the vision tower out; the result then loads as a text model only.",
    ),
)


def calibration_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse, before anything is fetched, a text that cannot be read; a pipe becomes a file."""
    if value is None or ctx.resilient_parsing:
        return value
    from lowbit.convert.texts.calibration import plain_texts, rereadable

    try:
        file = ctx.with_resource(rereadable(value))
        plain_texts(file)
    except (RequestError, ResourceError) as error:
        raise Failure(error) from None
    return file


def usable_device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """The device that a name stands for; a GPU where there is none is refused before any work."""
    if ctx.resilient_parsing:
        return value
    if value == AUTO:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    if value == "cuda":
        from lowbit.convert.original.device import open_device

        try:
            open_device(value)
        except ResourceError as error:
            raise Failure(error) from None
    return value


def make_recipe(
    base: str,
    overrides: tuple["Override", ...],
    group_size: str,
    method: str | None,
    head: str | None,
    embedding: str,
    mtp: str | None,
    draft_vocabulary: int | None,
    frequent_rows: int | None,
    positive_scales: bool,
    drop_vision: bool,
) -> "Recipe":
    """The recipe that the options describe; without a method for `auto` and for an effort."""
    from lowbit.convert.plan.method import Method
    from lowbit.convert.plan.recipe import Recipe

    return Recipe(
        base=base,  # type: ignore[arg-type]  # click checked the choice
        group_size=None if group_size == "row" else int(group_size),
        head=head,  # type: ignore[arg-type]
        embedding=embedding,  # type: ignore[arg-type]
        mtp=mtp,  # type: ignore[arg-type]
        overrides=overrides,
        drop_vision=drop_vision,
        draft_vocabulary=draft_vocabulary,
        frequent_rows=frequent_rows,
        method=None if not method or method == AUTO else Method.parse(method),
        positive_scales=positive_scales,
    )


recipe = gathered("recipe", make_recipe, *recipe_options)


def text_option(
    name: str, help: str, default: str | bool = "the bundled mix"
) -> Callable[[Command], Command]:
    """A file of text; `default` says what is taken without one."""
    return file_option(name, callback=calibration_file, show_default=default, help=help)


def make_calibration(
    calib: Path | None, calib_samples: int | None, calib_length: int, calib_chat: bool
) -> "CalibrationRequest":
    """The calibration that the options describe."""
    from lowbit.convert.quantize.session import CalibrationRequest

    return CalibrationRequest(calib, calib_samples, calib_length, calib_chat)


calibration = gathered(
    "calibration",
    make_calibration,
    text_option(
        "--calib",
        "Text for calibrated methods and targets: .txt, or .jsonl with `text` or `messages`; "
        "`calib-text` writes one with answers of SRC.",
    ),
    click.option(
        "--calib-samples",
        type=Count(),
        metavar="N",
        show_default="256; 64 on a CPU",
        help="Windows of the text at most, spread over it.",
    ),
    click.option(
        "--calib-length",
        type=Count(2),
        metavar="N",
        default=512,
        show_default=True,
        help="Tokens of a window.",
    ),
    click.option("--calib-chat", is_flag=True, help="Apply the model's chat template to the text."),
)
draft_text = text_option(
    "--draft-text",
    "Text whose tokens --draft-vocabulary counts, .txt or .jsonl; best one in the model's own "
    "words, as `calib-text` writes it.",
)
device = device_choice(usable_device)


def eval_texts_option(help: str, default: str) -> Callable[[Command], Command]:
    """Evaluation texts; `default` says which are taken without one."""
    return file_option("--eval-text", "eval_texts", multiple=True, show_default=default, help=help)


eval_text = eval_texts_option(
    "Text to compare logits on; the first gives the headline figures (repeatable). The report "
    "quotes a few lines of it.",
    "200 kB of WikiText-2, then maths and code",
)
gate = click.option(
    "--gate",
    callback=parsed(read_conditions),
    metavar="CONDITIONS",
    help="Exit with 3 where the figures miss a condition, as in 'kl_mean<0.03,top1>0.95' or, for "
    "one text, 'maths.kl_mean<0.05'. Figures: kl_mean, kl_stderr, kl_p95, kl_p99, kl_max, top1 "
    "(a share), ppl_change (0.01 is 1 % worse), cosine, bits_per_weight (of all weight "
    "files), image_kl (of answers about pictures); of `report --long` alone: long_kl and cache_kl "
    "(what an INT8 cache adds).",
)
report_activations = click.option(
    "--activations",
    type=click.Choice(ACTIVATIONS),
    default="exact",
    show_default=True,
    help="int8: also compare with inputs of the packed linears, but for the head's, in eight bits, "
    "as `lowbit-run --activations int8` takes them; half as much work again.",
)
source = click.argument("source", metavar="SRC", callback=model_name, shell_complete=folders)
folder = click.argument(
    "folder", metavar="DIR", type=click.Path(path_type=Path), shell_complete=folders
)
out = click.argument(
    "out",
    metavar="OUT",
    type=click.Path(path_type=Path),
    callback=new_folder,
    shell_complete=folders,
)


def check_gate(
    conditions: Sequence["Condition"], texts: Sequence["Text"], long: bool = False
) -> None:
    """A usage error for a condition on texts, or long texts, that are not going to be measured."""
    from lowbit.convert.measure.gate import check_measured

    try:
        check_measured(conditions, [text.name for text in texts], long)
    except RequestError as error:
        raise click.UsageError(f"--gate: {error}.") from None


def close_gate(outcomes: Sequence["Outcome"]) -> None:
    """Print the conditions that are missed and end with exit code 3, if there are any."""
    missed = [outcome for outcome in outcomes if not outcome.met]
    for outcome in missed:
        got = f"got {outcome.found:.6g}" if outcome.found is not None else outcome.reason
        click.echo(f"gate missed: expected {outcome.condition}, {got}", err=True)
    if missed:
        raise click.exceptions.Exit(3)
