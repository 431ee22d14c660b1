"""What rank 0 says while it measures reaches the terminal while it measures."""

import time

import pytest

from epmoe.core.bench import progress


def test_lines_appear_while_the_run_goes_on(capsys):
    shown, deadline = "", time.monotonic() + 20
    with progress.followed() as path:
        progress.say("T=1", path)
        while "T=1" not in shown and time.monotonic() < deadline:
            time.sleep(0.05)
            shown += capsys.readouterr().err
        assert shown == "bench: T=1\n"
        progress.say("T=2", path)
    assert capsys.readouterr().err == "bench: T=2\n", "the last line is not lost"
    assert not path.exists()


def test_an_error_ends_the_following(capsys):
    def fail():
        with progress.followed() as path:
            progress.say("T=1", path)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert capsys.readouterr().err == "bench: T=1\n"


def test_without_a_file_it_is_standard_error(capsys):
    progress.say("T=1", None)
    assert capsys.readouterr().err == "bench: T=1\n"
