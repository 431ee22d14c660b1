"""A process that hangs says where, and goes on saying so when Triton has compiled in it."""

import os
import subprocess
import sys
import time

import pytest

from epmoe.core.ranks import stacks

START = "import time\nfrom epmoe.core.ranks import stacks\nstacks.tell_on_request()\n"
COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
@triton.jit
def fill(out, n: tl.constexpr):
    tl.store(out + tl.arange(0, n), 1.0)
source = ASTSource(fill, {"out": "*fp32", "n": "constexpr"}, constexprs={"n": 32})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""
HANG = "def wait_for_ever():\n    print('waiting', flush=True)\n    time.sleep(60)\nwait_for_ever()"


@pytest.mark.parametrize("between", ["", COMPILE], ids=["plain", "after-triton"])
def test_a_hanging_process_says_where(between, tmp_path):
    program, log = tmp_path / "program.py", tmp_path / "log.txt"
    program.write_text(START + between + HANG)
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}  # an empty one: Triton really compiles
    env = {**os.environ, **cache, "TRITON_INTERPRET": "0"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(program)], stdout=file, stderr=subprocess.STDOUT, env=env
        )
    try:
        wait_for(log, "waiting")
        stacks.ask(process)
        wait_for(log, "in wait_for_ever")
    finally:
        process.kill()
        process.wait()
    stacks.ask(process)  # gone: there is nobody to ask, which is no error


def wait_for(log, words, seconds=60):
    until = time.monotonic() + seconds
    while words not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
