"""The ``python`` of `tests.forked`: passes its arguments, streams and environment to the server, which forks, and exits
as the fork did. Where the server refuses the environment, it executes a real Python instead."""

import json
import os
import signal
import socket
import sys

server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(sys.argv[0]), "socket"))
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
program = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
if not program:
    server.close()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(program, number))
answer = server.recv(4, socket.MSG_WAITALL)
if len(answer) < 4:
    sys.exit("the process that forks has ended")
status = int.from_bytes(answer, "big", signed=True)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
