"""Loaded by every Python process of a conformance run: with LS_NODES=2 each local rank says that it is a node."""

import os
import socket

if os.environ.get("LS_NODES") == "2":
    _host = socket.gethostname()
    # asked anew each time: a spawned process learns its rank after it has started
    socket.gethostname = lambda: f"{_host}-{os.environ.get('LOCAL_RANK', '0')}"
