"""Files that people hand in or ask for: what is read and written, and what is refused with the file's name."""

import os
from pathlib import Path

import pytest

from epmoe.core.errors import InputError
from epmoe.core.reading import read_json, read_text, write_whole


def test_what_is_written_is_read_and_nothing_else_is_left(tmp_path):
    file = tmp_path / "new" / "folder" / "notes.json"
    write_whole(file, '{"what": "\u00e9"}')
    write_whole(file, '{"what": "\u00fc"}')
    assert read_json(file) == {"what": "\u00fc"}
    assert list(file.parent.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    file = tmp_path / "notes.txt"
    write_whole(file, "old")
    real = Path.write_text

    def half(self, text, **options):
        real(self, text[:1], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(InputError, match=r"notes\.txt cannot be written: No space left"):
        write_whole(file, "new")
    assert read_text(file) == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "answer")
        assert os.read(reader, 100) == b"answer"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below", tmp_path / "null\0byte"):
        with pytest.raises(InputError, match="cannot be written") as refused:
            write_whole(path, "text")
        assert str(refused.value).startswith(str(path))
