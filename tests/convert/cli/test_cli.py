"""The commands: results on stdout, one object with --json; everything else on stderr."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import Result
from safetensors.torch import load_file

from lowbit.convert.cli.main import main
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from lowbit.formats.shell.options import parse_size

if TYPE_CHECKING:
    from tests.convert.conftest import Cli, Hashes, MakeModel
    from tests.hub_server import HubServer


def parsed(result: Result) -> dict[str, Any]:
    """The object that --json printed; stderr is for people and for nobody here."""
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout, parse_constant=lambda name: 1 / 0)
    assert content["schema"] == 1
    assert result.stdout.startswith("{")
    assert result.stdout.endswith("}\n")
    assert result.stdout.count("\n") == 1
    return content


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_model: "MakeModel") -> Path:
    return make_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def packed(cli: "Cli", model: Path, tmp_path: Path) -> Path:
    assert cli(model, tmp_path / "packed").exit_code == 0
    return tmp_path / "packed"


def test_quantize(cli: "Cli", model: Path, tmp_path: Path, hashes: "Hashes") -> None:
    content = parsed(cli("quantize", model, tmp_path / "a", "--json"))
    assert content["folder"] == str(tmp_path / "a")
    assert content["resumed_steps"] == 0
    weights = sum(info.nbytes for info in open_checkpoint(model).tensors.values())
    assert content["source_bytes"] == weights
    assert content["output_bytes"] == (tmp_path / "a" / "model.safetensors").stat().st_size
    assert len(content["quality"]["weights"]) == 15
    assert (tmp_path / "a" / "quality.json").exists()
    assert (tmp_path / "a" / "quality.html").exists()
    # The command's name may be left out, and its options change what they say.
    said = cli(model, tmp_path / "b", "--recipe", "int4", "--group-size", "128")
    assert said.exit_code == 0
    first, report = said.stderr.splitlines()
    assert first == (
        "rtn on 1 core, a few seconds; --method weighted: a few seconds, "
        "the loss typically a third lower"
    )
    assert report == f"report: {tmp_path / 'b' / 'quality.html'}"
    assert "bits per weight" in said.stdout
    assert f"! `{model}` has no tokenizer.json: lowbit-run takes no text" in said.stdout
    same = hashes(tmp_path / "a")
    assert {name: hashes(tmp_path / "b")[name] for name in same if name != "README.md"} == {
        name: digest for name, digest in same.items() if name != "README.md"
    }


def test_a_conversion_ends_with_what_comes_next(cli: "Cli", model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "my model"
    shutil.copytree(model, source)
    shutil.copy(Path("examples/models/tiny-qwen3/tokenizer.json"), source)
    said = cli(source, out, "--method", "rtn")
    assert said.exit_code == 0, said.output
    assert "no tokenizer" not in said.stdout
    assert said.stderr.splitlines()[-3:] == [
        f"next: lowbit-convert report '{out}'",
        f"next: lowbit-run '{out}'",
        f"next: lowbit-run serve '{out}'",
    ]


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ((), {"recipe": "int4", "scales": "signed", "group_size": 128, "lm_head": None}),
        (("--method", "absmax", "--group-size", "row"), {"scales": "absmax", "group_size": None}),
        (("--positive-scales", "--lm-head", "bf16"), {"scales": "positive", "lm_head": "bf16"}),
        (
            ("--bits", "*.mlp.*=8", "--bits", "*.down_proj=4", "--recipe", "int8"),
            {"overrides": ["*.mlp.*=8", "*.down_proj=4"], "recipe": "int8"},
        ),
    ],
)
def test_options_make_the_recipe(
    cli: "Cli", model: Path, options: tuple[str, ...], recipe: dict[str, Any]
) -> None:
    content = parsed(cli("plan", model, "--json", *options))
    assert recipe.items() <= content["recipe"].items()


def test_plan(cli: "Cli", model: Path) -> None:
    content = parsed(cli("plan", model, "--json", "--max-shard-size", "200kB"))
    tensors = {row["name"]: row for row in content["tensors"]}
    assert tensors.keys() == open_checkpoint(model).tensors.keys()
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    assert (down["fate"], down["scheme"], down["shape"]) == ("quantized", "INT4 g128", [128, 256])
    assert down["output_bytes"] == 128 * 256 // 2 + 2 * 128 * 2 + 16
    assert all(file["size_bytes"] <= 200_000 for file in content["files"])
    vllm = content["vllm"]
    assert "leave those off, or convert with --positive-scales" in vllm.pop("warning")
    assert vllm == {"loads": True, "reasons": [], "release": "0.20", "options": []}
    assert content["lowbit_run"] == {"serves": True, "reason": None}
    refused = parsed(cli("plan", model, "--json", "--bits", "*.o_proj=5"))["vllm"]
    assert (refused["loads"], refused["release"], refused["options"]) == (False, None, [])


def test_plan_for_people(cli: "Cli", model: Path, tiny: Path) -> None:
    result = cli("plan", model, "--bits", "*.o_proj=5")
    assert result.exit_code == 0
    assert result.stderr.startswith("--report compares no logits: ")
    assert "vLLM: cannot load the result" in result.stdout
    assert "lowbit-run: cannot load the result" in result.stdout
    assert "INT5 g128" in result.stdout
    untied = cli("plan", tiny).stdout
    assert "the head is untied" in untied
    assert "vLLM: can load the result from 0.20 on (quantized lm_head)\n! scales may be" in untied
    assert "! scales" not in cli("plan", tiny, "--positive-scales").stdout
    assert "untied" not in cli("plan", tiny, "--lm-head", "bf16").stdout


def test_plan_of_a_hub_id_is_that_of_the_folder(cli: "Cli", model: Path, hub: "HubServer") -> None:
    commit = hub.add("org/model", model)
    local, remote = (parsed(cli("plan", name, "--json")) for name in (model, "org/model"))
    assert remote.pop("source") == "org/model"
    assert local.pop("source") == str(model)
    for content in (local, remote):
        content.pop("peak_ram_bytes")
    named = len(f'"org/model""{commit}"') - len("nullnull")  # in lowbit.json
    assert remote.pop("folder_bytes") - local.pop("folder_bytes") == named
    assert remote == local


def test_quantize_of_a_hub_id(
    cli: "Cli", model: Path, hub: "HubServer", tmp_path: Path, hashes: "Hashes"
) -> None:
    commit = hub.add("org/model", model)
    parsed(cli("org/model", tmp_path / "remote", "--json"))
    parsed(cli(model, tmp_path / "local", "--json"))
    source = json.loads((tmp_path / "remote" / "lowbit.json").read_text())["source"]
    assert (source["repo"], source["commit"]) == ("org/model", commit)
    skipped = {"lowbit.json", "README.md"}
    remote, local = hashes(tmp_path / "remote"), hashes(tmp_path / "local")
    assert remote.keys() == local.keys()
    assert all(remote[name] == local[name] for name in remote if name not in skipped)


def test_inspect(cli: "Cli", packed: Path) -> None:
    content = parsed(cli("inspect", packed, "--json"))
    modules = {row["name"]: row for row in content["modules"]}
    assert modules["model.layers.1.mlp.up_proj"]["stored"] == "INT4 g128"
    assert modules["lm_head"]["stored"] == "INT8 g128"
    assert modules["model.embed_tokens"]["stored"] == "BF16"
    assert content["tensors"] == len(open_checkpoint(packed).tensors)
    assert content["bytes"] == sum(row["bytes"] for row in content["modules"])
    result = cli("inspect", packed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "INT4 g128" in result.stdout


def test_verify(cli: "Cli", packed: Path, model: Path) -> None:
    content = parsed(cli("verify", packed, "--json"))
    assert (content["ok"], content["source_tensors"]) == (True, None)
    content = parsed(cli("verify", packed, "--source", model, "--json"))
    assert content["source_tensors"] == 25
    (packed / "generation_config.json").write_text("{}")
    result = cli("verify", packed, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: `generation_config.json` has 2 bytes")


@pytest.mark.parametrize("command", ["inspect", "verify", "report", "plan"])
def test_missing_folder(cli: "Cli", tmp_path: Path, command: str) -> None:
    result = cli(command, tmp_path / "missing", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_evaluation_text_is_read_before_the_work(
    cli: "Cli", model: Path, tmp_path: Path, content: bytes | None
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    result = cli(model, tmp_path / "out", "--report", "--eval-text", text)
    assert result.exit_code == 1
    assert "text.txt" in result.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_paths_with_brackets_are_shown_as_they_are(cli: "Cli", model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "[red]x[" / "model"
    shutil.copytree(model, folder)
    for arguments in ((folder, folder.parent / "o"), ("plan", folder), ("inspect", folder)):
        result = cli(*arguments)
        assert result.exit_code == 0, result.output
        assert "[red]x[" in result.stdout


def test_no_arguments_show_the_usage(cli: "Cli") -> None:
    result = cli()
    assert result.exit_code == 2
    assert "Usage: " in result.output


def test_version(cli: "Cli") -> None:
    from importlib.metadata import version

    assert version("lowbit") in cli("--version").stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2_000_000_000),
        ("500 MB", 500_000_000),
        ("1.5GiB", 3 << 29),
        ("64k", 64_000),
        ("7", 7),
        ("1tb", 10**12),
        ("1Kib", 1024),
    ],
)
def test_sizes(text: str, size: int) -> None:
    context = click.Context(main)
    assert parse_size(context, click.Option(["--size"]), text) == size


def table_width(text: str) -> int:
    """Columns of the widest table row; rows begin with a space."""
    return max(len(line.rstrip()) for line in text.splitlines() if line.startswith(" "))


def test_plan_of_a_hybrid(cli: "Cli", hybrid: Path) -> None:
    content = parsed(cli("plan", hybrid, "--json"))
    stored = load_file(hybrid / "model.safetensors")
    counts = Counter({"decoder": 0, "mtp": 0, "vision": 0})
    for name, tensor in stored.items():
        part = "mtp" if name.startswith("mtp.") else "vision" if "visual" in name else "decoder"
        counts[part] += tensor.numel()
    assert content["parameters"] == counts
    assert len(content["tensors"]) == 81 + 1  # the embedding is read a second time
    result = cli("plan", hybrid)
    assert table_width(result.stdout) <= 80
    lines = {line[:24].strip(): line.split() for line in result.stdout.splitlines()}
    assert "INT8" in lines["linear_attn.out_proj"]
    assert "F32" in lines["linear_attn.A_log"]
    assert "7" in lines["multi-token prediction"]  # norms
    assert "INT4" in lines["mtp.fc"]
    assert "11" in lines["vision tower"]
    assert "text classes" not in result.stdout


def test_vision_is_dropped_on_request(
    cli: "Cli", hybrid: Path, model: Path, tmp_path: Path
) -> None:
    said = cli("plan", hybrid, "--drop-vision").stdout
    assert "11 dropped (vision tower: as the recipe says)" in said
    assert "text classes only" in said
    done = parsed(cli(hybrid, tmp_path / "out", "--drop-vision", "--mtp", "int8", "--json"))
    content = parsed(cli("inspect", tmp_path / "out", "--json"))
    modules = {row["name"]: row for row in content["modules"]}
    assert "vision tower" not in modules
    assert modules["mtp.fc"]["stored"] == "INT8 g128"
    assert modules["mtp.layers.0.mlp.up_proj"]["shape"] == [768, 256]
    norms = [row for name, row in modules.items() if "mtp" in name and row["bits"] is None]
    assert len(norms) == 7
    assert {row["name"] for row in done["quality"]["weights"]} >= {"mtp.fc", "lm_head"}
    recipe = json.loads((tmp_path / "out" / "lowbit.json").read_text())["recipe"]
    assert recipe["drop_vision"] is True
    shown = cli("inspect", tmp_path / "out").stdout.replace("\n", " ")
    assert "drop_vision True" in shown
    result = cli("plan", model, "--drop-vision")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: the checkpoint has no vision tower to drop")


def test_inspect_of_a_hybrid_adds_up(cli: "Cli", hybrid: Path, tmp_path: Path) -> None:
    parsed(cli(hybrid, tmp_path / "out", "--json"))
    content = parsed(cli("inspect", tmp_path / "out", "--json"))
    assert content["bytes"] == sum(row["bytes"] for row in content["modules"])
    assert table_width(cli("inspect", tmp_path / "out").stdout) <= 80


def test_a_mistyped_command_is_pointed_out(cli: "Cli", tmp_path: Path) -> None:
    result = cli("inspct", tmp_path / "out")
    assert result.exit_code == 2
    assert "did you mean the command 'inspect'?" in result.stderr
    assert not (tmp_path / "out").exists()
