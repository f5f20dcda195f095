"""A packed wheel is smaller and holds the same files, or stays as it was."""

import sys
import zipfile
from contextlib import nullcontext

import pack_wheel
import pytest

FILES = {"stand/one.py": b"import numpy\n" * 400 + bytes(range(256)), "stand/two.so": bytes(5000), "none.txt": b""}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "stand-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in FILES.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), content, zipfile.ZIP_DEFLATED)
    return path


def test_it_holds_the_same_files_in_less_room(wheel, monkeypatch, capsys):
    before = wheel.stat().st_size
    monkeypatch.setattr(sys, "argv", ["pack_wheel.py", str(wheel)])
    pack_wheel.main()
    assert pack_wheel.contents(wheel) == FILES and wheel.stat().st_size < before
    with zipfile.ZipFile(wheel) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(2026, 1, 2, 3, 4, 6)}
    assert f"{before:,} bytes packed into {wheel.stat().st_size:,}" in capsys.readouterr().out
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]


def test_the_compressor_is_given_back():
    before = zipfile._get_compressor
    with pack_wheel.zopfli_zips():
        assert zipfile._get_compressor is not before
    assert zipfile._get_compressor is before


def test_other_contents_leave_the_wheel_alone(wheel, monkeypatch):
    before = wheel.read_bytes()

    def spoiled(path, read=pack_wheel.contents):
        return {name: content + b"!" * (path != wheel) for name, content in read(path).items()}

    monkeypatch.setattr(pack_wheel, "contents", spoiled)
    monkeypatch.setattr(pack_wheel, "zopfli_zips", nullcontext)
    with pytest.raises(zipfile.BadZipFile, match="must hold the same files"):
        pack_wheel.pack(wheel)
    assert wheel.read_bytes() == before
