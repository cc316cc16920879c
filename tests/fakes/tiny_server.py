"""A program that stands in for a process of the local cluster: serves on a port, or fails as it is told.

tiny_server.py PORT INSTANCES     answers every GET with a leader and these instance ids (comma-separated)
tiny_server.py PORT INSTANCES stubborn    ignores SIGTERM
tiny_server.py exit CODE MESSAGE  says MESSAGE and exits with CODE
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)


def main() -> None:
    first, second, *rest = sys.argv[1:]
    if first == "exit":
        print(*rest, file=sys.stderr)
        sys.exit(int(second))
    if rest:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    instances = [{"instance_id": name} for name in second.split(",") if name]
    sources = [{"node_id": "node", "state": "live"}]
    Handler.body = json.dumps({"leader": "node-1", "instances": instances, "sources": sources}).encode()
    HTTPServer(("127.0.0.1", int(first)), Handler).serve_forever()


if __name__ == "__main__":
    main()
