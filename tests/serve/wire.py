"""A way to a server that can be cut, for tests of what becomes of those who used it."""

import socket
import threading


class Wire:
    """A way to a server that can be cut: every connection through it breaks."""

    def __init__(self, port: int) -> None:
        self._to, self.open, self._pairs = port, True, []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._door.accept()
            except OSError:
                return
            if not self.open:
                here.close()
                continue
            there = socket.create_connection(("127.0.0.1", self._to))
            self._pairs.append((here, there))
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        try:
            while block := one.recv(1 << 14):
                other.sendall(block)
        except OSError:
            pass
        for end in (one, other):
            end.close()

    def cut(self) -> None:
        for pair in self._pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        self._pairs = []

    def close(self) -> None:
        self.cut()
        self._door.close()
