"""The system calls that a sandboxed child has no use for, refused by the kernel (seccomp, classic BPF).

Namespaces hide other processes and files; this closes what is left inside: one process of the sandbox taking over
another (its init above all, which dies with the judge), and signals that a stopped process could order for later.
Layout of the filter: linux/seccomp.h (`struct seccomp_data`), linux/filter.h (`struct sock_filter`).
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, RET|K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Offsets in seccomp_data; of the arguments the low halves, little-endian.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_X32 = 0x40000000
_F_SETSIG = 10

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_AF_VSOCK = 40  # reaches the host of a virtual machine, past the network namespace
DENIED: dict[str, dict[str, int]] = {
    # the memory and descriptors of another process
    "ptrace": {"x86_64": 101, "aarch64": 117},
    "process_vm_readv": {"x86_64": 310, "aarch64": 270},
    "process_vm_writev": {"x86_64": 311, "aarch64": 271},
    "pidfd_getfd": {"x86_64": 438, "aarch64": 438},
    "kcmp": {"x86_64": 312, "aarch64": 272},
    # a signal ordered for later: SIGCONT from a timer would wake a stopped process
    "timer_create": {"x86_64": 222, "aarch64": 107},
    "mq_notify": {"x86_64": 244, "aarch64": 184},
    # keys are the user's, not the sandbox's
    "add_key": {"x86_64": 248, "aarch64": 217},
    "request_key": {"x86_64": 249, "aarch64": 218},
    "keyctl": {"x86_64": 250, "aarch64": 219},
    # much kernel for nothing that a decoder does; io_uring would also walk past this filter
    "perf_event_open": {"x86_64": 298, "aarch64": 241},
    "bpf": {"x86_64": 321, "aarch64": 280},
    "userfaultfd": {"x86_64": 323, "aarch64": 282},
    "io_uring_setup": {"x86_64": 425, "aarch64": 425},
    # namespaces and mounts
    "unshare": {"x86_64": 272, "aarch64": 97},
    "setns": {"x86_64": 308, "aarch64": 268},
    "mount": {"x86_64": 165, "aarch64": 40},
    "umount2": {"x86_64": 166, "aarch64": 39},
    "pivot_root": {"x86_64": 155, "aarch64": 41},
    "open_by_handle_at": {"x86_64": 304, "aarch64": 265},
}
"""Numbers of the refused calls by machine; each fails with EPERM."""


def program(machine: str | None = None) -> bytes | None:
    """The filter as bwrap's --seccomp reads it, or None for a machine whose numbers are not known here.

    A call by another architecture's numbers (32 bit, x32) fails with EPERM as well.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    numbers = [call[machine] for call in DENIED.values()]
    refuse = _ERRNO | errno.EPERM
    # Every refusal jumps to the last instruction; distances count the instructions between.
    body = [(_JUMP_EQUAL, number) for number in numbers]
    count = 4 + len(body) + 3 + 4 + 1
    last = count - 1
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 0, last - 2, _ARCHITECTURES[machine]),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, last - 4, 0, _X32),
        *((code, last - (index + 1), 0, value) for index, (code, value) in enumerate(body, start=4)),
        (_JUMP_EQUAL, 0, 2, _SOCKET[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_EQUAL, 4, 3, _AF_VSOCK),
        (_JUMP_EQUAL, 0, 2, _FCNTL[machine]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_JUMP_EQUAL, 1, 0, _F_SETSIG),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, refuse),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
