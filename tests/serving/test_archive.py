"""A model folder as one file: equal bytes for equal folders, and nothing unpacked that was not packed so."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from ctr_pe import load
from ctr_pe.cli import main
from ctr_pe.serving.archive import pack, unpack
from ctr_pe.utils.errors import UserError
from tests.support.golden_folders import FOLDERS

MODEL = FOLDERS / "din_cape" / "model"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack(MODEL, tmp_path / "model.tar")
    return tmp_path / "model.tar"


def test_a_folder_comes_back_and_is_a_model(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    assert main(["pack", "--model", str(MODEL), "--output", str(tmp_path / "again.tar")]) == 0
    assert capsys.readouterr().out == f"{digest}  {tmp_path / 'again.tar'}\n"
    assert main(["unpack", str(packed), "--model", str(tmp_path / "made")]) == 0
    assert capsys.readouterr().out == f"{digest}  {tmp_path / 'made'}\n"
    assert content(tmp_path / "made") == content(MODEL)
    assert repr(load(tmp_path / "made")) == repr(load(MODEL))
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--status", "model.tar.sha256"], cwd=tmp_path, check=True)


def test_equal_folders_are_equal_files(packed: Path, tmp_path: Path) -> None:
    """Whatever their dates, owners' rights, names and order on disk."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    for name in sorted(content(MODEL), reverse=True):
        shutil.copyfile(MODEL / name, other / name)
        os.utime(other / name, (1, 1))
        (other / name).chmod(0o600)
    pack(other, tmp_path / "other.tar")
    assert (tmp_path / "other.tar").read_bytes() == packed.read_bytes()


def test_a_model_that_is_served_is_replaced(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    shutil.copytree(FOLDERS / "dien_none" / "model", folder)
    unpack(packed, folder)
    assert content(folder) == content(MODEL)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(UserError, match="exists and is not a model folder"):
        unpack(packed, other)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_another_hash_is_one_line_and_leaves_nothing(packed: Path, tmp_path: Path) -> None:
    digest, folder = pack(MODEL, packed), tmp_path / "made"
    assert unpack(packed, folder, digest.upper()) == digest
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=rf"damaged, or another file: its SHA-256 is {digest}, not {'0' * 64}"):
        unpack(packed, folder, "0" * 64)
    with pytest.raises(UserError, match=r"sha256=: 64 hexadecimal digits, not 'abc'"):
        unpack(packed, folder, "abc")
    packed.write_bytes(packed.read_bytes() + b"\0")
    with pytest.raises(UserError, match="damaged, or another file"):
        unpack(packed, folder)
    packed.with_name("model.tar.sha256").unlink()
    with pytest.raises(UserError, match=r"model\.tar\.sha256: no such file: give the hash with sha256="):
        unpack(packed, folder)
    with pytest.raises(UserError, match="no such file"):
        unpack(tmp_path / "modl.tar", folder, digest)
    assert not folder.exists()


def archive_of(file: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> str:
    with tarfile.open(file, "w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return hashlib.sha256(file.read_bytes()).hexdigest()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


GOOD = [(f"model/{name}", data) for name, data in content(MODEL).items()]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([(member("../evil"), b"x")], "'../evil' is no file of a model folder"),
        ([(member("/etc/evil"), b"x")], "'/etc/evil' is no file of a model folder"),
        ([(member("model/.."), b"x")], "'model/..' is no file of a model folder"),
        ([(member("model/a/b"), b"x")], "'model/a/b' is no file of a model folder"),
        ([(member("model/a", tarfile.SYMTYPE, "/etc/passwd"), b"")], "'model/a' is no file of a model folder"),
        ([(member("model/a", tarfile.LNKTYPE, "/etc/passwd"), b"")], "'model/a' is no file of a model folder"),
        ([(member("model/a", tarfile.FIFOTYPE), b"")], "'model/a' is no file of a model folder"),
        ([(member("model/a"), b"x"), (member("model/a"), b"y")], "'a' is there twice"),
        ([*((member(name), data) for name, data in GOOD), (member("model/more"), b"x")], "'more' is none of the"),
        ([(member(name), data[:-1]) for name, data in GOOD if "json" not in name]
         + [(member(name), data) for name, data in GOOD if "json" in name], "damaged: it is not what model.json says"),
        ([(member(name), data) for name, data in GOOD if "safetensors" not in name], "the model folder is incomplete"),
        ([], "it has no model.json"),
    ],
)  # fmt: skip
def test_what_was_not_packed_so_is_refused(
    members: list[tuple[tarfile.TarInfo, bytes]], message: str, tmp_path: Path
) -> None:
    file, folder = tmp_path / "strange.tar", tmp_path / "made"
    digest = archive_of(file, members)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        unpack(file, folder, digest)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["strange.tar"]


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.tar"
    for data in (b"", b"PK\x03\x04 no tar", b"x" * 5000):
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"model\.tar"):
            unpack(file, tmp_path / "made", hashlib.sha256(data).hexdigest())
    assert not (tmp_path / "made").exists()


def test_a_damaged_folder_is_not_packed(tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "columns.json").write_text("{}")
    with pytest.raises(UserError, match=r"columns\.json: damaged"):
        pack(folder, tmp_path / "model.tar")
    assert not (tmp_path / "model.tar").exists()
