"""Which transport is chosen and why, sharing a GPU, and what the guardian does: all without a GPU."""

import json
import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from epmoe.core import launch
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.ranks import gpu_sharing, guardian, transport
from epmoe.core.ranks.transport import choose_transport, one_device

OLD, NEW = (2, 28, 9), (2, 30, 7)


@pytest.mark.parametrize(
    ("ranks", "asked", "devices", "nccl", "chosen", "reason"),
    [
        (4, {}, 0, None, "gloo cpu cpu", "4 ranks on cpu over gloo (no CUDA device)"),
        (
            1,
            {},
            0,
            None,
            "single cpu cpu",
            "1 rank on cpu, nothing to communicate (no CUDA device)",
        ),
        (1, {}, 2, OLD, "single cuda:0 cuda:0", "1 rank on cuda:0, nothing to communicate"),
        (1, {}, 1, None, "single cuda:0 cuda:0", "1 rank on cuda:0, nothing to communicate"),
        (
            2,
            {},
            2,
            OLD,
            "nccl cuda:0 cuda:1",
            "2 ranks on cuda:0 to cuda:1 over NCCL 2.28.9, one GPU a rank",
        ),
        (
            2,
            {},
            8,
            OLD,
            "nccl cuda:0 cuda:1",
            "2 ranks on cuda:0 to cuda:1 over NCCL 2.28.9, one GPU a rank",
        ),
        (4, {}, 1, NEW, "nccl cuda:0 cuda:0 shared", "4 ranks share cuda:0 over NCCL 2.30.7"),
        (
            4,
            {},
            2,
            NEW,
            "nccl cuda:0 cuda:1 shared",
            "4 ranks share cuda:0 to cuda:1 over NCCL 2.30.7",
        ),
        (
            4,
            {},
            1,
            OLD,
            "gloo cpu cpu",
            "4 ranks on cpu over gloo (NCCL here is 2.28.9 and needs >= 2.30.0 to share a GPU, so gloo on cpu instead)",
        ),
        (
            4,
            {"device": "cpu"},
            8,
            NEW,
            "gloo cpu cpu",
            "4 ranks on cpu over gloo (cpu was asked for)",
        ),
        (
            4,
            {"transport": "gloo"},
            8,
            NEW,
            "gloo cpu cpu",
            "4 ranks on cpu over gloo (gloo was asked for)",
        ),
        (
            1,
            {"device": "cpu"},
            8,
            NEW,
            "single cpu cpu",
            "1 rank on cpu, nothing to communicate (cpu was asked for)",
        ),
        (
            1,
            {"world": 4},
            1,
            OLD,
            "nccl cuda:0 cuda:0",
            "1 rank on cuda:0 over NCCL 2.28.9, one GPU a rank",
        ),
        (1, {"world": 4}, 0, None, "gloo cpu cpu", "1 rank on cpu over gloo (no CUDA device)"),
    ],
)
def test_the_choice_and_its_reason(ranks, asked, devices, nccl, chosen, reason):
    choice = choose_transport(ranks, cuda_devices=devices, nccl_version=nccl, **asked)
    places = f"{choice.transport} {choice.device_of(0)} {choice.device_of(1)}"
    assert places + " shared" * choice.shared == chosen
    assert choice.reason == reason
    assert choice.fallback is ("instead" in reason)


@pytest.mark.parametrize(
    ("ranks", "asked", "devices", "nccl", "words"),
    [
        (2, {"device": "cuda"}, 0, None, "no CUDA device.*nvidia-smi"),
        (2, {"transport": "nccl"}, 0, None, "no CUDA device"),
        (2, {"device": "cuda"}, 2, None, "no NCCL here"),
        (4, {"device": "cuda"}, 1, OLD, r"2\.28\.9 and needs >= 2\.30\.0.*EPMOE_NCCL_LIBRARY"),
        (2, {"device": "cuda", "transport": "gloo"}, 2, NEW, "gloo works on cpu"),
        (2, {"device": "cpu", "transport": "nccl"}, 2, NEW, "NCCL on cuda"),
        (0, {}, 2, NEW, "give at least 1"),
        (2, {"device": "tpu"}, 2, NEW, "tpu"),
        (2, {"transport": "mpi"}, 2, NEW, "mpi"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_fix(ranks, asked, devices, nccl, words):
    kind = UnsupportedError if ranks and not {"tpu", "mpi"} & set(asked.values()) else InputError
    with pytest.raises(kind, match=words):
        choose_transport(ranks, cuda_devices=devices, nccl_version=nccl, **asked)


@pytest.mark.parametrize(("gpus", "chosen"), [(0, "cpu"), (1, "cuda"), (8, "cuda")])
def test_a_single_process_takes_a_gpu_where_there_is_one(monkeypatch, gpus, chosen):
    monkeypatch.setattr(transport.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(gpu_sharing, "nccl_version", lambda: None)  # one rank needs none
    assert one_device() == one_device("auto") == chosen
    assert one_device("cpu") == "cpu"
    with pytest.raises(InputError, match="tpu"):
        one_device("tpu")
    if gpus:
        assert one_device("cuda") == "cuda"
        return
    with pytest.raises(UnsupportedError, match="nvidia-smi"):
        one_device("cuda")


def test_nccl_versions_are_decoded():
    assert gpu_sharing.decode_version(23007) == (2, 30, 7)
    assert gpu_sharing.decode_version(22809) == (2, 28, 9)
    assert gpu_sharing.decode_version(2804) == (2, 8, 4)


def test_preload_puts_the_named_library_first_and_once():
    assert gpu_sharing.preload({}) == {}
    named = {"EPMOE_NCCL_LIBRARY": "/n/libnccl.so.2"}
    assert gpu_sharing.preload(named) == {"LD_PRELOAD": "/n/libnccl.so.2"}
    before = named | {"LD_PRELOAD": "/x/liba.so:/n/libnccl.so.2"}
    assert gpu_sharing.preload(before) == {"LD_PRELOAD": "/n/libnccl.so.2:/x/liba.so"}


def test_the_library_that_ranks_load_is_found_and_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("EPMOE_NCCL_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(InputError, match="is no file"):
        gpu_sharing.nccl_library()
    (tmp_path / "none.so").write_text("not a library")
    assert gpu_sharing.nccl_library() == str(tmp_path / "none.so")
    assert gpu_sharing.nccl_version() is None
    monkeypatch.delenv("EPMOE_NCCL_LIBRARY")
    monkeypatch.setenv("LD_PRELOAD", f"/x/liba.so:{tmp_path}/libnccl.so.2")
    assert gpu_sharing.nccl_library() == f"{tmp_path}/libnccl.so.2"


@pytest.fixture
def service(monkeypatch, tmp_path):
    """A stand-in for the control program, which keeps its state and its log in the pipe directory."""
    program = tmp_path / "bin" / gpu_sharing.SERVICE
    program.parent.mkdir()
    program.write_text(
        textwrap.dedent("""\
            #!/bin/sh
            up=$CUDA_MPS_PIPE_DIRECTORY/up
            if [ "$1" = "-d" ]; then echo "${CUDA_VISIBLE_DEVICES-all}" > "$up"; exit 0; fi
            read order
            [ -e "$up" ] || exit 1
            if [ "$order" = quit ]; then rm "$up"; touch "$CUDA_MPS_LOG_DIRECTORY/../quit"; fi
            """)
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_the_service_is_started_seen_and_told_to_quit_by_the_guardian(service, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    folder = service / "pool"
    folder.mkdir()
    directories = gpu_sharing.service_directories(folder)
    assert gpu_sharing.service_available()
    assert not gpu_sharing.service_running(os.environ | directories)
    assert gpu_sharing.start_service(directories)
    assert (folder / "service" / "up").read_text() == "all\n"  # else clients select devices twice
    assert gpu_sharing.service_running(os.environ | directories)
    _guard({"quit": [gpu_sharing.SERVICE], "env": directories})
    assert (folder / "quit").exists()
    assert not gpu_sharing.service_running(os.environ | directories)


def test_the_guardian_kills_what_it_watches_and_removes_its_folders(tmp_path):
    sleepers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2)]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    watched, forgotten = sleepers
    orders = [{"watch": s.pid} for s in sleepers]
    _guard(*orders, {"forget": forgotten.pid}, {"remove": str(folder)}, {"end": True})
    assert watched.wait(timeout=5) == -9
    assert forgotten.poll() is None
    forgotten.kill()
    forgotten.wait()
    assert not folder.exists()


def test_the_guardian_starts_fast():
    began = time.monotonic()
    _guard()
    assert time.monotonic() - began < 2


def _guard(*orders):
    lines = "".join(json.dumps(order) + "\n" for order in orders)
    program = Path(guardian.__file__)
    done = subprocess.run(
        [sys.executable, "-I", "-S", program],
        input=lines,
        text=True,
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_more_ranks_than_a_machine_takes_are_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr(transport, "cores", lambda: 2)
    monkeypatch.setattr(launch, "_start_guardian", lambda folder: pytest.fail("ranks were started"))
    with pytest.raises(InputError, match=r"1000000 ranks: .* at most 64 .* start fewer"):
        launch.RankPool(1_000_000)
    with pytest.raises(InputError, match="65 ranks"):
        transport.choose_here(65, "cpu")
    assert transport.choose_here(64, "cpu").ranks == 64


def test_a_machine_with_many_cores_takes_a_rank_for_each(monkeypatch):
    monkeypatch.setattr(transport, "cores", lambda: 128)
    assert transport.choose_here(128, "cpu").ranks == 128
