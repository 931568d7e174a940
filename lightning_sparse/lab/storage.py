"""A network file system for the lab: one node serves files, the others mount them with sshfs.

Nodes mount the folder over itself in their own mount namespace, so a script reads its usual path.
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


def unavailable_reason() -> str | None:
    if shutil.which("sshfs") is None:
        return "sshfs not found: install it (apt-get install sshfs), or omit --storage."
    if sftp_server() is None:
        return "sftp-server not found: install openssh-sftp-server, or omit --storage."
    if not Path("/dev/fuse").exists():
        return "/dev/fuse not found: load the fuse module, or omit --storage."
    return None


def server_command(address: str) -> list[str]:
    return [sys.executable, "-c", f"from {__name__} import serve; serve({address!r}, {PORT})"]


def mount_prefix(address: str, folder: Path) -> list[str]:
    """Return the command prefix that mounts the folder in a node and then runs the command."""
    path = str(folder.resolve())
    options = f"directport={PORT},reconnect"
    mount = f"sshfs -o {options} {address}:{shlex.quote(path)} {shlex.quote(path)}"
    # mount from /, so that the working directory is not inside the mount point
    return ["sh", "-c", f'here=$(pwd); cd / && {mount} && cd "$here" && exec "$@"', "sh"]


def sftp_server() -> str | None:
    return next((path for path in SFTP_SERVERS if Path(path).exists()), None)


def serve(address: str, port: int) -> None:
    server = sftp_server()
    assert server is not None
    sessions: list[subprocess.Popen[bytes]] = []
    with socket.create_server((address, port)) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sessions = [session for session in sessions if session.poll() is None]
            # One sftp-server per connection on a plain socket, which sshfs supports without ssh (``-o directport``): no
            # keys, no encryption cost. The namespace isolates it from other users.
            sessions.append(subprocess.Popen([server], stdin=connection.fileno(), stdout=connection.fileno()))
            connection.close()
