"""Fetching: only files with the published md5 sums are used, and an interrupted download goes on."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ctr_pe.cli import main
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.published.download import fetch
from ctr_pe.data.published.sets import AMAZON, KUAI, SETS
from ctr_pe.utils.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "label,user_id,item_id,cate_id,item_history,cate_history\n"
FILES = {
    "train.csv": HEADER + "1,7,3,1,2,1\n0,7,9,2,2,1\n1,7,4,2,2^3,1^1\n0,7,8,2,2^3,1^1\n",
    "test.csv": HEADER + "1,7,5,1,2^3^4,1^1^2\n0,7,6,2,2^3^4,1^1^2\n",
}


def md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


SMALL = replace(AMAZON, files={name: md5(text) for name, text in FILES.items()})


class Hub:
    """Takes the arguments of hf_hub_download; each call sends at most ``per_call`` more bytes before the line drops."""

    def __init__(self, per_call: int = 10_000) -> None:
        self.per_call, self.sent, self.calls = per_call, 0, []

    def __call__(self, *, repo_id: str, filename: str, repo_type: str, local_dir: Path) -> str:
        self.calls.append((repo_id, filename, repo_type))
        local_dir.mkdir(parents=True, exist_ok=True)
        whole, partial = FILES[filename].encode(), local_dir / f"{filename}.incomplete"
        here = partial.stat().st_size if partial.exists() else 0
        if not (local_dir / filename).exists():
            with partial.open("ab") as file:
                self.sent += file.write(whole[here : here + self.per_call])
            if partial.stat().st_size < len(whole):
                raise ConnectionError("line dropped\nwith details")
            partial.rename(local_dir / filename)
        return str(local_dir / filename)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    monkeypatch.setitem(SETS, AMAZON.name, SMALL)
    return hub


def test_a_set_is_downloaded_checked_and_converted(
    tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "fetch", AMAZON.name, "--data-root", str(tmp_path)]) == 0
    assert hub.calls == [("reczoo/AmazonElectronics_x1", name, "dataset") for name in FILES]
    assert open_dataset(AMAZON.name, tmp_path).rows == {"train": 2, "valid": 2, "test": 2}
    out = capsys.readouterr().out
    assert "train 2, valid 2, test 2 rows" in out
    assert "note: valid" in out
    with pytest.raises(UserError, match="exists already"):
        fetch(AMAZON.name, tmp_path)
    assert len(hub.calls) == 2  # nothing was downloaded for a set that is there
    fetch(AMAZON.name, tmp_path, overwrite=True)


def test_an_interrupted_download_goes_on(tmp_path: Path, hub: Hub) -> None:
    hub.per_call = 50
    stops = sum((len(text) - 1) // hub.per_call for text in FILES.values())
    assert stops >= 3
    for _ in range(stops):
        with pytest.raises(UserError) as caught:
            fetch(AMAZON.name, tmp_path)
        assert "line dropped" in str(caught.value)
        assert "run the command again to go on" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / AMAZON.name).exists()
    fetch(AMAZON.name, tmp_path)
    assert open_dataset(AMAZON.name, tmp_path).rows["test"] == 2
    assert hub.sent == sum(map(len, FILES.values()))  # no byte twice


def write(directory: Path, **changes: str | None) -> Path:
    directory.mkdir(parents=True)
    for name, text in (FILES | {f"{key}.csv": text for key, text in changes.items()}).items():
        if text is not None:
            (directory / name).write_text(text)
    return directory


def test_files_that_are_here_need_no_hub(tmp_path: Path, hub: Hub) -> None:
    fetch(AMAZON.name, tmp_path, source=write(tmp_path / "mine"))
    assert not hub.calls
    assert open_dataset(AMAZON.name, tmp_path).rows["train"] == 2


def test_a_wrong_sum_is_refused_with_both_sums(tmp_path: Path, hub: Hub) -> None:
    wrong = FILES["test.csv"].replace("1,7,5", "1,7,4")
    with pytest.raises(UserError) as caught:
        fetch(AMAZON.name, tmp_path, source=write(tmp_path / "mine", test=wrong))
    message = str(caught.value)
    assert str(tmp_path / "mine" / "test.csv") in message
    assert md5(wrong) in message
    assert md5(FILES["test.csv"]) in message
    assert "remove the file" in message
    assert "\n" not in message
    assert not (tmp_path / AMAZON.name).exists()
    assert (tmp_path / "mine" / "test.csv").read_text() == wrong  # a user's file is his to remove


def test_a_damaged_download_is_refused(tmp_path: Path, hub: Hub) -> None:
    write(tmp_path / "downloads" / AMAZON.name, train="x")
    with pytest.raises(UserError, match=f"train.csv: md5 {md5('x')}, published {md5(FILES['train.csv'])}"):
        fetch(AMAZON.name, tmp_path)
    (tmp_path / "downloads" / AMAZON.name / "train.csv").unlink()
    fetch(AMAZON.name, tmp_path)


def test_missing_files_and_unknown_names_are_one_line(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(UserError, match=r"mine: no file 'test\.csv'; amazonelectronics_x1 needs train\.csv, test\.csv"):
        fetch(AMAZON.name, tmp_path, source=write(tmp_path / "mine", test=None))
    with pytest.raises(UserError, match="nothing is there"):
        fetch(AMAZON.name, tmp_path, source=tmp_path / "nowhere")
    with pytest.raises(UserError, match="no published data set 'amazon_x1'; did you mean 'amazonelectronics_x1'"):
        fetch("amazon_x1", tmp_path)


def test_names_and_sums_are_the_published_ones() -> None:
    assert AMAZON.repository == "reczoo/AmazonElectronics_x1"
    assert KUAI.repository == "reczoo/KuaiVideo_x1"
    assert AMAZON.files == {
        "train.csv": "e9bf80b92985e463db18fdc753d347b5",
        "test.csv": "57a20e82fe736dd495f2eaf0669bf6d0",
    }
    assert KUAI.files == {
        "train.csv": "16f13734411532cc313caf2180bfcd56",
        "test.csv": "ba26c01caaf6c65c272af11aa451fc7a",
        "item_visual_emb_dim64.h5": None,
    }
    assert set(SETS) == {"amazonelectronics_x1", "kuaivideo_x1"}
