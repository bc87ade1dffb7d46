"""Whom a script talks to: named where a sandbox cannot hold it back."""

import os
import socket
import subprocess
import sys
import tempfile

from flambeau.tune.doctor.connections import outside_connections


def test_a_socket_file_of_another_process_is_named_and_ones_own_is_not() -> None:
    code = (
        "import socket, sys\nwith socket.socket(socket.AF_UNIX) as one, socket.socketpair()[0]:\n"
        "    one.connect(sys.argv[1]); print('connected', flush=True); sys.stdin.read()"
    )
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/database.sock")
        server.listen()
        with subprocess.Popen(
            [sys.executable, "-c", code, f"{folder}/database.sock"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as script:
            assert script.stdout is not None
            assert script.stdin is not None
            script.stdout.readline()
            accepted, _ = server.accept()
            with accepted:
                assert outside_connections([script.pid]) == {f"{folder}/database.sock"}
                assert outside_connections([script.pid, os.getpid()]) == set()
            script.stdin.close()
