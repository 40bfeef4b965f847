"""Bad input to `lowbit-convert SRC OUT`: exit code 1, one message, a hint, and nothing lost."""

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import Tensor

from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.convert.edits import set_config
from tests.convert.fixture_types import Cli, Hashes, MakeModel
from tests.lanes import in_commands

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
SHARDS = ("one.safetensors", "two.safetensors")


def assert_refused(result: Result, message: str, hint: str | None = None) -> None:
    """One error message that matches, a hint that does, the line of begun work, and no more."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert result.stdout == ""
    stderr = re.sub(r"\Artn on 1 core, .*\n", "", result.stderr)
    said, _, advice = stderr.strip().partition("\n\nhint: ")
    assert re.fullmatch(f"Error: {message}", said), said
    assert "\n" not in said
    assert "Traceback" not in result.stderr
    assert bool(advice) == (hint is not None), advice
    assert re.search(hint or "", advice), advice


@pytest.fixture
def refuse(cli: Cli, hashes: Hashes, tmp_path: Path) -> Callable[..., None]:
    """Convert; expect a refusal, no folder at OUT, and a source as it was."""

    def check(
        source: Path, message: str, hint: str | None, *options: str, partial: bool = False
    ) -> None:
        out = tmp_path / "results" / "out"
        before = hashes(source) if source.is_dir() else {}
        assert_refused(cli(source, out, *options), message, hint)
        assert not out.exists()
        assert out.with_name("out.partial").exists() == partial
        assert out.parent.exists() == partial
        assert (hashes(source) if source.is_dir() else {}) == before

    return check


Refuse = Callable[..., None]


@pytest.mark.parametrize("name", ["missing", "no/such/folder", ""])
def test_missing_folder(refuse: Refuse, tmp_path: Path, cli: Cli, name: str) -> None:
    if name:
        refuse(tmp_path / name, ".*is neither a folder nor a model on the Hub", "give a folder")
    else:
        result = cli("", tmp_path / "out")
        assert_refused(result, "`` is neither a folder nor a model on the Hub", "give a folder")


def test_file_instead_of_a_folder(refuse: Refuse, small: Path) -> None:
    refuse(small / "config.json", ".*config.json` is not a folder", "folder of the model")


def test_not_a_checkpoint(refuse: Refuse, tmp_path: Path, small: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuse(
        tmp_path / "empty", ".*empty` is not a checkpoint: it has no config.json", "give the folder"
    )
    (small / "model.safetensors").rename(small / "model.bin")
    refuse(small, ".*small` is not a checkpoint: it holds no .safetensors file", "convert .bin")


@pytest.mark.parametrize("content", ["{", "[]", "\x00", '"qwen3"'])
def test_broken_config(refuse: Refuse, small: Path, content: str) -> None:
    (small / "config.json").write_text(content)
    refuse(small, ".*config.json` (is not valid JSON|does not hold a JSON object).*", None)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2_moe", None, 7])
def test_unknown_architecture(refuse: Refuse, small: Path, model_type: object) -> None:
    set_config(small, model_type=model_type)
    message = f"config.json: model_type `{model_type}` is not supported"
    refuse(small, message, "supported: qwen3, .*")


def test_rope_scaling(refuse: Refuse, small: Path) -> None:
    set_config(small, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    implemented = "implemented: default, llama3, yarn"
    refuse(small, "config.json: rope scaling `dynamic` is not implemented", implemented)


def test_index_that_names_a_missing_shard(
    refuse: Refuse, tmp_path: Path, make_model: MakeModel
) -> None:
    source = make_model(tmp_path / "source", shards=SHARDS)
    (source / "two.safetensors").unlink()
    refuse(source, "the index names shard `two.safetensors`, which is missing from .*", "download")


@pytest.mark.parametrize("keep", [5, 1000, -1])
def test_truncated_shard(refuse: Refuse, tmp_path: Path, make_model: MakeModel, keep: int) -> None:
    source = make_model(tmp_path / "source", shards=SHARDS)
    os.truncate(source / "two.safetensors", keep % (source / "two.safetensors").stat().st_size)
    hint = "again" if keep == -1 else None
    refuse(source, "`two.safetensors` is .*cut short.*", hint)


def test_tensors_that_do_not_fit(refuse: Refuse, tmp_path: Path, make_model: MakeModel) -> None:
    source = make_model(tmp_path / "source", edit=lambda tensors: tensors.pop(UP))
    refuse(source, f"the checkpoint lacks `{UP}`", "do not belong together")


@in_commands("model.layers.1.mlp.up_proj.weight-torch.float16")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (UP, torch.bfloat16),
        (UP, torch.float16),
        (NORM, torch.float32),
        (EMBEDDING, torch.bfloat16),
        (EMBEDDING, torch.float32),
    ],
    ids=str,
)
def test_nan_and_infinity_are_counted(
    refuse: Refuse,
    tmp_path: Path,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        values = tensors[name].view(-1)
        values[-5:] = torch.nan  # in the last block only, or in a block of its own
        values[len(values) // 2] = torch.inf
        values[len(values) // 2 + 1] = -torch.inf

    monkeypatch.setattr("lowbit.convert.pipeline.conversion.block_elements", lambda *_: 10_000)
    source = make_model(tmp_path / "source", dtype, edit=edit)
    refuse(source, f"`{name}` holds 5 NaN and 2 infinite values", "damaged", partial=True)


def test_opposite_infinities_in_the_first_block(
    refuse: Refuse, tmp_path: Path, make_model: MakeModel
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[UP][0, :2] = torch.tensor([torch.inf, -torch.inf])

    source = make_model(tmp_path / "source", edit=edit)
    refuse(source, f"`{UP}` holds 0 NaN and 2 infinite values", "damaged", partial=True)


def test_large_finite_weights_are_no_infinities(
    cli: Cli, tmp_path: Path, make_model: MakeModel
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[EMBEDDING].fill_(3e38)

    result = cli(make_model(tmp_path / "source", edit=edit), tmp_path / "out")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            ("--bits", "*.k_proj=8"),
            r"`.*0.self_attn.q_proj` \(INT4 g128\) and `.*0.self_attn.k_proj` \(INT8 g128\) are "
            "fused and need one scheme",
            "cover the whole set",
        ),
        (("--max-ram", "10MB"), r"--max-ram 10\.00 MB is too little: .*", "give at least"),
        (("--revision", "main"), ".*small` is a folder, a revision .* needs a Hub id", "leave"),
    ],
)
def test_options_that_do_not_fit_the_model(
    refuse: Refuse, small: Path, options: tuple[str, ...], message: str, hint: str
) -> None:
    refuse(small, message, hint, *options)


def test_too_little_memory_is_refused_before_the_source_is_looked_for(
    refuse: Refuse, tmp_path: Path
) -> None:
    refuse(tmp_path / "none", r"--max-ram 10\.00 MB is too little: .*", "give", "--max-ram", "10MB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_where_there_is_none(refuse: Refuse, small: Path) -> None:
    message = "no CUDA device was found"
    refuse(small, message, "use --device cpu", "--device", "cuda")


def test_own_result_as_a_source(refuse: Refuse, cli: Cli, small: Path, tmp_path: Path) -> None:
    assert cli(small, tmp_path / "packed").exit_code == 0
    message = r"the source is already quantized \(`compressed-tensors`\)"
    refuse(tmp_path / "packed", message, "BF16 checkpoint")


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails_from(call: Callable[..., int], first: int) -> Callable[..., int]:
    """Full from the call of that number on."""
    calls = iter(range(1 << 30))
    return lambda *arguments: call(*arguments) if next(calls) < first else no_space()


@in_commands("fsync-0", "pwrite-0")
@pytest.mark.parametrize(
    ("function", "first"),
    [("posix_fallocate", 0), ("pwrite", 0), ("pwrite", 9), ("fsync", 0), ("fsync", 5)],
)
def test_full_disk(
    cli: Cli,
    hashes: Hashes,
    tmp_path: Path,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    first: int,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fails_from(getattr(os, function), first))
        result = cli(small, out)
    words = r"the disk is full(: `.*out.partial` needs .*| \(No space left on device\))"
    assert_refused(result, words, "run the same command")
    assert not out.exists()
    assert (tmp_path / "out.partial").is_dir()
    assert cli(small, out).exit_code == 0
    assert cli(small, tmp_path / "fresh").exit_code == 0
    fresh = hashes(tmp_path / "fresh")
    weights = ("model.safetensors", "config.json", "lowbit.json")
    assert [hashes(out)[name] for name in weights] == [fresh[name] for name in weights]


def test_disk_full_for_the_journal(
    cli: Cli, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("lowbit.convert.pipeline.journal.Journal.append", no_space)
        assert_refused(cli(small, tmp_path / "out"), "the disk is full .*", "free some space")
    assert cli(small, tmp_path / "out").exit_code == 0


def test_folder_that_may_not_be_written(
    cli: Cli, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = cli(small, tmp_path / "out")
    assert_refused(result, f"`{tmp_path / 'out.partial'}`: Permission denied")


def test_source_cut_short_while_it_is_read(
    cli: Cli, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = open_checkpoint(small).tensors["model.norm.weight"]
    path = small / info.file

    def cut(*_: object) -> int:
        os.truncate(path, info.offset + 10)
        return 1 << 20

    monkeypatch.setattr("lowbit.convert.pipeline.conversion.block_elements", cut)
    result = cli(small, tmp_path / "out")
    assert_refused(result, r"`model.safetensors` ends at byte \d+, expected \d+", "cut short")
    assert not (tmp_path / "out").exists()


def test_interrupt(cli: Cli, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.convert.pipeline.conversion._finish", stop)
    result = cli(small, tmp_path / "out")
    assert result.exit_code == 130
    begun, _, said = result.stderr.partition("\n")
    assert begun.startswith("rtn on 1 core")
    assert said.startswith("\ninterrupted; finished tensors are kept in")
    assert said.count("\n") == 2
    assert (tmp_path / "out.partial").is_dir()
    assert not (tmp_path / "out").exists()


def test_an_end_by_sigterm_tells_what_is_kept(
    cli: Cli, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> int:
        sys.exit(143)  # as the entry of a command does on SIGTERM

    monkeypatch.setattr("lowbit.convert.pipeline.conversion._finish", stop)
    result = cli(small, tmp_path / "out")
    assert result.exit_code == 143
    assert f"ended; finished tensors are kept in `{tmp_path / 'out.partial'}`" in result.stderr
    assert (tmp_path / "out.partial").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--group-size", "100"), "'100' is not one of"),
        (("--recipe", "int5"), "'int5' is not one of"),
        (("--method", "awq"), "method `awq` is not known"),
        (("--lm-head", "int2"), "'int2' is not one of"),
        (("--device", "tpu"), "'tpu' is not one of"),
        (("--max-ram", "abc"), "'abc' is not a size"),
        (("--max-ram", "0"), "'0' must be positive"),
        (("--max-ram", "-1GB"), "'-1GB' is not a size"),
        (("--max-shard-size", "9" * 400), "is not a size"),
        (("--bits", "*.down_proj"), "is not of the form PATTERN=BITS"),
        (("--bits", "*.down_proj=9"), "bits must be 2 to 8"),
        (("--eval-text", "text.txt"), "--eval-text is for"),
        (("--no-such-option",), "No such option"),
    ],
)
def test_usage_errors(
    cli: Cli, tmp_path: Path, small: Path, options: tuple[str, ...], message: str
) -> None:
    result = cli(small, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == [small]


def test_debug_shows_the_traceback(cli: Cli, tmp_path: Path) -> None:
    from lowbit.formats.errors import CheckpointError

    result = cli(tmp_path / "missing", tmp_path / "out", "--debug")
    assert isinstance(result.exception, CheckpointError)
