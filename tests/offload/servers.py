"""Valkey or Redis servers on private ports of this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
CLUSTERED = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")


def need_a_server() -> Any:
    """The client's package; skips where it or the server is not there."""
    if PROGRAM is None:
        pytest.skip("there is neither a valkey-server nor a redis-server")
    return pytest.importorskip("redis", reason="redis-py is not installed")


def free_port() -> int:
    """Low enough that a cluster's second port fits."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


class Server:
    """One process; after `kill` it can `start` again on the same port, with nothing in it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.process: subprocess.Popen[str] | None = None
        for _ in range(20):
            self.port = free_port()
            if self._try_to_start():
                return
        raise RuntimeError("no port for a server")

    def _try_to_start(self) -> bool:
        assert PROGRAM is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            [PROGRAM, *options, *self.options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "Ready to accept connections" in line:
                return True
        self.kill()
        return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        if not self._try_to_start():
            raise RuntimeError(f"the server did not come back on port {self.port}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


class Parrot:
    """Answers the same bytes to whatever is asked."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.socket.getsockname()[1]}/0"
        self.clients: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.socket.accept()
                self.clients.append(client)
                self.threads.append(threading.Thread(target=self._answer, args=(client,)))
                self.threads[-1].start()

    def _answer(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            while client.recv(65536):
                client.sendall(self.answer)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.threads[0].join()
        for client in self.clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self.threads[1:]:
            thread.join()


class Cluster:
    """Three nodes without replicas."""

    def __init__(self, folder: Path, redis: Any) -> None:
        self.nodes: list[Server] = []
        try:
            for number in range(3):
                self.nodes.append(Server(folder, *CLUSTERED, "--cluster-config-file", f"node{number}.conf"))
            clients = [redis.Redis(port=node.port) for node in self.nodes]
            for number, client in enumerate(clients):
                first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                for begin in range(first, last + 1, 1000):
                    client.execute_command("CLUSTER", "ADDSLOTS", *range(begin, min(begin + 1000, last + 1)))
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
            for client in clients:
                wait_for_cluster(client)
                client.close()
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def wait_for_cluster(client: Any, tries: int = 200_000) -> None:
    """Until this node knows all three and finds that all is well; each time is a round trip."""
    for _ in range(tries):
        says = client.execute_command("CLUSTER INFO")
        if says["cluster_state"] == "ok" and says["cluster_known_nodes"] == "3":
            return
    raise RuntimeError(f"no cluster came of it: {says}")
