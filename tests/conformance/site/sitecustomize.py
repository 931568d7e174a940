"""Loaded by every Python process of a conformance run. With LS_NODES=2 each local rank acts as a node."""

import os
import socket

if os.environ.get("LS_NODES") == "2":
    _host = socket.gethostname()
    # read at each call, because a spawned process gets its rank after it has started
    socket.gethostname = lambda: f"{_host}-{os.environ.get('LOCAL_RANK', '0')}"
