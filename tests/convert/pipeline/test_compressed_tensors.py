"""Packed folders in the releases of compressed-tensors that engines pin, each in its own process.

`make test-clients` puts release 0.17, which vLLM 0.33 pins, beside the environment's own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from lowbit.convert import Recipe
from lowbit.convert.plan.recipe import Override
from tests.conversions import convert
from tests.oracle import dequantized_weights
from tests.short_models import Shorten

pytestmark = pytest.mark.clients
OLDER = Path(sys.prefix) / "compressed-tensors-0.17"
NOT_LOADED = "mtp."  # by transformers
READ = """
import json, sys
import compressed_tensors, torch, transformers
from safetensors.torch import load_file
found = {"version": compressed_tensors.__version__}
for folder in sys.argv[1:]:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            model(torch.tensor([[1, 2, 3]]))  # unpacks on first use
    except RuntimeError as error:
        found[folder] = str(error)
        continue
    theirs = {name.replace("language_model.", ""): x for name, x in model.state_dict().items()}
    expected = load_file(folder + ".safetensors")
    found[folder] = {name: torch.equal(theirs[name], x) for name, x in expected.items()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folders(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed folders, and beside each the weights that it means."""
    place = tmp_path_factory.mktemp("packed")
    recipes = {
        "default": ("tiny-qwen3", Recipe()),
        "hybrid": ("tiny-qwen3.5", Recipe()),
        "int8": ("tiny-qwen3", Recipe("int8")),
        "two": ("tiny-qwen3", Recipe(overrides=(Override("*.down_proj", 2),))),
        "three": ("tiny-qwen3", Recipe(overrides=(Override("*.down_proj", 3),))),
    }
    for name, (model, recipe) in recipes.items():
        convert(shorten(model), place / name, recipe)
        weights = dequantized_weights(place / name)
        if "lm_head.weight" not in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        save_file(
            {
                name.replace("language_model.", ""): weight.contiguous()
                for name, weight in weights.items()
                if not name.startswith(NOT_LOADED)
            },
            place / f"{name}.safetensors",
        )
    return {name: place / name for name in recipes}


def read_by(path: Path | None, folders: dict[str, Path]) -> dict[str, object]:
    """Results of READ by folder's name, with the compressed-tensors of a path in front."""
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    command = [sys.executable, "-c", READ, *map(str, folders.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {"version": found["version"]} | {name: found[str(x)] for name, x in folders.items()}


def all_equal(found: object) -> bool:
    assert isinstance(found, dict), found
    assert len(found) > 20
    return all(found.values())


def test_own_release_reads_the_same_weights(folders: dict[str, Path]) -> None:
    found = read_by(None, folders)
    assert str(found.pop("version")).startswith("0.20")
    assert all(all_equal(one) for one in found.values()), found


def test_release_that_vllm_pins_reads_the_same_weights(folders: dict[str, Path]) -> None:
    found = read_by(OLDER, folders)
    assert str(found.pop("version")).startswith("0.17")
    three = found.pop("three")
    assert all(all_equal(one) for one in found.values()), found
    # ten codes a word, as it writes them; from 0.18 on codes cross words
    assert "shape" in str(three) or "size" in str(three), three
