"""Names of what a packed folder and the folders inside it hold."""

from pathlib import Path

from lowbit.formats.row_folders import ROW_FILES, entries, name_in, row_folders


def test_entries(tmp_path: Path) -> None:
    for name in ROW_FILES:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "config.json").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "inner").touch()
    names = {"config.json", "other", "draft/head.safetensors", "frequent/head.safetensors"}
    assert {name_in(tmp_path, path) for path in entries(tmp_path)} == names


def test_links_are_entries_themselves(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "frequent").symlink_to(tmp_path / "outside")
    assert row_folders(folder) == []
    assert list(entries(folder)) == [folder / "frequent"]
