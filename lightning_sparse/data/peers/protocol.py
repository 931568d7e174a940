"""Messages between a client and the server of another node, and the keys that encrypt them.

========  ==========================================================================================
request   "get", number, int64 indices            or "ping", number
answer    "have", number, format, int64 [n, 4] of (requested index, index, height, width), then n
          frames of bytes; height 0: the frame is the reason why the file cannot be used
          "pong", number                          or "fail", number, reason: the request failed
========  ==========================================================================================
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Keys(NamedTuple):
    """CURVE keys, 40 characters of Z85 each."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def of(cls, run: bytes) -> Keys:
        """Derive the keys of a run from its secret."""
        import zmq
        from zmq.utils import z85

        pairs = []
        for role in (b"server", b"client"):
            secret = z85.encode(hashlib.blake2b(run, digest_size=32, person=role).digest())
            pairs += [zmq.curve_public(secret), secret]
        return cls(*pairs)
