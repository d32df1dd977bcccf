"""TLS on the load client's sockets: one read of the socket decrypts all records in it."""

from __future__ import annotations

import socket
import ssl

SEALED_BYTES = 192 * 1024
"""Maximum encrypted bytes of one read."""
RECORD_BYTES = 16384
"""Maximum bytes in one record of TLS: what may be left of an earlier read."""


def client_context(authority: str, protocol: str) -> ssl.SSLContext:
    """A context that trusts the certificates in the file ``authority`` and offers one protocol by ALPN."""
    context = ssl.create_default_context(cafile=authority)
    context.set_alpn_protocols([protocol])
    return context


class TlsSession:
    """TLS on a connected socket, which is its caller's. ``recv_into`` is that of the socket, decrypted."""

    def __init__(self, context: ssl.SSLContext, connection: socket.socket, host: str) -> None:
        """Shakes hands; the socket blocks. Raises OSError."""
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._sealed = memoryview(bytearray(SEALED_BYTES))
        while True:
            try:
                self._tls.do_handshake()
                connection.sendall(self._outgoing.read())
                return
            except ssl.SSLWantReadError:
                connection.sendall(self._outgoing.read())
                if not (data := connection.recv(SEALED_BYTES)):
                    raise ConnectionError("closed in the TLS handshake") from None
                self._incoming.write(data)

    @property
    def protocol(self) -> str | None:
        """The protocol that the server chose by ALPN."""
        return self._tls.selected_alpn_protocol()

    def seal(self, data: bytes) -> bytes:
        """``data`` as records to send."""
        self._tls.write(data)
        return self._outgoing.read()

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Read into ``buffer``; 0 once the server has closed the connection.

        What does not fit stays for a later read: SEALED_BYTES + RECORD_BYTES hold all of a read.
        Raises BlockingIOError when no record is complete.
        """
        # Without a read, which would wait, what came with the handshake is decrypted first.
        if not self._incoming.pending:
            size = self._connection.recv_into(self._sealed, min(len(buffer), SEALED_BYTES))
            if not size:
                return 0
            self._incoming.write(self._sealed[:size])
        view, total = memoryview(buffer), 0
        try:
            while total < len(view):
                piece = self._tls.read(min(len(view) - total, RECORD_BYTES))
                if not piece:
                    return total  # closed by the server
                view[total : total + len(piece)] = piece
                total += len(piece)
        except ssl.SSLWantReadError:
            if not total:
                raise BlockingIOError from None
        except ssl.SSLZeroReturnError:
            pass
        except ssl.SSLError as error:
            raise ConnectionError(str(error)) from None
        return total
