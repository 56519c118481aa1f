"""Guards against tuning tables that others have written, that hold nonsense, or that differ between ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.errors import InvalidState
from weft.kernels import tables as tuning_files
from weft.kernels.tables import Tuning
from weft.kernels.tuning import DEFAULT, FORMS, Table
from weft.limits import LAYOUTS, MAX_SMALL_TOKENS

TABLE = Table(
    most_tokens=((("dispatch", "masked", "bytes"), 64), (("combine", "rank_major", "plain"), 0)),
    most_tokens_else=128,
    num_sms=((8, 12), (128, 24)),
    num_sms_else=40,
    node_num_sms=(((2, "dispatch", "masked"), 12), ((4, "dispatch", "masked"), 8)),
)
NODES = {"node_ranks": 2, "op": "combine", "layout": "masked", "num_sms": 8}
ENTRY = {"op": "combine", "layout": "masked", "form": "plain", "most_tokens": 1}
MEASURED = Tuning("cpu", 2, TABLE, "a test", {"hidden": 7168})


def written(folder: Path, **changes: Any) -> Path:
    """A file as `weft tune` writes it, with other values."""
    path = tuning_files.path_in(folder, "cpu", 2)
    tuning_files.write(path, MEASURED)
    if changes:
        path.write_text(json.dumps({**json.loads(MEASURED.text()), **changes}))
    return path


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    path = written(folder)
    assert path.name == "tuning-cpu-2.json"
    assert tuning_files.path_in(folder, "NVIDIA H200", 4).name == "tuning-nvidia-h200-4.json"
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert tuning_files.read(path) == tuning_files.find("cpu", 2, str(folder)) == MEASURED
    assert tuning_files.from_json(json.loads(json.dumps(tuning_files.as_json(TABLE)))) == TABLE
    assert sorted(file.name for file in folder.iterdir()) == [path.name]


def test_without_a_table_there_are_the_defaults(tmp_path: Path) -> None:
    written(tmp_path)
    for name, num_ranks, folder in (("cpu", 3, str(tmp_path)), ("cpu", 2, ""), ("cpu", 2, str(tmp_path / "none"))):
        found = tuning_files.find(name, num_ranks, folder)
        assert (found.table, found.source) == (DEFAULT, "the defaults of weft.kernels.tuning; not measured")


def test_the_tables_that_come_with_weft_are_sound_and_say_their_source() -> None:
    files = sorted((Path(weft.__file__).parent / "tables").glob("*.json"))
    assert [file.stem for file in files] == ["h200-2", "h200-4"]
    for file in files:
        shipped = tuning_files.read(file, is_shipped=True)
        assert tuning_files.find(shipped.device_name, shipped.num_ranks, "") == shipped
        assert shipped.table != DEFAULT or shipped.source.startswith("not measured")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "no table of format 1"),
        ({"device_name": None}, "texts"),
        ({"shape": []}, "an object"),
        ({"num_ranks": "2"}, "num_ranks is '2'"),
        ({"crossovers": {}}, "crossovers must be a list"),
        ({"crossovers": [{**ENTRY, "form": "bytes"}]}, "'bytes' is unknown"),
        ({"crossovers": [ENTRY, ENTRY]}, "there twice"),
        ({"most_tokens_else": MAX_SMALL_TOKENS + 1}, "allowed are 0 to 512"),
        ({"most_tokens_else": True}, "most_tokens_else is True"),
        ({"num_sms": [{"most_tokens": 8, "num_sms": 0}]}, "num_sms is 0"),
        ({"num_sms": [{"most_tokens": 8, "num_sms": 4}] * 2}, "must ascend"),
        ({"num_sms_else": 1e9}, "num_sms_else is 1000000000.0"),
        ({"node_num_sms": [NODES, NODES]}, "there twice"),
        ({"node_num_sms": [{**NODES, "op": "both"}]}, "'both', 'masked' is unknown"),
        ({"node_num_sms": [{**NODES, "node_ranks": 0}]}, "node_ranks is 0"),
    ],
)
def test_nonsense_is_not_used(
    changes: dict[str, Any], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=named):
        tuning_files.read(written(tmp_path, **changes))
    assert tuning_files.find("cpu", 2, str(tmp_path)).table == DEFAULT
    assert named in warnings_of(caplog)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"7", b" " * (2 << 20)])
def test_what_is_no_json_is_not_used(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path).write_bytes(content)
    assert tuning_files.find("cpu", 2, str(tmp_path)).table == DEFAULT
    assert "is not used" in warnings_of(caplog)


def test_a_place_that_others_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "mine"
    path = written(folder)
    path.chmod(0o666)
    with pytest.raises(InvalidState, match="only this user"):
        tuning_files.read(path)
    path.chmod(0o600)
    folder.chmod(0o777)
    with pytest.raises(InvalidState, match="not a private folder"):
        tuning_files.read(path)
    with pytest.raises(InvalidState, match="not a private folder"):
        tuning_files.write(path, MEASURED)
    folder.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(InvalidState, match="not a private folder"):
        tuning_files.read(link / path.name)
    target = tmp_path / "elsewhere.json"
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        tuning_files.read(path)
    assert tuning_files.find("cpu", 2, str(folder)).table == DEFAULT
    assert "is not used" in warnings_of(caplog)
    path.unlink()
    written(folder)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as another user's files look
    assert tuning_files.find("cpu", 2, str(folder)).table == DEFAULT


def tables_seen(comm: weft.Communicator, folders: list[str]) -> list[Table]:
    """The table of the object of a rank that has a cache folder of its own."""
    os.environ["WEFT_CACHE_DIR"] = folders[comm.rank]
    shape: dict[str, Any] = {"num_experts": 6, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 8}
    with weft.ExpertParallel(comm, **shape) as ep:
        seen = [ep._shape.table]
        r = ep.dispatch(torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int64))
        ep.combine(r.x, r.handle)
    return seen


def test_ranks_with_other_tables_take_that_of_rank_0(tmp_path: Path) -> None:
    written(tmp_path / "0")
    written(tmp_path / "1", most_tokens_else=3)
    folders = [str(tmp_path / "0"), str(tmp_path / "1")]
    assert weft.spawn(tables_seen, 2, (folders,), device="cpu") == [[TABLE]] * 2
    (tmp_path / "0" / "tuning-cpu-2.json").write_text("{")
    assert weft.spawn(tables_seen, 2, (folders,), device="cpu") == [[DEFAULT]] * 2


def test_every_form_has_a_place_in_a_file() -> None:
    every = [(op, layout, form) for op, forms in FORMS.items() for layout in LAYOUTS for form in forms]
    table = Table(most_tokens=tuple((key, most) for most, key in enumerate(every)))
    assert tuning_files.from_json(tuning_files.as_json(table)) == table
