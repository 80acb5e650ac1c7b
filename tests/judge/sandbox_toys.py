"""What a hostile source candidate tries in its sandbox. A test copies this file and appends PARAMETERS to the copy.

Most try when they are built, and tell through `describe` how it went: "done", or the error's name. What has no end
is begun by `generate`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

PARAMETERS = {}


class Told:
    def __init__(self, facts=None, act=None, tell=None):
        self.act = act
        self.describe = tell or (lambda: facts or {})

    def generate(self, prompts, max_new_tokens, stop_ids):
        if self.act:
            self.act()
        return [{"ids": [1], "stop_reason": "length"} for _ in prompts]


def outcome(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"


def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")


def honest(deployment, plan, threads):
    return Told({"pid": os.getpid(), "uid": os.getuid(), "threads": threads})


def connects(deployment, plan, threads):
    def to(family, address):
        with socket.socket(family) as client:
            client.settimeout(2)
            client.connect(address)

    return Told(
        {
            "inet": outcome(to, socket.AF_INET, ("127.0.0.1", PARAMETERS["port"])),
            "abstract": outcome(to, socket.AF_UNIX, "\0" + PARAMETERS["abstract"]),
            "path": outcome(to, socket.AF_UNIX, PARAMETERS["path"]),
            "vsock": outcome(to, socket.AF_VSOCK, (2, 1)),
            "interfaces": [name for _, name in socket.if_nameindex()],
        }
    )


def reads(deployment, plan, threads):
    def look(text):
        path = Path(text)
        if path.is_dir():
            list(path.iterdir())
        else:
            path.read_bytes()

    return Told({path: outcome(look, path) for path in PARAMETERS["paths"]})


def writes(deployment, plan, threads):
    def write(text):
        path = Path(text)
        if path.is_dir():
            (path / "written-by-a-candidate").write_text("here")
        else:
            with path.open("ab") as file:
                file.write(b"here")

    return Told({path: outcome(write, path) for path in PARAMETERS["paths"]})


def looks_at_processes(deployment, plan, threads):
    parent = PARAMETERS["pid"]

    def memory():
        Path(f"/proc/{parent}/mem").open("rb").close()

    buffer = ctypes.create_string_buffer(8)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    remote = (ctypes.c_size_t * 2)(PARAMETERS["address"], 8)
    return Told(
        {
            "pids": sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()),
            "memory": outcome(memory),
            "attach": outcome(call, 101, 16, parent, 0, 0),  # ptrace(PTRACE_ATTACH)
            "attach to init": outcome(call, 101, 16, 1, 0, 0),
            "read": outcome(call, 310, parent, local, 1, remote, 1, 0),  # process_vm_readv
            "kill": outcome(os.kill, parent, signal.SIGKILL),
            "parent": os.getppid(),
            "namespaces": outcome(call, 272, 0x10000000),  # unshare(CLONE_NEWUSER)
            "new user namespace by clone": outcome(call, 56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0),
            "init": [path.name for path in Path("/proc/1").iterdir()],
            "capabilities": [line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("Cap")],
        }
    )


def kills_all(deployment, plan, threads):
    """Every process that it may signal: init does not take it, and nothing else is there."""
    return Told({"all": outcome(os.kill, -1, signal.SIGKILL), "init": outcome(os.kill, 1, signal.SIGKILL)})


def lists_descriptors(deployment, plan, threads):
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except OSError:
            continue  # the descriptor of this listing
    return Told({"own": found})


def lists_environment(deployment, plan, threads):
    return Told(dict(os.environ))


def forks_without_end(deployment, plan, threads):
    def fork():
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.001)

    return Told(act=fork)


def starts_threads_without_end(deployment, plan, threads):
    def start():
        while True:
            threading.Thread(target=signal.pause, daemon=True).start()

    return Told(act=start)


def allocates_without_end(deployment, plan, threads):
    def allocate():
        held = []
        while True:
            held.append(b"x" * (1 << 24))

    return Told(act=allocate)


def fills_the_disk(deployment, plan, threads):
    """Bytes that went into one file, and into many, until the system said no."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    block = b"x" * (1 << 18)

    def fill(folder, files):
        written = 0
        try:
            for number in range(files):
                with Path(folder, f"{files}-{number}").open("wb", buffering=0) as file:
                    while True:
                        try:
                            written += file.write(block)
                        except OSError as error:
                            if error.errno != errno.EFBIG:
                                raise
                            break
        except OSError as error:
            return written, errno.errorcode[error.errno]
        return written, ""

    facts = {"one": fill("/tmp", 1), "many": fill("/tmp", 1000), "shared memory": fill("/dev/shm", 1000)}
    for folder in ("/", "/dev", "/tmp/home", "/sys", "/proc", "/run", "/var", "/work", "/home"):
        facts[folder] = fill(folder, 1)[0] if folder != "/tmp/home" else 0
    return Told(facts)


def leaves_processes(deployment, plan, threads):
    """Daemons in sessions of their own that take no SIGTERM and burn the processor; `count` of them."""
    for _ in range(PARAMETERS["count"]):
        if between := os.fork():
            os.waitpid(between, 0)
            continue
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG: no longer
        while True:
            pass
    if PARAMETERS.get("exits"):
        os._exit(7)

    def describe():
        return {"pids": [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]}

    return Told(tell=describe)


def burns_between_questions(deployment, plan, threads):
    def burn():
        while True:
            pass

    for _ in range(2):
        threading.Thread(target=burn, daemon=True).start()
    return leaves_processes(deployment, plan, threads)


class Event(ctypes.Structure):  # struct sigevent
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("pad", ctypes.c_int * 12),
    ]


def orders_signals(deployment, plan, threads):
    """A timer that sends SIGCONT, which wakes what SIGSTOP stopped; then it burns the processor."""
    import fcntl

    signal.signal(signal.SIGCONT, lambda *_: None)  # an ignored one would be sent once only

    def order():
        for number in range(8):  # one that is due while SIGSTOP comes is dropped for ever
            timer, event = ctypes.c_int(), Event(None, signal.SIGCONT, 0)
            call(222, 1, ctypes.byref(event), ctypes.byref(timer))  # timer_create(CLOCK_MONOTONIC)
            times = (ctypes.c_long * 4)(0, 20_000_000, 0, 5_000_000 + 7_100_000 * number)
            call(223, timer, 0, times, 0)  # timer_settime, every 20 ms

    facts = {"timer": outcome(order), "setsig": outcome(fcntl.fcntl, 1, 10, signal.SIGCONT)}
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    return Told(facts)


def forks_on_and_on(deployment, plan, threads):
    """A process that forks and ends, again and again, so that no list of processes holds it for long."""
    if os.fork() == 0:
        os.setsid()
        while True:
            if os.fork():
                os._exit(0)
    return Told({})


def changes_the_log(deployment, plan, threads):
    import fcntl

    print("first line", flush=True)
    facts = {}
    for number in (1, 2):
        facts[f"truncate {number}"] = outcome(os.ftruncate, number, 0)
        facts[f"seek {number}"] = outcome(os.lseek, number, 0, os.SEEK_SET)
        facts[f"flags {number}"] = outcome(fcntl.fcntl, number, fcntl.F_SETFL, 0)
        facts[f"place {number}"] = str(Path(f"/proc/self/fd/{number}").readlink())
        with Path(f"/proc/self/fd/{number}").open("wb", buffering=0) as again:
            facts[f"again {number}"] = outcome(again.truncate, 0)
    print("second line", flush=True)
    sys.stdout.write("x" * PARAMETERS["flood"])
    print("\nlast line", flush=True)
    return Told(facts)


def computes_in_threads(deployment, plan, threads):
    import torch

    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(PARAMETERS["seed"])
    a = torch.randint(-8, 8, (300, 400), generator=generator)
    b = torch.randint(-8, 8, (400, 200), generator=generator)
    product = (a.double() @ b.double()).long()
    workers = len(list(Path("/proc/self/task").iterdir()))
    return Told({"sum": int(product.sum()), "threads": workers, "cores": os.cpu_count()})


def compiles_c(deployment, plan, threads):
    source, library = Path("/tmp/add.c"), Path("/tmp/libadd.so")
    source.write_text("#include <math.h>\nint add(int a, int b) { return a + (int)sqrt((double)b); }\n")
    subprocess.run([PARAMETERS["compiler"], "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    return Told({"sum": ctypes.CDLL(str(library)).add(40, 4)})


def compiles_with_inductor(deployment, plan, threads):
    import torch

    @torch.compile
    def function(x):
        return (x.sin() * 2 + x.cos()).sum()

    x = torch.linspace(0, 1, 1000)
    expected = (x.sin() * 2 + x.cos()).sum()
    compiled = float(function(x))
    caches = [str(path) for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")]
    return Told({"difference": abs(compiled - float(expected)), "caches": len(caches)})


def computes_on_a_gpu(deployment, plan, threads):
    """A matrix product, and a Triton kernel compiled into the private cache."""
    global tl  # where Triton looks names up

    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, y, size: tl.constexpr):
        at = tl.arange(0, size)
        tl.store(y + at, tl.load(x + at) * 2)

    generator = torch.Generator().manual_seed(PARAMETERS["seed"])
    a = torch.randint(-8, 8, (512, 256), generator=generator).to(deployment.platform, torch.bfloat16)
    b = torch.randint(-8, 8, (256, 128), generator=generator).to(deployment.platform, torch.bfloat16)
    x = torch.arange(1024.0, device=deployment.platform)
    y = torch.empty_like(x)
    double[(1,)](x, y, 1024)
    return Told(
        {
            "sum": int((a.float() @ b.float()).double().sum()),
            "bf16": bool(torch.isfinite(a @ b).all()),
            "triton": bool((y == 2 * x).all()),
            "cache": len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))),
            "devices": torch.cuda.device_count(),
            "nodes": sorted(path.name for path in Path("/dev").glob("nvidia*")),
        }
    )


def waits(deployment, plan, threads):
    def wait():
        while True:
            signal.pause()

    return Told(act=wait)


def limits(deployment, plan, threads):
    names = ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_AS")
    return Told({name: resource.getrlimit(getattr(resource, name)) for name in names})


def engine(deployment, plan, threads):
    """An honest one: our own decoder."""
    from engine.judge.backends import build_engine

    return build_engine(deployment, plan, threads)
