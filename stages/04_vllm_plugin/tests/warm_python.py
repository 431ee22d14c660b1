"""A Python that has imported vLLM already: importing it takes longer than most engines here live.

`warm_python.py` in the tests' way of speaking is a small program that takes the arguments of an interpreter. Asked for
`-m program` or a script, it has them run by a server, which has imported vLLM and forks: the run gets the asker's
environment, folder and output, a session of its own, and ends when the asker is killed. All else goes to the real
interpreter. One server for each setting of Triton's interpreter, which is decided at an import; a server starts with
the first run that needs it, serves all tests of a pytest run, and ends with that.
"""

import array
import contextlib
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback

DECIDES = "TRITON_INTERPRET"
PATIENCE = 240.0  # seconds for the imports of a server; nothing is compiled when it is the first
IMPORTED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.glm4_moe",
    "epmoe.vllm_plugin.engine_program",
    "epmoe.vllm_plugin.bare",
)


def write_program(path, python: str, keeper: int) -> str:
    """An executable at `path` that stands for `python`; its servers live beside it until process `keeper` ends."""
    here, name = os.path.split(os.path.abspath(__file__))
    call = f"{name.removesuffix('.py')}.ask({python!r}, {os.path.dirname(path)!r}, {keeper})"
    path.write_text(
        f"#!{python} -IS\nimport sys\nsys.path.insert(0, {here!r})\nimport warm_python\n{call}\n"
    )
    path.chmod(0o755)
    return str(path)


# ---- who asks


def ask(python: str, folder: str, keeper: int) -> None:
    """Have this process's arguments run, and end as the run ended."""
    arguments = sys.argv[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
        os.execv(python, [python, *arguments])
    order = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with connect(python, folder, keeper) as server:
        text = json.dumps(order).encode()
        fds = array.array("i", [1, 2])
        server.sendmsg(
            [struct.pack("!I", len(text))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        )
        server.sendall(text)
        ended = server.recv(1)
    sys.exit(ended[0] if ended else 1)


def connect(python: str, folder: str, keeper: int) -> socket.socket:
    """To the server for this environment; the first one here starts it."""
    at = os.path.join(folder, f"server-{os.environ.get(DECIDES, '0')}")
    with open(f"{at}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return reach(at)
        except OSError:
            start(python, at, keeper)
        until = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                return reach(at)
            if time.monotonic() > until:
                with open(f"{at}.log") as log:
                    sys.exit(f"the server with vLLM does not start:\n{log.read()}")
            time.sleep(0.1)


def reach(at: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(at)
    except OSError:
        client.close()
        raise
    return client


def start(python: str, at: str, keeper: int) -> None:
    dropped = ("EPMOE_STAGE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    with open(f"{at}.log", "w") as log:
        subprocess.Popen(
            [python, __file__, at, str(keeper)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


# ---- the server


def serve(at: str, keeper: int) -> None:
    for name in IMPORTED:
        __import__(name)
    gc.freeze()  # what is imported is shared with every run: none looks through it for garbage
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # nobody here waits for those that look after a run
    with contextlib.suppress(FileNotFoundError):
        os.unlink(at)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(at)
        server.listen()
        server.settimeout(1.0)
        while alive(keeper):
            with contextlib.suppress(TimeoutError):
                look_after(server.accept()[0])
    os._exit(0)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def look_after(client: socket.socket) -> None:
    """Fork a process that has one order run: it says how the run ended, or ends it when nobody waits any more."""
    if os.fork():
        client.close()
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    client.setblocking(True)
    order, fds = receive(client)
    run = os.fork()
    if not run:
        client.close()
        carry_out(order, fds)
    watched = os.pidfd_open(run)
    ready, _, _ = select.select([watched, client], [], [])
    if watched not in ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def receive(client: socket.socket) -> tuple[dict, list[int]]:
    head, fds, _, _ = socket.recv_fds(client, 4, 2)
    wanted, text = struct.unpack("!I", head)[0], b""
    while len(text) < wanted:
        part = client.recv(wanted - len(text))
        if not part:
            raise EOFError("who asked has ended in the middle of the order")
        text += part
    return json.loads(text), fds


def carry_out(order: dict, fds: list[int]) -> None:
    """Become what a fresh interpreter would be, but for what is imported. Does not return."""
    os.setsid()
    for fd, place in zip(fds, (1, 2), strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    code = 0
    try:
        execute(order["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def execute(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
