"""Options of the shared suite that mean nothing end in one line, before anything is collected or started."""

import subprocess
import sys

import pytest

SUITE = "epmoe.core.conformance"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--stage", "nobodys"), "no stage called 'nobodys'"),
        (("--stage", "all_gather+nobodys"), "nobodys"),
        (("--ranks", "0"), "0 ranks: give at least 1"),
        (("--ranks", "100000"), "100000 ranks: one machine takes at most"),
        (("--device", "tpu"), "device 'tpu'"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_wrong_option_is_refused_in_one_line(words, says, tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", SUITE, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "INTERNALERROR" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1
    assert says in lines[0]
