"""python served.py COMMAND...: starts a server, asks it one question, stops it as Ctrl+C does, exits with its code."""
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

QUESTION = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 4, "thinking": {"type": "disabled"}}


def main(command):
    # A session of its own: a terminal sends Ctrl+C to all that runs in it, make and the server that it started.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            said = map(re.compile(r"listening on (http\S+)").search, server.stdout)
            address = next(filter(None, said), None)
            return server.wait(60) or 1 if address is None else ask(address[1], server)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def ask(address, server):
    """The server's exit code, when it has answered."""
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(QUESTION).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"]
    os.killpg(server.pid, signal.SIGINT)
    code = server.wait(60)
    return 0 if server.args[0] == "make" and code == -signal.SIGINT else code   # make itself dies of it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
