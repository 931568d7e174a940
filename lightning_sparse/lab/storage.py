"""A network file system for the lab: one node serves files, sshfs mounts them in the others.

Each connection gets an ``sftp-server`` of its own on the bare socket. sshfs can talk to that without ssh
(``-o directport``), so there are no keys, no daemon configuration and no encryption to pay for on a machine that plays
several at once; the namespace is what keeps everybody else out. Nodes mount the folder *over itself*, in a mount
namespace of their own: a script reads the path it always reads, and the bytes come over the storage node's link.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

PORT = 2022
SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")


def why_not() -> str | None:
    """Why no folder can be served and mounted here; None when it can."""
    if shutil.which("sshfs") is None:
        return "sshfs not found: install it (apt-get install sshfs), or leave out --storage."
    if _sftp_server() is None:
        return "sftp-server not found: install openssh-sftp-server, or leave out --storage."
    if not Path("/dev/fuse").exists():
        return "/dev/fuse not found: load the fuse module, or leave out --storage."
    return None


def server_command(address: str) -> list[str]:
    return [sys.executable, "-c", f"from {__name__} import serve; serve({address!r}, {PORT})"]


def mount_then(address: str, folder: Path) -> list[str]:
    """The words that, before a command inside a node, mount the folder and go on to the command."""
    path = str(folder.resolve())
    options = f"directport={PORT},reconnect"
    mount = f"sshfs -o {options} {address}:{shlex.quote(path)} {shlex.quote(path)}"
    # started from elsewhere, so that the working directory is not below the mount point while it is covered
    return ["sh", "-c", f'here=$(pwd); cd / && {mount} && cd "$here" && exec "$@"', "sh"]


def _sftp_server() -> str | None:
    return next((path for path in SFTP_SERVERS if Path(path).exists()), None)


def serve(address: str, port: int) -> None:
    server = _sftp_server()
    assert server is not None
    sessions: list[subprocess.Popen[bytes]] = []
    with socket.create_server((address, port)) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sessions = [each for each in sessions if each.poll() is None]
            sessions.append(subprocess.Popen([server], stdin=connection.fileno(), stdout=connection.fileno()))
            connection.close()
