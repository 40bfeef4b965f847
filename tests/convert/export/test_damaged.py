"""Export refuses a packed folder that differs from its lowbit.json by one bit."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.convert import Recipe
from lowbit.convert.export.export import export
from lowbit.convert.report.reporting import LogitRequest, prepare_report, write_full_report
from lowbit.formats.errors import LowbitError
from lowbit.formats.packed import open_packed
from tests.conversions import convert

if TYPE_CHECKING:
    from tests.convert.conftest import Hashes, MakeModel

FOLDER = "packed"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_model: "MakeModel") -> Path:
    """A folder with `source`, its conversion `packed`, and the export of that, `whole`."""
    folder = tmp_path_factory.mktemp("damaged")
    source = make_model(folder / "source", num_hidden_layers=1)
    (source / "LICENSE").write_text("do what you like")
    convert(source, folder / FOLDER, Recipe(head="bf16"), max_shard_bytes=100_000)
    export(folder / FOLDER, folder / "whole", "mlx")
    return folder


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


@given(data=st.data())
def test_one_flipped_bit(made: Path, hashes: "Hashes", data: st.DataObject) -> None:
    files = sorted(path.name for path in (made / FOLDER).iterdir())
    name = data.draw(st.sampled_from(files))
    path = made / FOLDER / name
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    target: Any = data.draw(st.sampled_from(["mlx", "gptq", "awq"]))
    before = sorted(entry.name for entry in made.iterdir())
    flip(path, bit)
    try:
        export(made / FOLDER, made / "out", target)
    except LowbitError:
        pass
    else:
        # A bit of lowbit.json may stand for nothing that an export holds.
        assert name == "lowbit.json"
        shutil.rmtree(made / "out")
        export(made / FOLDER, made / "out", "mlx")
        assert hashes(made / "out") == hashes(made / "whole")
        shutil.rmtree(made / "out")
    finally:
        flip(path, bit)
    assert sorted(entry.name for entry in made.iterdir()) == before


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "layernorm.weight"])
def test_the_tensor_is_named(cli: Any, made: Path, tmp_path: Path, suffix: str) -> None:
    from lowbit.formats.safetensors.checkpoint import open_checkpoint

    packed = Path(shutil.copytree(made / FOLDER, tmp_path / FOLDER))
    tensors = open_checkpoint(packed).tensors
    info = next(info for name, info in tensors.items() if name.endswith(suffix))
    flip(packed / info.file, 8 * (info.offset + info.nbytes - 1))
    done = cli("export", packed, tmp_path / "out", "--to", "gptq")
    assert done.exit_code == 1
    assert f"`{info.name}` in `{info.file}` is not what lowbit.json says" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_a_damaged_folder_is_not_measured(made: Path, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(made / FOLDER, tmp_path / FOLDER))
    flip(min(packed.glob("*.safetensors")), 8 * 90_000)
    opened = open_packed(packed)
    origin = prepare_report(opened, str(made / "source"), None)
    with pytest.raises(LowbitError, match=r"is not what lowbit.json says"):
        write_full_report(opened, origin, LogitRequest(()), lambda *_: None)


def test_a_folder_without_manifest_gets_a_note(made: Path, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(made / FOLDER, tmp_path / FOLDER))
    (packed / "lowbit.json").unlink()
    done = export(packed, tmp_path / "out", "mlx")
    assert done.notes[-1] == (
        "the source has no lowbit.json: nothing says whether its bytes are right"
    )
    assert not export(made / FOLDER, tmp_path / "other", "mlx").notes
